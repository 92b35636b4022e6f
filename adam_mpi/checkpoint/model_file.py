"""Files of weights: HDF5 with one plain dataset per tensor, such as `conv1/weight`; `merge` makes one of a snapshot.

In a snapshot they are virtual datasets over the servers' files; `adam_mpi merge` makes one file of them. Besides the
weights there are `optimizer/velocity/conv1/weight`, for each state vector of the optimizer, and `ema/conv1/weight`
where a running average is kept.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import snapshot
from adam_mpi.checkpoint.disk_task import report_progress
from adam_mpi.checkpoint.hdf5_file import new_file, open_file
from adam_mpi.model.parameters import PIECE, Tensor, views
from adam_mpi.sharding.shards import joined, meets

KIND = "model"
INPUTS = "inputs"
"""Name of the JSON text about the network's inputs; a dataset, as HDF5 attributes hold only a few thousand numbers."""
Slab = tuple[tuple[slice, ...], int, int]
"""A part of an array: its slices, and its first and last index in memory order."""


def hyperslabs(shape: Sequence[int], first: int, last: int) -> Iterator[Slab]:
    """Split values `first` to `last` of a tensor in a model file, in memory order, into HDF5 hyperslabs. Pure."""
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
            for slab, low, high in hyperslabs(shape[1:], first - at * row, stop - at * row):
                yield (slice(at, at + 1), *slab), at * row + low, at * row + high
            first = stop


class Source(NamedTuple):
    """Shards that follow each other both in a server's file and in the flat vector."""

    file: str
    total: int
    """Parameters in the file."""
    offset: int
    """Where these shards begin in the file, in parameters."""
    start: int
    """Where they begin in the flat vector."""
    size: int


def write_virtual(
    folder: Path, files: Sequence[str], tensors: Sequence[Tensor], attributes: Mapping[str, object], inputs: str
) -> None:
    """Write the model file of a snapshot: nothing is copied, each tensor is mapped to the servers' `files`."""
    sources: list[Source] = []
    parts: list[str] = []
    for name in files:
        with open_file(folder / name, snapshot.KIND) as file:
            parts = snapshot.parts(file)
            sources += _sources_of_shards(name, file["shards"][:, :2].astype(np.int64))
    with new_file(folder / snapshot.MODEL, KIND) as out:
        out.attrs.update(attributes)
        out[INPUTS] = inputs
        for part in parts:
            for tensor in tensors:
                layout = h5py.VirtualLayout(tensor.shape, np.float32)
                for source in sources:
                    _map_tensor(layout, tensor, part, source)
                out.create_virtual_dataset(_group_prefix(part) + tensor.name, layout)


def _group_prefix(part: str) -> str:
    """Return what the names of the tensors of `part` in a model file begin with."""
    return {"weights": "", "ema": "ema/"}.get(part, f"optimizer/{part}/")


def _sources_of_shards(name: str, shards: np.ndarray) -> list[Source]:
    """Return where the `shards` (start, size) lie in the file `name` that a model file maps; neighbors are joined."""
    sources: list[Source] = []
    total = int(shards[:, 1].sum())
    offset = 0
    for start, size in shards.tolist():
        last = sources[-1] if sources else None
        if last is not None and last.start + last.size == start:
            sources[-1] = last._replace(size=last.size + size)
        else:
            sources.append(Source(name, total, offset, start, size))
        offset += size
    return sources


def _map_tensor(layout: h5py.VirtualLayout, tensor: Tensor, part: str, source: Source) -> None:
    """Map the values of a model file's `tensor` that lie in `source`, a file of the snapshot."""
    low = max(source.start, tensor.offset)
    high = min(source.start + source.size, tensor.offset + tensor.size)
    if low >= high:
        return
    values = h5py.VirtualSource(source.file, part, (source.total,), np.float32)
    shift = source.offset + tensor.offset - source.start
    for slab, first, last in hyperslabs(tensor.shape, low - tensor.offset, high - tensor.offset):
        layout[slab] = values[first + shift : last + shift]


def write_model(path: Path, weights: np.ndarray, tensors: Sequence[Tensor], config: str, inputs: str) -> None:
    """Write the flat vector `weights` as a model file, with the configuration and the description of the inputs."""
    named = views(weights, tensors)
    write_pieces(path, ((tensor.offset, named[tensor.name]) for tensor in tensors), tensors, config, inputs)


def write_pieces(
    path: Path, pieces: Iterable[tuple[int, np.ndarray]], tensors: Sequence[Tensor], config: str, inputs: str
) -> None:
    """Write `pieces` of the flat vector (start, rows of a tensor) as a model file, without memory for all."""
    with new_file(path, KIND) as file:
        file.attrs["config"] = config
        file[INPUTS] = inputs
        for tensor in tensors:
            file.create_dataset(tensor.name, tensor.shape, np.float32)
        for start, values in pieces:
            tensor = next(t for t in tensors if t.offset <= start < t.offset + t.size)
            row = (start - tensor.offset) // math.prod(tensor.shape[1:])
            file[tensor.name][row : row + len(values)] = values
            report_progress()


def read_model(path: Path, tensors: Sequence[Tensor], group: str = "") -> np.ndarray:
    """Return the flat vector of a model file; `group`: what the names of its tensors begin with, such as "ema/"."""
    with open_file(path, KIND) as file:
        _check_tensors(path, file, tensors, group)
    flat = np.zeros(sum(tensor.size for tensor in tensors), np.float32)
    for start, values in model_pieces(path, tensors, group):
        flat[start : start + values.size] = values.reshape(-1)
    return flat


def model_pieces(
    path: Path, tensors: Sequence[Tensor], group: str = "", spans: Iterable[tuple[int, int]] | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the parameters of a model file, a few rows of a tensor at a time, each with its start in the flat vector.

    With `spans` of that vector only what meets them is read.
    """
    wanted = None if spans is None else joined(spans)
    with open_file(path, KIND) as file:
        _check_tensors(path, file, tensors, group)
        for tensor in tensors:
            row = math.prod(tensor.shape[1:])
            step = max(1, PIECE // row)
            for first in range(0, tensor.shape[0], step):
                start = tensor.offset + first * row
                stop = min(start + step * row, tensor.offset + tensor.size)
                if wanted is None or meets(wanted, start, stop):
                    yield start, file[group + tensor.name][first : first + step]


def _check_tensors(path: Path, file: h5py.File, tensors: Sequence[Tensor], group: str) -> None:
    """Raise a UserError unless the model file `file` has all `tensors`, before memory is taken for them.

    A small file from anybody can announce very many values.
    """
    virtual = []
    for name, shape in ((group + tensor.name, tensor.shape) for tensor in tensors):
        if name not in file or file[name].shape != shape:
            raise UserError(f"{path}: no {name} of shape {shape}: not the weights of this model")
        if file[name].is_virtual:
            virtual.append(file[name])
        else:
            _check_stored(path, file[name])
    _check_sources(path, virtual)


def _check_stored(path: Path, dataset: h5py.Dataset) -> None:
    """Raise a UserError where `dataset` of a model file announces more values than the file stores."""
    announced = _announced_bytes(dataset)
    stored = 0 if dataset.external else dataset.id.get_storage_size()
    if stored < announced:
        raise UserError(f"{path}:{dataset.name}: incomplete: {announced} bytes announced, {stored} are in the file")


def _check_sources(path: Path, datasets: Sequence[h5py.Dataset]) -> None:
    """Raise a UserError where the virtual `datasets` of a snapshot announce more values than its files store."""
    mappings = [mapping for dataset in datasets for mapping in dataset.virtual_sources()]
    announced = sum(map(_announced_bytes, datasets))
    mapped = sum(mapping.vspace.get_select_npoints() for mapping in mappings) * np.dtype(np.float32).itemsize
    sources = {(mapping.file_name, mapping.dset_name) for mapping in mappings}
    stored = sum(_source_bytes(path, *source) for source in sorted(sources))
    if min(mapped, stored) < announced:
        raise UserError(
            f"{path}: incomplete: {announced} bytes announced, {min(mapped, stored)} are in the files it refers to"
        )


def _source_bytes(path: Path, name: str, part: str) -> int:
    """Return the bytes that the dataset `part` of the file `name`, which must lie beside `path`, stores."""
    source = path.parent / name
    if Path(name).name != name or not source.is_file():
        raise UserError(f"{path}: refers to {name}, which is no file beside it; copy a snapshot as a whole")
    with open_file(source, snapshot.KIND) as file:
        if not isinstance(file.get(part), h5py.Dataset) or file[part].is_virtual:
            raise UserError(f"{source}: no {part} stored in it")
        _check_stored(source, file[part])
        return _announced_bytes(file[part])


def _announced_bytes(dataset: h5py.Dataset) -> int:
    """Return the bytes that a dataset of a model file announces."""
    return math.prod(dataset.shape) * dataset.dtype.itemsize


def merge_snapshot(path: Path, output: Path) -> str:
    """Copy every tensor of the snapshot `path`, or of the newest one of the run `path`, into `output`."""
    folder = path if (path / snapshot.MANIFEST).exists() else newest_snapshot(path)
    snapshot.check_snapshot(folder)
    count = 0
    with open_file(folder / snapshot.MODEL, KIND) as source, new_file(output, KIND) as file:
        for key, value in source.attrs.items():
            file.attrs[key] = value

        def copy(name: str, item: object) -> None:
            nonlocal count
            if isinstance(item, h5py.Dataset):
                _copy_dataset(item, file, name)
                count += item.dtype == np.float32

        source.visititems(copy)
    return f"{output}: {count} tensors of {folder.name}"


def _copy_dataset(source: h5py.Dataset, file: h5py.File, name: str) -> None:
    """Copy a dataset to a merged model file, a few rows at a time: a tensor may be larger than memory."""
    if not source.shape:
        file[name] = source[()]
        return
    copied = file.create_dataset(name, source.shape, source.dtype)
    step = max(1, PIECE // math.prod(source.shape[1:]))
    for first in range(0, len(source), step):
        copied[first : first + step] = source[first : first + step]


def newest_snapshot(run: Path) -> Path:
    """Return the newest snapshot of `run` that is whole; raise a UserError where there is none.

    The error of the newest one is part of that: it says why it cannot be read.
    """
    trouble = ""
    for folder in snapshot.list_snapshots(run / "snapshots")[::-1]:
        try:
            snapshot.check_snapshot(folder)
            return folder
        except UserError as error:
            trouble = trouble or f" ({error})"
    raise UserError(f"{run}: no whole snapshot{trouble}; give the folder of a snapshot or of a run")
