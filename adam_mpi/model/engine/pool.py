"""Max-pooling. The winner of each window is kept as its number in the window, a float, so that it fills a lane.

forward:   for each plane, row and column of windows: the largest value and its number; -1 where relu follows and
           nothing is above zero
backward:  for each plane, row and column of windows: the error goes to the winner, all others get zero;
           windows that overlap add up
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from adam_mpi.model.engine.source import Source
from adam_mpi.model.layers import Shape


def window(source: Source, size: int, columns: int, lanes: int, relu: bool) -> None:
    """Emit `best` and `winner` of the window whose first value lies at `v`, in rows of `columns` pixels."""
    places = [(number // size * columns + number % size) * lanes for number in range(size * size)]
    choose(source, [f"load(memory, v + {place})" for place in places])
    if relu:
        through_relu(source)


def choose(source: Source, values: Sequence[str]) -> None:
    """Emit `best` and `winner` of these values."""
    source(f"best, winner = {values[0]}, zero()")
    for number, value in enumerate(values[1:], start=1):
        source(f"value = {value}")
        source(f"winner = greater(value, best, splat({number}.0), winner)")
        source("best = maximum(value, best)")


def through_relu(source: Source) -> None:
    """Emit relu of `best`; where it is zero there is no winner."""
    source("winner = greater(best, zero(), winner, splat(-1.0))")
    source("best = maximum(zero(), best)")


def clear(source: Source, shape: Shape, lanes: int) -> None:
    """Emit input_errors = 0."""
    with source.inside(f"for place in range(0, {shape[0] * shape[1] * shape[2] * lanes}, {lanes}):"):
        source("store(memory, input_errors + place, zero())")


@contextmanager
def each_window(source: Source, shape: Shape, size: int, stride: int, lanes: int) -> Iterator[None]:
    """Emit loops over the windows, which set `corner`, the window's first pixel, and `at`, its place in the outputs."""
    planes, height, width = shape
    rows, columns = (height - size) // stride + 1, (width - size) // stride + 1
    with source.inside(f"for line in range({planes * rows}):"), source.inside(f"for column in range({columns}):"):
        source(f"plane, row = line // {rows}, line % {rows}")
        source(f"at = (line * {columns} + column) * {lanes}")
        source(f"corner = ((plane * {height} + row * {stride}) * {width} + column * {stride}) * {lanes}")
        yield


def emit_forward(
    source: Source, name: str, shape: Shape, size: int, stride: int, lanes: int, relu: bool = False
) -> None:
    head = f"{name}(memory, inputs, outputs, winners)"
    with source.kernel(head, f"Largest of windows of {size}, stride {stride}, over {shape}."):
        with each_window(source, shape, size, stride, lanes):
            source("v = inputs + corner")
            window(source, size, shape[2], lanes, relu)
            source("store(memory, outputs + at, best)")
            source("store(memory, winners + at, winner)")


def emit_backward(source: Source, name: str, shape: Shape, size: int, stride: int, lanes: int) -> None:
    head = f"{name}(memory, errors, winners, input_errors)"
    with source.kernel(head, f"Errors to the winners of windows of {size}, stride {stride}."):
        if stride != size or shape[1] % size or shape[2] % size:
            clear(source, shape, lanes)
        with each_window(source, shape, size, stride, lanes):
            source("error = load(memory, errors + at)")
            source("winner = load(memory, winners + at)")
            for number in range(size * size):
                place = f"input_errors + corner + {(number // size * shape[2] + number % size) * lanes}"
                value = f"equal(winner, splat({number}.0), error, zero())"
                value = value if stride >= size else f"add(load(memory, {place}), {value})"
                source(f"store(memory, {place}, {value})")
