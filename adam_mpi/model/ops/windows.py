"""Windows of convolutions and pooling over one to three axes, and convolution with numpy."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from adam_mpi.model.graph import Shape, shape_text
from adam_mpi.model.ops.fields import pads, per_axis

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Geometry:
    """Describe the windows of a convolution, one number per spatial axis each; `pad` is (before, after)."""

    kernel: Shape
    stride: Shape
    pad: Pads
    dilation: Shape
    groups: int = 1

    def reach(self) -> Shape:
        """Return how many inputs a window spans along each axis."""
        return tuple((size - 1) * step + 1 for size, step in zip(self.kernel, self.dilation, strict=True))

    def windows(self, shape: Shape) -> Shape:
        """Return how many windows fit along each axis of `shape`; raise ValueError if a window does not fit at all."""
        found = []
        for axis, (size, reach) in enumerate(zip(shape, self.reach(), strict=True)):
            padded = size + sum(self.pad[axis])
            if reach > padded:
                raise ValueError(f"a window of {reach} does not fit into {size} with pad {sum(self.pad[axis])}")
            found.append((padded - reach) // self.stride[axis] + 1)
        return tuple(found)

    def taps(self, outputs: Shape) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield each place in the kernel with what it sees, for all `outputs`, of the padded inputs."""
        for place in product(*(range(size) for size in self.kernel)):
            first = [number * step for number, step in zip(place, self.dilation, strict=True)]
            yield (
                place,
                tuple(
                    slice(begin, begin + (count - 1) * stride + 1, stride)
                    for begin, count, stride in zip(first, outputs, self.stride, strict=True)
                ),
            )


def geometry(
    rank: int,
    kernel: int | Shape,
    stride: int | Shape = 1,
    pad: int | Shape = 0,
    dilation: int | Shape = 1,
    groups: int = 1,
) -> Geometry:
    """Return the windows over `rank` axes; raise ValueError for a list of the wrong length, or too wide a pad."""
    sizes = per_axis(kernel, rank, "kernel")
    dilations = per_axis(dilation, rank, "dilation")
    made = Geometry(sizes, per_axis(stride, rank, "stride"), pads(pad, rank), dilations, groups)
    if any(max(edges) >= reach for edges, reach in zip(made.pad, made.reach(), strict=True)):
        raise ValueError(
            f"a pad as wide as the window of {shape_text(made.reach())} would make outputs that see nothing"
        )
    return made


def everywhere(places: Iterable[Any]) -> tuple[Any, ...]:
    """Return the index of `places` in all channels of all samples."""
    return (slice(None), slice(None), *places)


def _grouped(array: np.ndarray, groups: int) -> np.ndarray:
    """Return (samples, channels, *places) as (samples, groups, channels per group, places)."""
    return array.reshape(len(array), groups, array.shape[1] // groups, -1)


def _padded(windows: Geometry, array: np.ndarray) -> np.ndarray:
    return np.pad(array, [(0, 0), (0, 0), *windows.pad])


def _tap(weight: np.ndarray, place: tuple[int, ...], groups: int) -> np.ndarray:
    """Return the matrices of one place in the kernel: (groups, outputs per group, inputs per group)."""
    return weight[everywhere(place)].reshape(groups, -1, weight.shape[1])


def forward(windows: Geometry, inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the convolution of `inputs` with `weight`."""
    outputs = windows.windows(inputs.shape[2:])
    padded = _padded(windows, inputs)
    groups = windows.groups
    made = np.zeros((len(inputs), groups, len(weight) // groups, math.prod(outputs)), inputs.dtype)
    for place, seen in windows.taps(outputs):
        made += _tap(weight, place, groups) @ _grouped(padded[everywhere(seen)], groups)
    return made.reshape(len(inputs), len(weight), *outputs)


def to_data(windows: Geometry, errors: np.ndarray, weight: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the errors of inputs of `shape`."""
    padded = _padded(windows, np.zeros((len(errors), *shape), errors.dtype))
    grouped = _grouped(errors, windows.groups)
    for place, seen in windows.taps(errors.shape[2:]):
        part = _tap(weight, place, windows.groups).transpose(0, 2, 1) @ grouped
        padded[everywhere(seen)] += part.reshape(len(errors), shape[0], *errors.shape[2:])
    inside = (slice(before, before + size) for (before, _), size in zip(windows.pad, shape[1:], strict=True))
    return np.ascontiguousarray(padded[everywhere(inside)])


def to_weights(windows: Geometry, inputs: np.ndarray, errors: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the gradient of weights of `shape`, summed over samples."""
    padded = _padded(windows, inputs)
    grouped = _grouped(errors, windows.groups)
    gradient = np.zeros(shape, inputs.dtype)
    for place, seen in windows.taps(errors.shape[2:]):
        values = _grouped(padded[everywhere(seen)], windows.groups)
        part = np.einsum("ngmp,ngcp->gmc", grouped, values, optimize=True)
        gradient[everywhere(place)] = part.reshape(shape[:2])
    return gradient


def unpadded(windows: Geometry, padded: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the part of `padded` that is no pad."""
    inside = (slice(before, before + size) for (before, _), size in zip(windows.pad, shape[1:], strict=True))
    return np.ascontiguousarray(padded[everywhere(inside)])
