"""Show a trained network layer by layer, in numbers and as a picture, for `adam_mpi inspect --layers` and `--image`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from adam_mpi.inference.predict import best, read_images
from adam_mpi.inference.trained import Trained

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Bars of a histogram, from empty to full."""
BINS = 24
"""Bars of a histogram."""


def layer_table(model: Trained) -> Iterator[str]:
    """Yield the shapes of each layer for `inspect --layers`, with statistics and a histogram of each tensor."""
    yield f"{'layer':12}{'input':>14}{'output':>14}{'parameters':>12}"
    for shape in model.shapes:
        sizes = f"{_shape_text(shape.input):>14}{_shape_text(shape.output):>14}"
        yield f"{shape.name:12}{sizes}{shape.parameters:12,}"
        for part in ("weight", "bias"):
            if f"{shape.name}/{part}" in model.tensors:
                yield f"  {part:8}{statistics(model.tensors[f'{shape.name}/{part}'])}"


def _shape_text(sizes: tuple[int, ...]) -> str:
    """Return a layer's shape as text for `inspect --layers`, such as "4x24x24"."""
    return "x".join(map(str, sizes))


def statistics(values: np.ndarray) -> str:
    """Return mean, deviation, range, zeros and a histogram of a layer's `values` as one line."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return f"none of {values.size} values is finite"
    counts, _ = np.histogram(finite, BINS)
    heights = np.ceil(counts / max(counts.max(), 1) * (len(BLOCKS) - 1)).astype(int)
    bad = f"  NOT FINITE: {values.size - finite.size}" if finite.size < values.size else ""
    return (
        f"mean {finite.mean():+.3e}  deviation {finite.std():.3e}  least {finite.min():+.3e}  "
        f"greatest {finite.max():+.3e}  zeros {np.mean(finite == 0):.1%}  |{''.join(BLOCKS[h] for h in heights)}|{bad}"
    )


def image(model: Trained, file: Path, output: Path) -> str:
    """Draw the outputs of each layer for the image in `file` to `output`, for `inspect --image`; return its class."""
    from adam_mpi.report.charts import activations

    names, images, _ = read_images(model, file)
    layers = [shape.name for shape in model.shapes]
    *outputs, probabilities = model.run({"input": images[:1]}, [*layers, "probabilities"])
    rows = {"input": images[0]} | {name: one[0] for name, one in zip(layers, outputs, strict=True)}
    sizes = {"input": model.inputs.shape} | {shape.name: shape.output for shape in model.shapes}
    output.write_bytes(activations({f"{name}\n{_shape_text(sizes[name])}": row for name, row in rows.items()}))
    return f"{names[0]}: {best(model, probabilities.reshape(len(images[:1]), -1)[0])}\nactivations: {output}"
