"""Weights for everybody: HDF5 with a plain dataset per tensor, `conv1/weight`, that any reader of HDF5 opens.

In a snapshot they are virtual datasets over the servers' files; `adam_mpi merge` makes one file of them. Besides the
weights there is `optimizer/conv1/weight`, and `average/conv1/weight` where a running average is kept.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import snapshot
from adam_mpi.checkpoint.disk_task import advance
from adam_mpi.checkpoint.hdf5_file import new_file, open_file
from adam_mpi.model.parameters import PIECE, Tensor, views
from adam_mpi.sharding.spans import joined, meets

KIND = "model"
INPUTS = "inputs"
"""What the network takes, as JSON; a dataset, as attributes have room for a few thousand numbers only."""
GROUPS = {"weights": "", "state": "optimizer/", "ema": "ema/"}


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """Cut values `first` to `last` of an array, in memory order, into boxes: (where, first, last) of each. Pure."""
    row = math.prod(shape[1:])
    if len(shape) == 1:
        yield (slice(first, last),), first, last
        return
    # The rest of a row that has begun, whole rows at once, and the beginning of another.
    while first < last:
        at = first // row
        if first % row == 0 and last - first >= row:
            stop = last // row
            yield (slice(at, stop), *(slice(0, side) for side in shape[1:])), first, stop * row
            first = stop * row
        else:
            stop = min(last, (at + 1) * row)
            for box, low, high in boxes(shape[1:], first - at * row, stop - at * row):
                yield (slice(at, at + 1), *box), at * row + low, at * row + high
            first = stop


class Source(NamedTuple):
    """Where shards that follow each other lie in a server's file."""

    file: str
    total: int
    offset: int
    start: int
    size: int


def write_virtual(
    folder: Path, files: Sequence[str], tensors: Sequence[Tensor], attributes: dict[str, Any], inputs: str
) -> None:
    """The model file of a snapshot: nothing is copied, each tensor is pieced together from the servers' files."""
    sources: list[Source] = []
    kept: list[str] = []
    for name in files:
        with open_file(folder / name, snapshot.KIND) as file:
            shards, kept = file["shards"][:, :2].astype(np.int64), snapshot.parts(file)
        total, offset = int(shards[:, 1].sum()), 0
        for start, size in shards.tolist():
            last = sources[-1] if offset else None
            # Neighbors in the file that are neighbors in the flat vector are mapped together.
            if last is not None and last.start + last.size == start:
                sources[-1] = last._replace(size=last.size + size)
            else:
                sources.append(Source(name, total, offset, start, size))
            offset += size
    with new_file(folder / snapshot.MODEL, KIND) as out:
        out.attrs.update(attributes)
        out[INPUTS] = inputs
        for part in kept:
            for tensor in tensors:
                layout = h5py.VirtualLayout(tensor.shape, np.float32)
                for source in sources:
                    _map(layout, tensor, part, source)
                out.create_virtual_dataset(GROUPS[part] + tensor.name, layout)


def _map(layout: h5py.VirtualLayout, tensor: Tensor, part: str, source: Source) -> None:
    """What of a tensor lies in one run of shards."""
    low, high = max(source.start, tensor.offset), min(source.start + source.size, tensor.offset + tensor.size)
    if low >= high:
        return
    values = h5py.VirtualSource(source.file, part, (source.total,), np.float32)
    shift = source.offset + tensor.offset - source.start
    for box, first, last in boxes(tensor.shape, low - tensor.offset, high - tensor.offset):
        layout[box] = values[first + shift : last + shift]


def write(path: Path, weights: np.ndarray, tensors: Sequence[Tensor], config: str, inputs: str) -> None:
    """The weights to use, in one file, with the configuration and what the network takes."""
    named = views(weights, tensors)
    write_pieces(path, ((tensor.offset, named[tensor.name]) for tensor in tensors), tensors, config, inputs)


def write_pieces(
    path: Path, pieces: Iterable[tuple[int, np.ndarray]], tensors: Sequence[Tensor], config: str, inputs: str
) -> None:
    """The same where nobody has the memory for all of them."""
    with new_file(path, KIND) as file:
        file.attrs["config"], file[INPUTS] = config, inputs
        for tensor in tensors:
            file.create_dataset(tensor.name, tensor.shape, np.float32)
        for start, values in pieces:
            tensor = next(t for t in tensors if t.offset <= start < t.offset + t.size)
            row = (start - tensor.offset) // math.prod(tensor.shape[1:])
            file[tensor.name][row : row + len(values)] = values
            advance()


def read(path: Path, tensors: Sequence[Tensor], group: str = "") -> np.ndarray:
    """The flat vector of a model file."""
    with open_file(path, KIND) as file:
        _check(path, file, tensors, group)
    flat = np.zeros(sum(tensor.size for tensor in tensors), np.float32)
    for start, values in pieces(path, tensors, group):
        flat[start : start + values.size] = values.reshape(-1)
    return flat


def pieces(
    path: Path, tensors: Sequence[Tensor], group: str = "", spans: Iterable[tuple[int, int]] | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """The parameters of a model file: some rows of a tensor at a time, each with its place in the flat vector.

    With `spans` of that vector only what meets them is read.
    """
    wanted = None if spans is None else joined(spans)
    with open_file(path, KIND) as file:
        _check(path, file, tensors, group)
        for tensor in tensors:
            row = math.prod(tensor.shape[1:])
            step = max(1, PIECE // row)
            for first in range(0, tensor.shape[0], step):
                start, stop = tensor.offset + first * row, tensor.offset + (first + step) * row
                if wanted is None or meets(wanted, start, min(stop, tensor.offset + tensor.size)):
                    yield start, file[group + tensor.name][first : first + step]


def _check(path: Path, file: h5py.File, tensors: Sequence[Tensor], group: str) -> None:
    for name, shape in ((group + tensor.name, tensor.shape) for tensor in tensors):
        if name not in file or file[name].shape != shape:
            raise UserError(f"{path}: no {name} of shape {shape}: not the weights of this model")
        _check_stored(path, file[name])


def _check_stored(path: Path, dataset: h5py.Dataset) -> None:
    """Before memory is taken for it: a small file from anybody can announce very much. Snapshots only refer to it."""
    announced, stored = math.prod(dataset.shape) * dataset.dtype.itemsize, dataset.id.get_storage_size()
    if not dataset.is_virtual and stored < announced:
        raise UserError(f"{path}:{dataset.name}: incomplete: {announced} bytes announced, {stored} are in the file")
