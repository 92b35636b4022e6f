"""Average-pooling.

forward:   for each plane, row and column of windows: the mean of the window
backward:  for each plane, row and column of windows: its error, shared out, is added to all of the window
"""

from adam_mpi.model.engine.pool import clear, each_window
from adam_mpi.model.engine.source import Source
from adam_mpi.model.layers import Shape


def emit_forward(source: Source, name: str, shape: Shape, size: int, stride: int, lanes: int) -> None:
    with source.kernel(f"{name}(memory, inputs, outputs)", f"Mean of windows of {size}, stride {stride}."):
        with each_window(source, shape, size, stride, lanes):
            source("mean = load(memory, inputs + corner)")
            for number in range(1, size * size):
                place = (number // size * shape[2] + number % size) * lanes
                source(f"mean = add(mean, load(memory, inputs + corner + {place}))")
            source(f"store(memory, outputs + at, mul(mean, splat({1 / size**2!r})))")


def emit_backward(source: Source, name: str, shape: Shape, size: int, stride: int, lanes: int) -> None:
    with source.kernel(f"{name}(memory, errors, input_errors)", f"Errors over windows of {size}, stride {stride}."):
        clear(source, shape, lanes)
        with each_window(source, shape, size, stride, lanes):
            source(f"share = mul(load(memory, errors + at), splat({1 / size**2!r}))")
            for number in range(size * size):
                place = f"input_errors + corner + {(number // size * shape[2] + number % size) * lanes}"
                source(f"store(memory, {place}, add(load(memory, {place}), share))")
