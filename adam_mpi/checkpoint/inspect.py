"""`adam_mpi inspect PATH`: what is in a snapshot, a store, a file of weights or a run, and whether it is whole."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import h5py

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file, snapshot, store_file, stores
from adam_mpi.checkpoint.hdf5_file import open_file
from adam_mpi.sharding.position import Position


def inspect(path: Path) -> tuple[str, bool]:
    """Winograd1D about it, and whether everything that is to be whole is whole."""
    lines, whole = [], True
    for line, good in _look(path):
        lines.append(line)
        whole &= good
    return "\n".join(lines), whole


def _look(path: Path) -> Iterator[tuple[str, bool]]:
    if (path / snapshot.MANIFEST).exists():
        yield from _snapshot(path)
    elif (path / stores.DESCRIPTION).exists():
        for file in sorted(path.glob("server-*.h5")):
            yield from _store(file)
    elif path.is_dir() and (path / "config.toml").exists():
        yield from _run(path)
    elif path.is_file():
        yield from _file(path)
    else:
        raise UserError(f"{path}: neither a run, a snapshot, a store nor a file of weights")


def _run(path: Path) -> Iterator[tuple[str, bool]]:
    summary = path / "summary.json"
    status = json.loads(summary.read_text())["status"] if summary.exists() else "no summary"
    yield f"run {path}: {status}", True
    for folder in [*snapshot.own(path / "snapshots"), *stores.lives(path / "store")]:
        yield from _look(folder)


def _snapshot(path: Path) -> Iterator[tuple[str, bool]]:
    try:
        told = snapshot.manifest(path)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["time"]))
        files = told["files"] | told["residuals"]
        size = f"{sum(files.values()) / 1e6:.1f} MB in {len(files)} files"
        yield f"snapshot {path}: format {told['format']}, taken {when}, {size}", True
        yield (
            f"  {told['epochs']} epochs and {told['batches']} batches, {told['images']} images, clock {told['clock']}, "
            f"{told['parameters']} parameters, {told['replicas']} replicas",
            True,
        )
        snapshot.check(path)
        yield from _tensors(path / snapshot.MODEL)
        yield "  whole: every shard agrees with its checksum", True
    except UserError as error:
        yield f"  NOT WHOLE: {error}", False


def _store(path: Path) -> Iterator[tuple[str, bool]]:
    stored = store_file.read(path, values=False)
    written, shards = stored.written, len(stored.pieces)
    yield f"store {path}: {len(written)} of {shards} shards have a whole version", len(written) == shards
    if written:
        images = [piece.images for piece in written]
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.oldest / 1e9))
        yield f"  images {min(images)} to {max(images)}, the oldest written {when}", True
        yield f"  acknowledged: {stored.pushes} pushes, {stored.images} images", True
    if stored.position is not None:
        position = Position.unpack(stored.position)
        yield f"  epoch {position.epoch}, {position.count} of its batches, {position.images} images", True


def _file(path: Path) -> Iterator[tuple[str, bool]]:
    try:
        with h5py.File(path, "r", locking=False) as file:
            kind = file.attrs.get("kind")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if kind == store_file.KIND:
        yield from _store(path)
    elif kind == snapshot.KIND:
        raise UserError(f"{path}: one server's part of a snapshot; give the folder {path.parent}")
    else:
        yield f"model {path}", True
        yield from _tensors(path)


def _tensors(path: Path) -> Iterator[tuple[str, bool]]:
    with open_file(path, model_file.KIND) as file:
        found: list[str] = []

        def note(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset) and item.name != f"/{model_file.INPUTS}":
                found.append(f"  {name:30} {'x'.join(map(str, item.shape)):>16} {item.dtype}")

        file.visititems(note)
    yield from ((line, True) for line in found)
