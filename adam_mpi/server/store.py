"""Shards on disk: each server writes its own HDF5 file; together the files of one snapshot hold the whole model.

Shards are named by layer and offset in the flat parameter vector, never by rank, so any layout can read them.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from adam_mpi.errors import UserError
from adam_mpi.model.parameters import Tensor, views
from adam_mpi.server.shards import Shard

FORMAT = 1


def write(
    path: Path, shards: Sequence[Shard], state: Mapping[str, Mapping[int, np.ndarray]], versions: np.ndarray
) -> None:
    """Write one server's shards; the file appears under its name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _new_file(path) as file:
        for shard, version in zip(shards, versions, strict=True):
            group = file.create_group(f"{shard.layer}/{shard.start}")
            for name, values in state.items():
                group[name] = values[shard.index]
            group.attrs["start"], group.attrs["version"] = shard.start, int(version)


def read(directory: Path, size: int) -> dict[str, np.ndarray]:
    """The state in a snapshot (weights, state of the optimiser, average if it has one), as flat vectors."""
    state: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(size, np.float32))
    found = 0
    for path in sorted(directory.glob("server-*.h5")):
        with _open(path) as file:
            for group in (group for layer in file.values() for group in layer.values()):
                start, count = int(group.attrs["start"]), group["weights"].size
                if start + count > size:
                    raise UserError(f"{path}: {group.name} does not fit this model of {size} parameters")
                for name, values in group.items():
                    values.read_direct(state[name][start : start + count])
                found += count
    if found != size:
        raise UserError(f"{directory}: holds {found} parameters, this model has {size}; resume with the run's config")
    return dict(state)


def write_weights(path: Path, weights: np.ndarray, tensors: Sequence[Tensor], config: str) -> None:
    """The whole model in one file, a dataset per tensor (`conv1/weight`), with the configuration it was made by."""
    with _new_file(path) as file:
        file.attrs["config"] = config
        for name, view in views(weights, tensors).items():
            file[name] = view


def read_weights(path: Path, tensors: Sequence[Tensor]) -> np.ndarray:
    weights = np.zeros(sum(tensor.size for tensor in tensors), np.float32)
    with _open(path) as file:
        for name, view in views(weights, tensors).items():
            if name not in file or file[name].shape != view.shape:
                raise UserError(f"{path}: no {name} of shape {view.shape}: not the weights of this model")
            view[...] = file[name]
    return weights


class _new_file:
    """An HDF5 file under a temporary name, renamed when everything has been written and is on disk."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_suffix(".part")

    def __enter__(self) -> h5py.File:
        self.file = h5py.File(self.part, "w")
        self.file.attrs["format"] = FORMAT
        return self.file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.file.close()
        if kind is None:
            with self.part.open("rb+") as part:
                os.fsync(part.fileno())
            self.part.replace(self.path)


def _open(path: Path) -> h5py.File:
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if file.attrs.get("format") != FORMAT:
        raise UserError(f"{path}: format {file.attrs.get('format')}, this version reads {FORMAT}")
    return file
