"""Max-pooling. The winner of each window is kept as its number in the window, a float, so that it fills a lane.

    forward:   for each plane, row and column of windows: the largest value and its number; -1 where relu follows and
               nothing is above zero
    backward:  for each plane, row and column of windows: the error goes to the winner, all others get zero;
               windows that overlap add up
"""

from collections.abc import Sequence

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


def emit_forward(source: Source, name: str, shape: Shape, size: int, stride: int, lanes: int) -> None:
    planes, height, width = shape
    rows, columns = (height - size) // stride + 1, (width - size) // stride + 1
    head = f"{name}(memory, inputs, outputs, winners)"
    with source.kernel(head, f"Largest of windows of {size}, stride {stride}, over {planes} x {height} x {width}."):
        with source.inside(f"for line in range({planes * rows}):"), source.inside(f"for column in range({columns}):"):
            source(f"plane, row = line // {rows}, line % {rows}")
            source(f"v = inputs + ((plane * {height} + row * {stride}) * {width} + column * {stride}) * {lanes}")
            window(source, size, width, lanes, relu=False)
            source(f"to = (line * {columns} + column) * {lanes}")
            source("store(memory, outputs + to, best)")
            source("store(memory, winners + to, winner)")


def emit_backward(source: Source, name: str, shape: Shape, size: int, stride: int, lanes: int) -> None:
    planes, height, width = shape
    rows, columns = (height - size) // stride + 1, (width - size) // stride + 1
    head = f"{name}(memory, errors, winners, input_errors)"
    with source.kernel(head, f"Errors to the winners of windows of {size}, stride {stride}."):
        if stride != size or height % size or width % size:
            with source.inside(f"for place in range(0, {planes * height * width * lanes}, {lanes}):"):
                source("store(memory, input_errors + place, zero())")
        with source.inside(f"for line in range({planes * rows}):"), source.inside(f"for column in range({columns}):"):
            source(f"plane, row = line // {rows}, line % {rows}")
            source(f"at = (line * {columns} + column) * {lanes}")
            source("error = load(memory, errors + at)")
            source("winner = load(memory, winners + at)")
            corner = f"((plane * {height} + row * {stride}) * {width} + column * {stride}) * {lanes}"
            source(f"to = input_errors + {corner}")
            for number in range(size * size):
                place = f"to + {(number // size * width + number % size) * lanes}"
                value = f"equal(winner, splat({number}.0), error, zero())"
                value = value if stride >= size else f"add(load(memory, {place}), {value})"
                source(f"store(memory, {place}, {value})")
