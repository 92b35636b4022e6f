"""A snapshot: a folder with a file of each server, a model file over them, and `snapshot.json`, written last.

    snapshots/epoch-0002-batch-000040/    two epochs, and 40 batches of the third
        server-00001.h5                   weights, state vectors and average of that server's shards; the position
        residual-00000.h5                 what a pusher's codec has left out so far, where it has error feedback
        model.h5                          the layers by name, as virtual datasets over the servers' files
        snapshot.json                     the manifest

The folder gets its name when all of that is on disk. A shard is stored with its offset in the flat parameter vector,
never with a rank, so that any layout can read it. docs/reference/files.md describes all files.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

import h5py
import numpy as np
from h5py import h5t

from adam_mpi.base.errors import UserError
from adam_mpi.base.files import add_checksums, sync_to_disk
from adam_mpi.checkpoint.hdf5_file import check_format, create_unfilled, new_file, open_file, write_past_cache
from adam_mpi.sharding.shard_copy import BATCHES
from adam_mpi.sharding.shards import Piece, Shard, joined, meets
from adam_mpi.sharding.training_state import Position

KIND = "snapshot"
MANIFEST = "snapshot.json"
MODEL = "model.h5"
NAME = re.compile(r"epoch-\d{4,}(-batch-\d{6,})?", re.ASCII)
PART = ".part-"
"""Begins the name of a snapshot that is being written."""
OLD = ".old-"
"""Begins the name of a snapshot that is being replaced."""


class Manifest(TypedDict):
    """The content of `snapshot.json`."""

    format: int
    name: str
    epochs: int
    batches: int
    images: int
    clock: int
    parameters: int
    files: dict[str, int]
    """Server's file -> its bytes."""
    residuals: dict[str, int]
    """Pusher's file -> its bytes."""
    tensors: dict[str, list[Any]]
    """Tensor -> its offset in the flat vector and its shape."""
    replicas: int
    strips: int
    order: dict[str, Any]
    best: float | None
    best_epoch: int
    rate_scale: float
    """The factor of the configured learning rate after divergences."""
    plateau: dict[str, Any]
    """The state of the schedule plateau."""
    kernels: dict[str, Any] | None
    config: str
    inputs: str
    time: float


def folder_name(epochs: int, batches: int) -> str:
    """Return the folder name of a snapshot after `epochs` and `batches`; their order is that of the manifests."""
    return f"epoch-{epochs:04d}" + (f"-batch-{batches:06d}" if batches else "")


def list_snapshots(folder: Path) -> list[Path]:
    """Return the snapshots in `folder` that a job has made, by how much is trained; unreadable ones come first.

    Anything else there, such as a user's copy of a snapshot under another name, is left out.
    """
    found = {path: _trained(path) for path in folder.glob("epoch-*") if NAME.fullmatch(path.name)}
    ours = [path for path in found if recorded_name(path) in (path.name, None)]
    return sorted(ours, key=lambda path: (found[path], path.name))


def recorded_name(path: Path) -> str | None:
    """Return the name that the manifest of the snapshot `path` gives; None where there is none."""
    try:
        name = json.loads((path / MANIFEST).read_text())["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _trained(path: Path) -> tuple[int, int, int]:
    """Return images, epochs and batches of the snapshot `path`; less than any other if it cannot be read."""
    try:
        content = manifest(path)
        return int(content["images"]), int(content["epochs"]), int(content["batches"])
    except (UserError, KeyError, TypeError, ValueError):
        return -1, 0, 0


def finish_renames(folder: Path) -> None:
    """Finish renames of snapshots in `folder` that a kill has interrupted, between two of the same name.

    The manifest is written last: a folder that has one is complete.
    """
    parts = sorted(folder.glob(f"{PART}*"), key=os.path.getmtime)
    replaced = sorted(folder.glob(f"{OLD}*"), key=os.path.getmtime)
    # The newest first; one that was to be replaced gets its name back only where nothing else has it.
    for path in [*parts[::-1], *replaced[::-1]]:
        name = recorded_name(path)
        if name is not None and NAME.fullmatch(name) and not (folder / name).exists():
            path.rename(folder / name)
            sync_to_disk(folder)


def file_name(server: int) -> str:
    """Return the name of the snapshot file of the rank `server`."""
    return f"server-{server:05d}.h5"


def residual_name(ring: int) -> str:
    """Return the name of the snapshot's residual file of the pusher with this `ring`."""
    return f"residual-{ring:05d}.h5"


def write_server_part(
    path: Path,
    shards: Sequence[Shard],
    state: Mapping[str, np.ndarray],
    versions: np.ndarray,
    position: np.ndarray,
    batches: np.ndarray | None = None,
) -> None:
    """Write the file of a server into a snapshot, or the residual of a pusher.

    `state`: part (weights, a state vector, ema, residual) -> its shards one after the other; `batches`: how many each
    shard has been stepped on.
    """
    with new_file(path, KIND) as file:
        sizes = [shard.size for shard in shards]
        columns = ([shard.start for shard in shards], sizes, versions, _checksums(sizes, state.values()))
        file["shards"] = np.array(columns, np.uint64).T
        file["shards"].attrs["columns"] = ["start", "size", "version", "checksum"]
        file["position"] = position
        file.attrs["parts"] = list(state)
        if batches is not None:
            file[BATCHES] = batches
        for part, values in state.items():
            create_unfilled(file, part, h5t.IEEE_F32LE, values.shape)
        file.flush()
        for part, values in state.items():
            write_past_cache(Path(file.filename), values, file[part].id.get_offset())


def _checksums(sizes: Sequence[int], parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return the checksum of each shard in a snapshot file over all `parts`; `sizes`: those of the shards."""
    sums = np.zeros(len(sizes), np.uint64)
    for values in parts:
        add_checksums(values, np.cumsum([0, *sizes]), sums)
    return sums


def parts(file: h5py.File) -> list[str]:
    """Return the vectors that a server's file of a snapshot has, in the order of the checksum."""
    return [part for part in file.attrs.get("parts", ()) if part in file]


def stored_parts(path: Path, files: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the vectors that the servers' `files` of the snapshot `path` have."""
    with open_file(path / next(iter(files)), KIND) as file:
        return tuple(parts(file))


def manifest(path: Path) -> Manifest:
    """Return the manifest of the snapshot `path`; raise a UserError where it is missing or of another format."""
    try:
        found = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no snapshot: {MANIFEST}: {error}") from None
    check_format(path, found.get("format"))
    return found


def check_snapshot(path: Path) -> Position:
    """Read the snapshot `path` from end to end and return its position; raise a UserError that says what is wrong."""
    content = manifest(path)
    found = 0
    positions = []
    for name, size in (content["files"] | content["residuals"]).items():
        if not (path / name).exists() or (path / name).stat().st_size != size:
            raise UserError(f"{path / name}: is not the file of {size} bytes that the snapshot was made of")
        with open_file(path / name, KIND) as file:
            values = _check_shards(path / name, file)
            if name in content["files"]:
                found += values
                positions.append(Position.unpack(file["position"][...]))
    if found != content["parameters"]:
        raise UserError(f"{path}: holds {found} of {content['parameters']} parameters")
    if not all(position.agrees(positions[0]) for position in positions):
        raise UserError(f"{path}: its files are not of one moment")
    return positions[0]


def _check_shards(path: Path, file: h5py.File) -> int:
    """Return the parameters that a snapshot's `file` has; raise UserError where a shard's checksum disagrees."""
    starts, sizes, _, expected = file["shards"][...].T
    # Shard by shard: a server's whole file may be larger than memory.
    places = np.cumsum([0, *sizes.tolist()]).tolist()
    found = [_checksums([b - a], (file[part][a:b] for part in parts(file)))[0] for a, b in pairwise(places)]
    damaged = np.array(found, np.uint64) != expected
    if damaged.any():
        raise UserError(f"{path}: shard {starts[damaged][0]} is damaged")
    return int(sizes.sum())


def snapshot_pieces(path: Path, files: Iterable[str], spans: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """Yield the shards that meet `spans`, from these `files` of a snapshot that has been checked; read no others."""
    wanted = joined(spans)
    for name in files:
        with open_file(path / name, KIND) as file:
            offset = 0
            for place, (start, size, _, _) in enumerate(file["shards"][...].tolist()):
                if meets(wanted, start, start + size):
                    yield start, _shard_values(file, place, offset, size)
                offset += size


def _shard_values(file: h5py.File, place: int, offset: int, size: int) -> dict[str, np.ndarray]:
    """Return the values of a snapshot's shard at `place`, by name: `size` of each part from `offset`, and batches."""
    values = {part: file[part][offset : offset + size] for part in parts(file)}
    if BATCHES in file:
        values[BATCHES] = np.array(file[BATCHES][place])
    return values
