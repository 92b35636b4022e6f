"""A snapshot: a folder with a file of each server, a model file over them, and `snapshot.json`, written last.

    snapshots/epoch-0002-batch-000040/    two epochs, and 40 batches of the third
        server-00001.h5                   weights, state, average of that server's shards; the position
        residual-00000.h5                 what a pusher's codec has left out so far, where it has error feedback
        model.h5                          the layers by name, as virtual datasets over the servers' files
        snapshot.json                     the manifest

The folder gets its name when all of that is on disk. Shards lie at their place in the flat parameter vector, never at
a rank, so any layout can read them. docs/reference/files.md is the whole story.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5t

from adam_mpi.base.checksum import add_checksums
from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint.hdf5_file import FORMAT, lay_out, new_file, open_file, put_past_cache, sync
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.spans import joined, meets

KIND, MANIFEST, MODEL = "snapshot", "snapshot.json", "model.h5"
NAME = re.compile(r"epoch-\d{4,}(-batch-\d{6,})?", re.ASCII)
PART, OLD = ".part-", ".old-"
"""What is being made, and what is being replaced."""


def name(epochs: int, batches: int) -> str:
    """What it is called; what is in it is told by its manifest, which `own` goes by."""
    return f"epoch-{epochs:04d}" + (f"-batch-{batches:06d}" if batches else "")


def own(folder: Path) -> list[Path]:
    """The snapshots there that a job has made, by how much is trained; one that does not say it counts as the oldest.

    Whatever else people keep there, a copy of a snapshot under another name too, is none.
    """
    found = {path: _trained(path) for path in folder.glob("epoch-*") if NAME.fullmatch(path.name)}
    ours = [path for path in found if called(path) in (path.name, None)]
    return sorted(ours, key=lambda path: (found[path], path.name))


def called(path: Path) -> str | None:
    """What a snapshot says it is called; None where it does not say it."""
    try:
        name = json.loads((path / MANIFEST).read_text())["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _trained(path: Path) -> tuple[int, int, int]:
    """Images, epochs and batches."""
    try:
        told = manifest(path)
        return int(told["images"]), int(told["epochs"]), int(told["batches"])
    except (UserError, KeyError, TypeError, ValueError):
        return -1, 0, 0


def restore(folder: Path) -> None:
    """Give those their names that a kill has kept from it, between the renames of a snapshot and an older one of the
    same name. A snapshot's manifest is written last: whoever has one is whole."""
    parts, replaced = (sorted(folder.glob(f"{what}*"), key=os.path.getmtime) for what in (PART, OLD))
    # The newest first; and what was to be replaced only where nothing else has the name.
    for path in [*parts[::-1], *replaced[::-1]]:
        name = called(path)
        if name is not None and NAME.fullmatch(name) and not (folder / name).exists():
            path.rename(folder / name)
            sync(folder)


def file_name(server: int) -> str:
    return f"server-{server:05d}.h5"


def residual_name(ring: int) -> str:
    return f"residual-{ring:05d}.h5"


def write(
    path: Path, shards: Sequence[Shard], state: Mapping[str, np.ndarray], versions: np.ndarray, position: np.ndarray
) -> None:
    """One server's part: `state` has its shards one after the other, by the name of what it is."""
    with new_file(path, KIND) as file:
        sizes = [shard.size for shard in shards]
        columns = ([shard.start for shard in shards], sizes, versions, _checksums(sizes, state.values()))
        file["shards"] = np.array(columns, np.uint64).T
        file["shards"].attrs["columns"] = ["start", "size", "version", "checksum"]
        file["position"] = position
        for part, values in state.items():
            lay_out(file, part, h5t.IEEE_F32LE, values.shape)
        file.flush()
        for part, values in state.items():
            put_past_cache(Path(file.filename), values, file[part].id.get_offset())


def _checksums(sizes: Sequence[int], parts: Iterable[np.ndarray]) -> np.ndarray:
    """Of each shard, over all that is kept of it."""
    sums = np.zeros(len(sizes), np.uint64)
    for values in parts:
        add_checksums(values, np.cumsum([0, *sizes]), sums)
    return sums


def parts(file: h5py.File) -> list[str]:
    """What a server's file keeps of each parameter, in the order of the checksum."""
    return [part for part in ("weights", "state", "ema", "residual") if part in file]


def manifest(path: Path) -> dict[str, Any]:
    """What a snapshot says about itself; refused where it is of another version."""
    try:
        found = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no snapshot: {MANIFEST}: {error}") from None
    if (version := found.get("format")) != FORMAT:
        raise UserError(f"{path}: format {version}, this version reads {FORMAT}; use the version that wrote it")
    return found


def check(path: Path) -> Position:
    """Read a snapshot from end to end; returns its position, or raises a UserError that says what is wrong with it."""
    told, found, positions = manifest(path), 0, []
    for file_, size in (told["files"] | told["residuals"]).items():
        if not (path / file_).exists() or (path / file_).stat().st_size != size:
            raise UserError(f"{path / file_}: is not the file of {size} bytes that the snapshot was made of")
        with open_file(path / file_, KIND) as file:
            values = _check_shards(path / file_, file)
            if file_ in told["files"]:
                found += values
                positions.append(Position.unpack(file["position"][...]))
    if found != told["parameters"]:
        raise UserError(f"{path}: holds {found} of {told['parameters']} parameters")
    if not all(position.agrees(positions[0]) for position in positions):
        raise UserError(f"{path}: its files are not of one moment")
    return positions[0]


def _check_shards(path: Path, file: h5py.File) -> int:
    starts, sizes, _, told = file["shards"][...].T
    # Shard by shard: a server's whole file may be larger than memory.
    places = np.cumsum([0, *sizes.tolist()]).tolist()
    found = [_checksums([b - a], (file[part][a:b] for part in parts(file)))[0] for a, b in pairwise(places)]
    damaged = np.array(found, np.uint64) != told
    if damaged.any():
        raise UserError(f"{path}: shard {starts[damaged][0]} is damaged")
    return int(sizes.sum())


def pieces(
    path: Path, files: Iterable[str], spans: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """(start, values by name) of the shards in these files of a snapshot that has been checked; others than those that
    meet the spans are not read.
    """
    wanted = joined(spans)
    for file_ in files:
        with open_file(path / file_, KIND) as file:
            offset = 0
            for start, size, _, _ in file["shards"][...].tolist():
                if meets(wanted, start, start + size):
                    yield start, {part: file[part][offset : offset + size] for part in parts(file)}
                offset += size
