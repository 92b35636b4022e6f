"""Emit local response normalization over neighboring channels, for one block.

forward:   for each channel and pixel: scale = offset + scale / size * sum of squares over the channel's window
                                       output = input * scale ** -power
backward:  for each channel and pixel: error * scale ** -power, less the channel's part in its neighbors' scales
"""

from adam_mpi.model.engine.source import Source
from adam_mpi.model.layers import LocalResponseNorm, Shape

RAISED = "exponential(mul(splat({power!r}), logarithm(scale)))"


def emit_forward(source: Source, name: str, shape: Shape, layer: LocalResponseNorm, lanes: int) -> None:
    """Emit the kernel `name` that computes outputs and scales."""
    plane = shape[1] * shape[2] * lanes
    half = layer.size // 2
    with source.kernel(f"{name}(memory, inputs, outputs, scales)", str(layer)):
        with source.inside(f"for channel in range({shape[0]}):"):
            source(f"first, last = max(0, channel - {half}), min({shape[0]}, channel + {layer.size - half})")
            with source.inside(f"for pixel in range(0, {plane}, {lanes}):"):
                source("squares = zero()")
                with source.inside("for other in range(first, last):"):
                    source(f"value = load(memory, inputs + other * {plane} + pixel)")
                    source("squares = fma(value, value, squares)")
                source(f"at = channel * {plane} + pixel")
                source(f"scale = fma(splat({layer.scale / layer.size!r}), squares, splat({float(layer.offset)!r}))")
                source("store(memory, scales + at, scale)")
                raised = RAISED.format(power=-float(layer.power))
                source(f"store(memory, outputs + at, mul(load(memory, inputs + at), {raised}))")


def emit_backward(source: Source, name: str, shape: Shape, layer: LocalResponseNorm, lanes: int) -> None:
    """Emit the kernel `name` that computes the errors of the inputs."""
    plane = shape[1] * shape[2] * lanes
    half = layer.size // 2
    factor = -2 * layer.scale / layer.size * layer.power
    with source.kernel(f"{name}(memory, errors, inputs, outputs, scales, input_errors)", str(layer)):
        with source.inside(f"for channel in range({shape[0]}):"):
            source(f"first, last = max(0, channel + {half + 1 - layer.size}), min({shape[0]}, channel + {half + 1})")
            with source.inside(f"for pixel in range(0, {plane}, {lanes}):"):
                source("shared = zero()")
                with source.inside("for other in range(first, last):"):
                    source(f"to = other * {plane} + pixel")
                    source("part = mul(load(memory, errors + to), load(memory, outputs + to))")
                    source("shared = add(shared, div(part, load(memory, scales + to)))")
                source(f"at = channel * {plane} + pixel")
                source("scale = load(memory, scales + at)")
                source(f"own = mul(load(memory, errors + at), {RAISED.format(power=-float(layer.power))})")
                source(f"taken = mul(splat({factor!r}), mul(load(memory, inputs + at), shared))")
                source("store(memory, input_errors + at, add(own, taken))")
