"""Build the program of a network: its layers become steps, kernels are emitted, calls listed, buffers laid out."""

from collections.abc import Sequence
from dataclasses import dataclass

from adam_mpi.model.engine import layer_steps
from adam_mpi.model.engine.builder import Builder
from adam_mpi.model.engine.conv_choice import Choice
from adam_mpi.model.engine.schedule import Buffer, Crossing, Part
from adam_mpi.model.input_format import SCALED_BYTES, InputFormat
from adam_mpi.model.layers import LayerShape

COPIED = 2**20
"""Parameters of a dense layer up to which each thread has a copy."""


@dataclass(frozen=True)
class Program:
    """Emitted source of a function `run`, and the floats of memory it works in."""

    text: str
    floats: int
    unshared_floats: int
    """Floats that its buffers would take if none shared memory with another."""
    blocks: int
    """Blocks of images that go through the network together."""
    own_blocks: int
    """Blocks of a rank's own images, before those of a hybrid replica are assembled; else the same."""
    lanes: int
    """Images in a block."""
    batches: int
    """Batches of a round, whose activations and errors of large layers are kept."""
    choices: dict[str, Choice]
    """How each convolution is computed."""
    uncopied: tuple[str, ...]
    """Layers whose weights are read in `shared`."""
    fused_layers: tuple[str, ...]
    """Those of them whose gradient is fused with the update at the end of a round of batches."""
    kept: dict[str, tuple[tuple[int, int], ...]]
    """Captured layer -> where its activations and its errors lie in memory, by image: (offset, floats per image)."""
    parts: tuple[Part, ...]
    """What `run` computes; between those of a strip there are exchanges, and it is called for each of them."""
    crossings: tuple[Crossing, ...]
    places: dict[Buffer, int]
    """Offset of each buffer in memory."""
    form: InputFormat = SCALED_BYTES
    """What it loads."""


def build(
    shapes: Sequence[LayerShape],
    images: int,
    lanes: int,
    registers: int,
    choices: dict[str, Choice] | None = None,
    captured: Sequence[str] = (),
    batches: int = 1,
    form: InputFormat = SCALED_BYTES,
) -> Program:
    """Return the program for batches of up to `images` images; what `choices` lack is decided by arithmetic.

    Images arrive in `form`. Activations and errors of the dense layers in `captured` are kept, and those of large
    layers for a round of `batches`. Where there are exchanges among the layers, as in the stack of a strip, the program
    is cut there. Raises UserError for a layer that the engine has no kernels for.
    """
    builder = Builder(
        shapes,
        images=images,
        lanes=lanes,
        registers=registers,
        copied=COPIED,
        choices=choices,
        captured=captured,
        batches=batches,
        form=form,
    )
    index = 0
    while index < len(shapes):
        index += layer_steps.add(builder, index)
    entry, plan = builder.finish()
    return Program(
        text=builder.source.text,
        floats=plan.floats,
        unshared_floats=plan.unshared,
        blocks=builder.blocks,
        own_blocks=builder.own_blocks,
        lanes=builder.lanes,
        batches=batches,
        choices=builder.choices,
        uncopied=builder.uncopied,
        fused_layers=builder.fused,
        kept={
            layer: tuple((plan.places[buffer], buffer.floats) for buffer in buffers)
            for layer, buffers in builder.kept.items()
        },
        parts=entry.parts,
        crossings=tuple(builder.crossings),
        places=plan.places,
        form=form,
    )
