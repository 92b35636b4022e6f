"""The memory of one context: the buffers that a stack needs for a block of images, and which layers share them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from adam_mpi.model.exchange import Exchange, assembled_at, ranks_of
from adam_mpi.model.layers import (
    Activation,
    Conv,
    Dense,
    Dropout,
    Layer,
    LayerShape,
    LocalResponseNorm,
    MaxPool,
    missing_rule,
)

ALIGNMENT = 64
SCRATCH_BYTES = 2**18


@dataclass(frozen=True)
class Buffer:
    """Shape and type of one array."""

    shape: tuple[int, ...]
    dtype: DTypeLike

    @property
    def bytes(self) -> int:
        """Return the size of a buffer, rounded up so that buffers laid one after the other stay aligned."""
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def images_held(shapes: Sequence[LayerShape], images: int) -> list[int]:
    """Return how many images the input and each layer's output hold: before an assembly only the rank's own ones."""
    layers = [shape.layer for shape in shapes]
    own = -(-images // ranks_of(layers))
    assembly = assembled_at(layers)
    return [own if index <= assembly else images for index in range(len(shapes) + 1)]


def plan(shapes: Sequence[LayerShape], images: int, dtype: DTypeLike) -> dict[str, Buffer]:
    """Return all buffers by name; a layer that works in place has none of its own."""
    first = shapes[0].input
    own, *counts = images_held(shapes, images)
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
    """Return zeroed, aligned arrays for `buffers`, all in one piece of memory."""
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
    """Return the buffer of each layer's output: its own, or that of its input where it may overwrite it."""
    names: list[str] = []
    before = "input"
    needed = ""
    for shape in shapes:
        in_place, needed = _overwrites(shape.layer, needed)
        before = before if in_place else shape.name
        names.append(before)
    return names


def _overwrites(layer: Layer, needed: str) -> tuple[bool, str]:
    """Return whether `layer` may overwrite its input, and what the way back needs of its output.

    `needed` is what the layer before needs of that input: the derivatives of activations and of normalization need
    their output again, but of the output of relu only the sign.
    """
    if isinstance(layer, Activation):
        return not needed, layer.function
    if isinstance(layer, Dropout):
        in_place = needed in ("", "relu")
        return in_place, needed if in_place else ""
    if isinstance(layer, LocalResponseNorm):
        return False, "normalize"
    if isinstance(layer, Conv | MaxPool | Dense | Exchange):
        return False, ""
    raise missing_rule(layer, "buffer of its output (_overwrites in model/reference_buffers.py)")


def error_names(shapes: Sequence[LayerShape]) -> list[str]:
    """Return the buffer of the input's errors and of each layer's output errors: two alternate from the last layer."""
    other = {"errors0": "errors1", "errors1": "errors0"}
    names = ["errors0"]
    for shape in reversed(shapes):
        if isinstance(shape.layer, Activation | Dropout):
            names.append(names[-1])
        elif isinstance(shape.layer, Conv | MaxPool | LocalResponseNorm | Dense | Exchange):
            names.append(other[names[-1]])
        else:
            raise missing_rule(shape.layer, "buffer of its errors (error_names in model/reference_buffers.py)")
    return names[::-1]


def group_rows(shape: LayerShape, images: int, itemsize: int) -> int:
    """Return how many output rows of a convolution are computed at a time, so that their columns stay in the cache."""
    row = math.prod((shape.weight or ())[1:]) * shape.output[2] * images * itemsize
    return min(shape.output[1], max(1, SCRATCH_BYTES // row))


def _errors(shapes: Sequence[LayerShape], images: int) -> dict[str, int]:
    """Return the sizes of the two buffers of errors."""
    sizes = {"errors0": 0, "errors1": 0}
    values = [shapes[0].input, *(shape.output for shape in shapes)]
    for name, shape, count in zip(error_names(shapes), values, images_held(shapes, images), strict=True):
        sizes[name] = max(sizes[name], math.prod(shape) * count)
    return sizes


def _scratch(shapes: Sequence[LayerShape], counts: Sequence[int], itemsize: int) -> dict[str, int]:
    """Return the sizes of the buffers for columns and products of a group of rows, and for sums of weight gradients."""
    columns = 0
    products = 0
    sums = 0
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
