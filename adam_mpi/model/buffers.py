"""The memory of one context: which buffers a stack needs for a block of images, how large, and shared by whom."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from adam_mpi.model.exchange import assembled_at, ranks_of
from adam_mpi.model.layers import Activation, Conv, Dense, Dropout, LayerShape, LocalResponseNorm, MaxPool

ALIGNMENT = 64
SCRATCH_BYTES = 2**18


@dataclass(frozen=True)
class Buffer:
    """Shape and type of one array."""

    shape: tuple[int, ...]
    dtype: DTypeLike

    @property
    def bytes(self) -> int:
        """Rounded up, so that buffers laid one after the other stay aligned."""
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def rooms(shapes: Sequence[LayerShape], images: int) -> list[int]:
    """Images of the input, and of each layer's output: before an assembly there are only a rank's own."""
    layers = [shape.layer for shape in shapes]
    own, assembly = -(-images // ranks_of(layers)), assembled_at(layers)
    return [own if index <= assembly else images for index in range(len(shapes) + 1)]


def plan(shapes: Sequence[LayerShape], images: int, dtype: DTypeLike) -> dict[str, Buffer]:
    """All buffers by name; a layer that works in place has none of its own."""
    first, (own, *counts) = shapes[0].input, rooms(shapes, images)
    buffers = {
        "pixels": Buffer((own, *first), np.uint8),
        "labels": Buffer((images,), np.int64),
        "ids": Buffer((images,), np.int64),
        "keys": Buffer((images,), np.uint64),
        "own keys": Buffer((own,), np.uint64),
        "normalizers": Buffer((images,), dtype),
        "input": Buffer((*first, own), dtype),
    }
    for name, shape, count in zip(output_names(shapes), shapes, counts, strict=True):
        buffers.setdefault(name, Buffer((*shape.output, count), dtype))
        if isinstance(shape.layer, LocalResponseNorm):
            buffers[f"{shape.name}/scales"] = Buffer((*shape.output, count), dtype)
        if type(shape.layer) is MaxPool:
            buffers[f"{shape.name}/winners"] = Buffer((*shape.output, count), np.int32)
    for name, size in (_scratch(shapes, counts, np.dtype(dtype).itemsize) | _errors(shapes, images)).items():
        buffers[name] = Buffer((size,), dtype)
    return buffers


def allocate(buffers: dict[str, Buffer]) -> dict[str, np.ndarray]:
    """Zeroed, aligned arrays, all in one piece of memory."""
    size = sum(buffer.bytes for buffer in buffers.values())
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    arrays = {}
    for name, buffer in buffers.items():
        used = math.prod(buffer.shape) * np.dtype(buffer.dtype).itemsize
        arrays[name] = memory[offset : offset + used].view(buffer.dtype).reshape(buffer.shape)
        offset += buffer.bytes
    return arrays


def output_names(shapes: Sequence[LayerShape]) -> list[str]:
    """The buffer of each layer's output: its own, or, when it may overwrite its input, that of the layer before."""
    names: list[str] = []
    before, needed = "input", ""
    for shape in shapes:
        # The derivative of activations and normalization needs their output again: nobody may overwrite it
        # (of relu's only the sign counts).
        if isinstance(shape.layer, Activation):
            in_place, after = not needed, shape.layer.function
        elif isinstance(shape.layer, Dropout):
            in_place = needed in ("", "relu")
            after = needed if in_place else ""
        else:
            in_place, after = False, "normalize" if isinstance(shape.layer, LocalResponseNorm) else ""
        before, needed = before if in_place else shape.name, after
        names.append(before)
    return names


def error_names(shapes: Sequence[LayerShape]) -> list[str]:
    """The buffer of the error of the input and of each layer's output: two take turns, from the last layer back."""
    names = ["errors0"]
    for shape in reversed(shapes):
        in_place = isinstance(shape.layer, Activation | Dropout)
        names.append(names[-1] if in_place else {"errors0": "errors1", "errors1": "errors0"}[names[-1]])
    return names[::-1]


def group_rows(shape: LayerShape, images: int, itemsize: int) -> int:
    """Output rows of a convolution computed at a time, so that their columns stay in the cache."""
    row = math.prod((shape.weight or ())[1:]) * shape.output[2] * images * itemsize
    return min(shape.output[1], max(1, SCRATCH_BYTES // row))


def _errors(shapes: Sequence[LayerShape], images: int) -> dict[str, int]:
    sizes = {"errors0": 0, "errors1": 0}
    values = [shapes[0].input, *(shape.output for shape in shapes)]
    for name, shape, count in zip(error_names(shapes), values, rooms(shapes, images), strict=True):
        sizes[name] = max(sizes[name], math.prod(shape) * count)
    return sizes


def _scratch(shapes: Sequence[LayerShape], counts: Sequence[int], itemsize: int) -> dict[str, int]:
    """Columns and products of a group of a convolution's rows, and sums of weight gradients."""
    columns = products = sums = 0
    for shape, images in zip(shapes, counts, strict=True):
        weight = shape.weight or ()
        if isinstance(shape.layer, Conv):
            span = group_rows(shape, images, itemsize) * shape.output[2] * images
            columns = max(columns, math.prod(weight[1:]) * span)
            products = max(products, weight[0] * span)
            sums = max(sums, math.prod(weight))
        elif isinstance(shape.layer, Dense):
            rows = min(weight[0], max(1, SCRATCH_BYTES // (weight[1] * itemsize)))
            sums = max(sums, rows * weight[1])
    return {"columns": columns, "products": products, "sums": sums}
