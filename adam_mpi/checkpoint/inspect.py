"""`adam_mpi inspect PATH`: what is in a snapshot, a store, a file of weights or a run, and whether it is whole."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import h5py

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file, snapshot, store_file, stores
from adam_mpi.checkpoint.hdf5_file import open_file
from adam_mpi.sharding.training_state import Position

Finding = tuple[str, bool]
"""A line of text, and whether what it is about is whole."""


def inspect(path: Path) -> tuple[str, bool]:
    """Return what `inspect` finds in `path`, and whether everything in it is whole."""
    findings = list(_describe(path))
    return "\n".join(line for line, _ in findings), all(whole for _, whole in findings)


def _describe(path: Path) -> Iterator[Finding]:
    """Yield what `inspect` prints about `path`: a snapshot, a folder of stores, a run or a file."""
    if (path / snapshot.MANIFEST).exists():
        yield from _describe_snapshot(path)
    elif (path / stores.DESCRIPTION).exists():
        for file in sorted(path.glob("server-*.h5")):
            yield from _describe_store(file)
    elif path.is_dir() and (path / "config.toml").exists():
        yield from _describe_run(path)
    elif path.is_file():
        yield from _describe_file(path)
    else:
        raise UserError(f"{path}: neither a run, a snapshot, a store nor a file of weights")


def _describe_run(path: Path) -> Iterator[Finding]:
    """Yield what `inspect` prints about a run directory, its snapshots and its stores."""
    summary = path / "summary.json"
    status = json.loads(summary.read_text())["status"] if summary.exists() else "no summary"
    yield f"run {path}: {status}", True
    for folder in [*snapshot.list_snapshots(path / "snapshots"), *stores.attempt_folders(path / "store")]:
        yield from _describe(folder)


def _describe_snapshot(path: Path) -> Iterator[Finding]:
    """Yield what `inspect` prints about a snapshot."""
    try:
        manifest = snapshot.manifest(path)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["time"]))
        files = manifest["files"] | manifest["residuals"]
        size = f"{sum(files.values()) / 1e6:.1f} MB in {len(files)} files"
        yield f"snapshot {path}: format {manifest['format']}, taken {when}, {size}", True
        yield (
            f"  {manifest['epochs']} epochs and {manifest['batches']} batches, {manifest['images']} images, "
            f"clock {manifest['clock']}, {manifest['parameters']} parameters, {manifest['replicas']} replicas",
            True,
        )
        snapshot.check_snapshot(path)
        yield from _describe_tensors(path / snapshot.MODEL)
        yield "  whole: every shard agrees with its checksum", True
    except UserError as error:
        yield f"  NOT WHOLE: {error}", False


def _describe_store(path: Path) -> Iterator[Finding]:
    """Yield what `inspect` prints about a store."""
    stored = store_file.read_store(path, values=False)
    written = stored.written
    shards = len(stored.pieces)
    yield f"store {path}: {len(written)} of {shards} shards have a whole version", len(written) == shards
    if written:
        images = [piece.images for piece in written]
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.oldest / 1e9))
        yield f"  images {min(images)} to {max(images)}, the oldest written {when}", True
        yield f"  of each shard {', '.join(stored.parts)}", True
        yield f"  acknowledged: {stored.pushes} pushes, {stored.images} images", True
    if stored.position is not None:
        position = Position.unpack(stored.position)
        yield f"  epoch {position.epoch}, {position.count} of its batches, {position.images} images", True


def _describe_file(path: Path) -> Iterator[Finding]:
    """Yield what `inspect` prints about an HDF5 file, which is a store or a file of weights."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            kind = file.attrs.get("kind")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if kind == store_file.KIND:
        yield from _describe_store(path)
    elif kind == snapshot.KIND:
        raise UserError(f"{path}: one server's part of a snapshot; give the folder {path.parent}")
    else:
        yield f"model {path}", True
        yield from _describe_tensors(path)


def _describe_tensors(path: Path) -> Iterator[Finding]:
    """Yield what `inspect` prints about the tensors in a file of weights."""
    found: list[str] = []

    def note(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.name != f"/{model_file.INPUTS}":
            found.append(f"  {name:30} {'x'.join(map(str, item.shape)):>16} {item.dtype}")

    with open_file(path, model_file.KIND) as file:
        file.visititems(note)
    yield from ((line, True) for line in found)
