"""A file that is readable after `kill -9` at any moment: HDF5, laid out once, two slots per record.

A record is a shard (weights, state of the optimizer, average), or last the position. A write goes to the older slot of
its record; when the body is on disk, the head follows: version, images applied, time, checksum of all that. A write
cut short leaves the other slot, which is whole.

The bytes are written in place by `pwrite` into HDF5's contiguous datasets: HDF5's own structure never changes, a full
disk is a plain error that leaves nothing in a library's cache, and nobody holds a lock.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
from h5py import h5t

from adam_mpi.base.checksum import checksum
from adam_mpi.base.thread_pool import ThreadPool
from adam_mpi.checkpoint.hdf5_file import lay_out, new_file, open_file, put, sync
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.spans import joined, meets

KIND = "store"
FIELDS = ("version", "pushes", "images", "nanoseconds", "checksum")
HEAD = np.dtype([(name, "<u8") for name in FIELDS])

# The file's size never changes, so what else is kept of it need not be written each time.
_on_disk = getattr(os, "fdatasync", os.fsync)


@dataclass(frozen=True)
class Record:
    """What is written at once: a shard by its place in the file, or the position, which follows the shards."""

    place: int
    version: int
    images: int
    nanoseconds: int
    body: np.ndarray
    pushes: int = 0
    """Acknowledged when it was copied: they are in it."""

    def head(self) -> np.ndarray:
        head = np.zeros((), HEAD)
        for name in FIELDS[:-1]:
            head[name] = getattr(self, name)
        head["checksum"] = check_value(head, self.body)
        return head


def check_value(head: np.ndarray, body: np.ndarray) -> int:
    """Over the other fields of the head too: an old head with a new body is no record."""
    return checksum(body, checksum(np.frombuffer(head.tobytes()[:-8], np.uint32)))


def create(path: Path, shards: Sequence[Shard], parts: Sequence[str], position_bytes: int) -> None:
    """Make the file with all its space; until a record is written its heads are zero."""
    with new_file(path, KIND) as file:
        file.attrs["parts"] = list(parts)
        file["shards"] = np.array([(shard.start, shard.size) for shard in shards], np.int64).reshape(-1, 2)
        values = 2 * len(parts) * sum(shard.size for shard in shards)
        lay_out(file, "bodies", h5t.IEEE_F32LE, (values,))
        lay_out(file, "position", h5t.STD_U8LE, (2, position_bytes))
        file["heads"] = np.zeros((len(shards) + 1, 2, len(FIELDS)), np.uint64)
        file["acknowledged"] = np.zeros(3, np.uint64)
    _reserve(path)


def _reserve(path: Path) -> None:
    """Take the disk space now, where the system offers it: later writes then find room."""
    if not hasattr(os, "posix_fallocate"):
        return sync(path)
    with path.open("rb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    sync(path)


class StoreFile:
    """A store opened for writing."""

    def __init__(self, path: Path, shards: Sequence[Shard], parts: Sequence[str], position_bytes: int) -> None:
        create(path, shards, parts, position_bytes)
        with open_file(path, KIND) as file:
            offsets = {name: file[name].id.get_offset() for name in ("bodies", "position", "heads", "acknowledged")}
        self.heads, self.acknowledged = offsets["heads"], offsets["acknowledged"]
        edges = np.cumsum([0] + [4 * len(parts) * shard.size for shard in shards])
        first = offsets["bodies"]
        self.bodies = [(int(first + 2 * start), int(stop - start)) for start, stop in pairwise(edges)]
        self.bodies.append((offsets["position"], position_bytes))
        self.next = np.zeros(len(self.bodies), np.int64)
        """The slot that the next write of each record goes to."""
        self.descriptor = os.open(path, os.O_WRONLY)
        self.pair = ThreadPool(2)

    def write(self, records: Sequence[Record]) -> None:
        """All bodies, then, when they are on disk, all heads; each record at most once."""
        half = -(-len(records) // 2)
        self._put_bodies(records[:half])
        if records[half:]:
            self._while_synced(partial(self._put_bodies, records[half:]))
        heads: list[np.ndarray] = []
        self._while_synced(lambda: heads.extend(record.head() for record in records))
        for record, head in zip(records, heads, strict=True):
            slot = 2 * record.place + int(self.next[record.place])
            put(self.descriptor, head, self.heads + HEAD.itemsize * slot)
        _on_disk(self.descriptor)
        for record in records:
            self.next[record.place] ^= 1

    def _while_synced(self, job: Callable[[], None]) -> None:
        """Do something while what has been written goes to disk."""
        self.pair.run([(0, job), (1, partial(_on_disk, self.descriptor))])

    def _put_bodies(self, records: Sequence[Record]) -> None:
        for record in records:
            start, size = self.bodies[record.place]
            assert record.body.nbytes == size, f"record {record.place} has {record.body.nbytes} bytes, not {size}"
            put(self.descriptor, record.body, start + int(self.next[record.place]) * size)

    def acknowledge(self, pushes: int, images: int) -> None:
        """So many have been acknowledged, in the file or not: whoever goes on from it can tell what is lost."""
        put(self.descriptor, np.array([pushes, images, time.time_ns()], np.uint64), self.acknowledged)

    def close(self) -> None:
        self.pair.close()
        os.close(self.descriptor)


@dataclass(frozen=True)
class Piece:
    """The newest whole version of a shard in a store."""

    start: int
    size: int
    version: int
    pushes: int
    images: int
    nanoseconds: int
    values: dict[str, np.ndarray]


@dataclass(frozen=True)
class Stored:
    """What a store has: of each shard, and of the position, the newest whole version; None where there is none."""

    pieces: list[Piece | None]
    position: np.ndarray | None
    pushes: int
    """Acknowledged until the end, whether they are in it or not."""
    images: int
    nanoseconds: int = 0
    """When the last of them was; 0 where that is not known."""

    @property
    def written(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece is not None]

    @property
    def oldest(self) -> int:
        """When the oldest of its shards was copied, in nanoseconds since 1970."""
        return min((piece.nanoseconds for piece in self.written), default=0)

    @property
    def age(self) -> float | None:
        """Seconds from the copy of the oldest shard to the last acknowledgement, both by the clock of the server."""
        return max(0, self.nanoseconds - self.oldest) / 1e9 if self.nanoseconds else None

    @property
    def lost(self) -> tuple[int, int]:
        """Acknowledged pushes and their images that some shard does not have."""
        pushes, images = (min(getattr(piece, name) for piece in self.written) for name in ("pushes", "images"))
        return max(0, self.pushes - pushes), max(0, self.images - images)


def read(path: Path, values: bool = True) -> Stored:
    """Read a store from end to end; without `values` only what is in it."""
    with open_file(path, KIND) as file:
        found, bodies = list(_pieces(file, values)), list(file["position"][...])
        slot = newest(_heads(file)[-1], bodies)
        acknowledged = file["acknowledged"][...].tolist()
        return Stored(found, None if slot is None else bodies[slot], *acknowledged)


def pieces(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """What a store has of the shards that meet these spans, one by one: all of it may be larger than memory."""
    with open_file(path, KIND) as file:
        yield from (piece for piece in _pieces(file, True, joined(spans)) if piece is not None)


def _pieces(file: h5py.File, values: bool, wanted: Sequence[tuple[int, int]] | None = None) -> Iterator[Piece | None]:
    parts, offset = list(file.attrs["parts"]), 0
    for (start, size), pair in zip(file["shards"][...].tolist(), _heads(file), strict=False):
        length = len(parts) * size
        if wanted is None or meets(wanted, start, start + size):
            bodies = [file["bodies"][offset + slot * length : offset + (slot + 1) * length] for slot in (0, 1)]
            slot, kept = newest(pair, bodies), parts if values else ()
            yield None if slot is None else _piece(start, size, pair[slot], kept, bodies[slot])
        offset += 2 * length


def _heads(file: h5py.File) -> np.ndarray:
    """Those of both slots, of each shard and last of the position."""
    return file["heads"][...].view(HEAD)[..., 0]


def newest(heads: np.ndarray, bodies: Sequence[np.ndarray]) -> int | None:
    """Which of a record's two slots to believe."""
    written = [slot for slot in (0, 1) if heads[slot]["nanoseconds"]]
    whole = [slot for slot in written if heads[slot]["checksum"] == check_value(heads[slot], bodies[slot])]
    return max(whole, key=lambda slot: (int(heads[slot]["version"]), int(heads[slot]["nanoseconds"])), default=None)


def _piece(start: int, size: int, head: np.ndarray, parts: Sequence[str], body: np.ndarray) -> Piece:
    values = {part: body[place * size : (place + 1) * size] for place, part in enumerate(parts)}
    version, pushes, images, nanoseconds, _ = head.item()
    return Piece(start, size, version, pushes, images, nanoseconds, values)
