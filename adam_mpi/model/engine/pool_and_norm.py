"""Emit max-pooling, average-pooling, and local response normalization.

Max-pooling keeps the winner of each window as its number in the window, a float, so that it fills a lane.

max forward:       for each plane, row and column of windows: the largest value and its number; -1 where relu follows
                   and nothing is above zero
max backward:      for each plane, row and column of windows: the error goes to the winner, all others get zero;
                   windows that overlap add up
average forward:   for each plane, row and column of windows: the mean of the window
average backward:  for each plane, row and column of windows: its error, divided by its pixels, is added to all of them

forward:   for each channel and pixel: scale = offset + scale / size * sum of squares over the channel's window
                                       output = input * scale ** -power
backward:  for each channel and pixel: error * scale ** -power, less the channel's part in its neighbors' scales
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from adam_mpi.model.engine.source import Source
from adam_mpi.model.layers import LocalResponseNorm, Shape


@dataclass(frozen=True)
class Windows:
    """Square windows of `size` pixels, `stride` apart, over planes of `shape`; `lanes` images in a block."""

    shape: Shape
    size: int
    stride: int
    lanes: int

    @property
    def places(self) -> list[int]:
        """Return the offsets of the pixels of a pooling window from its first one."""
        width = self.shape[2]
        return [
            (number // self.size * width + number % self.size) * self.lanes for number in range(self.size * self.size)
        ]


def emit_pool_window(source: Source, size: int, columns: int, lanes: int, relu: bool) -> None:
    """Emit `best` and `winner` of the window whose first value lies at `v`, in rows of `columns` pixels."""
    places = [(number // size * columns + number % size) * lanes for number in range(size * size)]
    emit_pool_winner(source, [f"load(memory, v + {place})" for place in places])
    if relu:
        emit_pool_through_relu(source)


def emit_pool_winner(source: Source, values: Sequence[str]) -> None:
    """Emit `best` and `winner` of `values`, which are expressions."""
    source(f"best, winner = {values[0]}, zero()")
    for number, value in enumerate(values[1:], start=1):
        source(f"value = {value}")
        source(f"winner = greater(value, best, splat({number}.0), winner)")
        source("best = maximum(value, best)")


def emit_pool_through_relu(source: Source) -> None:
    """Emit relu of `best`; where it is zero there is no winner."""
    source("winner = greater(best, zero(), winner, splat(-1.0))")
    source("best = maximum(zero(), best)")


def emit_max_pool_forward(source: Source, name: str, windows: Windows, relu: bool = False) -> None:
    """Emit the kernel `name` that computes outputs and winners, of relu's outputs if `relu`."""
    head = f"{name}(memory, inputs, outputs, winners)"
    with source.kernel(head, f"Largest of windows of {windows.size}, stride {windows.stride}, over {windows.shape}."):
        with _each_window(source, windows):
            source("v = inputs + corner")
            emit_pool_window(source, windows.size, windows.shape[2], windows.lanes, relu)
            source("store(memory, outputs + at, best)")
            source("store(memory, winners + at, winner)")


def emit_max_pool_backward(source: Source, name: str, windows: Windows) -> None:
    """Emit the kernel `name` that gives each window's error to its winner."""
    head = f"{name}(memory, errors, winners, input_errors)"
    size = windows.size
    stride = windows.stride
    with source.kernel(head, f"Errors to the winners of windows of {size}, stride {stride}."):
        if stride != size or windows.shape[1] % size or windows.shape[2] % size:
            _clear_pool_errors(source, windows)
        with _each_window(source, windows):
            source("error = load(memory, errors + at)")
            source("winner = load(memory, winners + at)")
            for number, offset in enumerate(windows.places):
                place = f"input_errors + corner + {offset}"
                value = f"equal(winner, splat({number}.0), error, zero())"
                value = value if stride >= size else f"add(load(memory, {place}), {value})"
                source(f"store(memory, {place}, {value})")


def emit_average_pool_forward(source: Source, name: str, windows: Windows) -> None:
    """Emit the kernel `name` that computes the mean of each window."""
    nest = f"Mean of windows of {windows.size}, stride {windows.stride}."
    with source.kernel(f"{name}(memory, inputs, outputs)", nest), _each_window(source, windows):
        source("mean = load(memory, inputs + corner)")
        for place in windows.places[1:]:
            source(f"mean = add(mean, load(memory, inputs + corner + {place}))")
        source(f"store(memory, outputs + at, mul(mean, splat({1 / windows.size**2!r})))")


def emit_average_pool_backward(source: Source, name: str, windows: Windows) -> None:
    """Emit the kernel `name` that shares out each window's error among its pixels."""
    nest = f"Errors over windows of {windows.size}, stride {windows.stride}."
    with source.kernel(f"{name}(memory, errors, input_errors)", nest):
        _clear_pool_errors(source, windows)
        with _each_window(source, windows):
            source(f"share = mul(load(memory, errors + at), splat({1 / windows.size**2!r}))")
            for offset in windows.places:
                place = f"input_errors + corner + {offset}"
                source(f"store(memory, {place}, add(load(memory, {place}), share))")


def _clear_pool_errors(source: Source, windows: Windows) -> None:
    """Emit input_errors = 0."""
    planes, height, width = windows.shape
    with source.inside(f"for place in range(0, {planes * height * width * windows.lanes}, {windows.lanes}):"):
        source("store(memory, input_errors + place, zero())")


@contextmanager
def _each_window(source: Source, windows: Windows) -> Iterator[None]:
    """Emit loops over the windows, which set `corner`, the window's first pixel, and `at`, its place in the outputs."""
    planes, height, width = windows.shape
    stride = windows.stride
    rows = (height - windows.size) // stride + 1
    columns = (width - windows.size) // stride + 1
    with source.inside(f"for line in range({planes * rows}):"), source.inside(f"for column in range({columns}):"):
        source(f"plane, row = line // {rows}, line % {rows}")
        source(f"at = (line * {columns} + column) * {windows.lanes}")
        source(f"corner = ((plane * {height} + row * {stride}) * {width} + column * {stride}) * {windows.lanes}")
        yield


RAISED = "exponential(mul(splat({power!r}), logarithm(scale)))"


def emit_norm_forward(source: Source, name: str, shape: Shape, layer: LocalResponseNorm, lanes: int) -> None:
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


def emit_norm_backward(source: Source, name: str, shape: Shape, layer: LocalResponseNorm, lanes: int) -> None:
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
