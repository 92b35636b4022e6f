"""A store: a file that is readable after `kill -9` at any moment; HDF5, laid out once, two slots per record.

A record is a shard (weights, state vectors, average), or last the position. A write goes to the older slot of its
record; when the body is on disk, the header follows: version, images applied, time, batches, checksum. A write that
was cut short leaves the other slot, which is whole.

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

from adam_mpi.base.files import file_checksum, sync_to_disk
from adam_mpi.base.pools import ThreadPool
from adam_mpi.checkpoint.hdf5_file import create_unfilled, new_file, open_file, write_at
from adam_mpi.sharding.shard_copy import BATCHES
from adam_mpi.sharding.shards import Shard, joined, meets

KIND = "store"
FIELDS = ("version", "pushes", "images", "nanoseconds", "batches", "checksum")
HEADER = np.dtype([(name, "<u8") for name in FIELDS])

# The file's size never changes, so its metadata need not be written each time.
_sync_data = getattr(os, "fdatasync", os.fsync)


@dataclass(frozen=True)
class Record:
    """What is written at once: a shard by its place in the file, or the position, which follows the shards."""

    place: int
    version: int
    images: int
    nanoseconds: int
    body: np.ndarray
    pushes: int = 0
    """Pushes acknowledged when it was copied: they are in it."""
    stepped: float = 0.0
    """Batches that the shard has been stepped on."""

    @property
    def batches(self) -> int:
        """Return the bits of `stepped` as the header of a store's record has them."""
        return int(np.float64(self.stepped).view(np.uint64))

    def header(self) -> np.ndarray:
        """Return the header that makes the slot of this record in the store valid."""
        header = np.zeros((), HEADER)
        for name in FIELDS[:-1]:
            header[name] = getattr(self, name)
        header["checksum"] = record_checksum(header, self.body)
        return header


def record_checksum(header: np.ndarray, body: np.ndarray) -> int:
    """Return the checksum of a store record's `body` and header: an old header with a new body is no record."""
    return file_checksum(body, file_checksum(np.frombuffer(header.tobytes()[:-8], np.uint32)))


def create(path: Path, shards: Sequence[Shard], parts: Sequence[str], position_bytes: int) -> None:
    """Create the store file with all its space; until a record is written its headers are zero."""
    with new_file(path, KIND) as file:
        file.attrs["parts"] = list(parts)
        file["shards"] = np.array([(shard.start, shard.size) for shard in shards], np.int64).reshape(-1, 2)
        values = 2 * len(parts) * sum(shard.size for shard in shards)
        create_unfilled(file, "bodies", h5t.IEEE_F32LE, (values,))
        create_unfilled(file, "position", h5t.STD_U8LE, (2, position_bytes))
        file["headers"] = np.zeros((len(shards) + 1, 2, len(FIELDS)), np.uint64)
        file["acknowledged"] = np.zeros(3, np.uint64)
    _reserve(path)


def _reserve(path: Path) -> None:
    """Take the disk space of the store file now, where the system offers it: later writes then find room."""
    if not hasattr(os, "posix_fallocate"):
        return sync_to_disk(path)
    with path.open("rb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    sync_to_disk(path)


class StoreFile:
    """A store opened for writing."""

    def __init__(self, path: Path, shards: Sequence[Shard], parts: Sequence[str], position_bytes: int) -> None:
        """Create the store `path` for `parts` of `shards`, and open it."""
        create(path, shards, parts, position_bytes)
        with open_file(path, KIND) as file:
            offsets = {name: file[name].id.get_offset() for name in ("bodies", "position", "headers", "acknowledged")}
        self.headers = offsets["headers"]
        self.acknowledged = offsets["acknowledged"]
        edges = np.cumsum([0] + [4 * len(parts) * shard.size for shard in shards])
        first = offsets["bodies"]
        self.bodies = [(int(first + 2 * start), int(stop - start)) for start, stop in pairwise(edges)]
        """Record -> the offset of its two slots, and the bytes of one."""
        self.bodies.append((offsets["position"], position_bytes))
        self.next = np.zeros(len(self.bodies), np.int64)
        """Record -> the slot that its next write goes to."""
        self.descriptor = os.open(path, os.O_WRONLY)
        self.threads = ThreadPool(2)

    def write(self, records: Sequence[Record]) -> None:
        """Write the bodies of store records, then, once these are on disk, their headers; each at most once."""
        half = -(-len(records) // 2)
        self._write_bodies(records[:half])
        if records[half:]:
            self._while_syncing(partial(self._write_bodies, records[half:]))
        headers: list[np.ndarray] = []
        self._while_syncing(lambda: headers.extend(record.header() for record in records))
        for record, header in zip(records, headers, strict=True):
            slot = 2 * record.place + int(self.next[record.place])
            write_at(self.descriptor, header, self.headers + HEADER.itemsize * slot)
        _sync_data(self.descriptor)
        for record in records:
            self.next[record.place] ^= 1

    def _while_syncing(self, work: Callable[[], None]) -> None:
        """Do `work` while what has been written into the store file goes to disk."""
        self.threads.run([(0, work), (1, partial(_sync_data, self.descriptor))])

    def _write_bodies(self, records: Sequence[Record]) -> None:
        """Write the bodies of records into their unused slots of the store file."""
        for record in records:
            start, size = self.bodies[record.place]
            assert record.body.nbytes == size, f"record {record.place} has {record.body.nbytes} bytes, not {size}"
            write_at(self.descriptor, record.body, start + int(self.next[record.place]) * size)

    def note_acknowledged(self, pushes: int, images: int) -> None:
        """Note in the store file how many `pushes` and `images` are acknowledged, stored or not."""
        write_at(self.descriptor, np.array([pushes, images, time.time_ns()], np.uint64), self.acknowledged)

    def close(self) -> None:
        """End the threads that sync the store file, and close it."""
        self.threads.close()
        os.close(self.descriptor)


@dataclass(frozen=True)
class StoredShard:
    """The newest whole version of a shard in a store."""

    start: int
    size: int
    version: int
    pushes: int
    images: int
    nanoseconds: int
    values: dict[str, np.ndarray]


@dataclass(frozen=True)
class StoreContent:
    """The content of a store: the newest whole version of each shard and of the position; None where there is none."""

    pieces: list[StoredShard | None]
    position: np.ndarray | None
    pushes: int
    """Pushes acknowledged until the end, whether they are in it or not."""
    images: int
    nanoseconds: int = 0
    """When the last push was acknowledged; 0 where that is not known."""
    parts: tuple[str, ...] = ()
    """The names of the vectors of each shard."""

    @property
    def written(self) -> list[StoredShard]:
        """Return the shards that have a whole version in the store."""
        return [piece for piece in self.pieces if piece is not None]

    @property
    def oldest(self) -> int:
        """Return when the oldest shard of the store was copied, in nanoseconds since 1970."""
        return min((piece.nanoseconds for piece in self.written), default=0)

    @property
    def age(self) -> float | None:
        """Return the seconds from the copy of the store's oldest shard to the last acknowledgement, by one clock."""
        return max(0, self.nanoseconds - self.oldest) / 1e9 if self.nanoseconds else None

    @property
    def lost(self) -> tuple[int, int]:
        """Return how many acknowledged pushes, and their images, some shard of the store does not have."""
        pushes = min(piece.pushes for piece in self.written)
        images = min(piece.images for piece in self.written)
        return max(0, self.pushes - pushes), max(0, self.images - images)


def read_store(path: Path, values: bool = True) -> StoreContent:
    """Read a store file from end to end; without `values` the pieces have none."""
    with open_file(path, KIND) as file:
        found = list(_shards_of_store(file, values))
        bodies = list(file["position"][...])
        slot = valid_slot(_headers(file)[-1], bodies)
        acknowledged = file["acknowledged"][...].tolist()
        position = None if slot is None else bodies[slot]
        return StoreContent(
            pieces=found,
            position=position,
            pushes=acknowledged[0],
            images=acknowledged[1],
            nanoseconds=acknowledged[2],
            parts=tuple(file.attrs["parts"]),
        )


def store_pieces(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[StoredShard]:
    """Yield the shards of a store that meet `spans`, one by one: all of them may be larger than memory."""
    with open_file(path, KIND) as file:
        yield from (piece for piece in _shards_of_store(file, True, joined(spans)) if piece is not None)


def _shards_of_store(
    file: h5py.File, values: bool, wanted: Sequence[tuple[int, int]] | None = None
) -> Iterator[StoredShard | None]:
    """Yield each shard of a store file, or those that meet `wanted`; None for one without a whole version."""
    parts = list(file.attrs["parts"])
    offset = 0
    for (start, size), headers in zip(file["shards"][...].tolist(), _headers(file), strict=False):
        length = len(parts) * size
        if wanted is None or meets(wanted, start, start + size):
            bodies = [file["bodies"][offset + slot * length : offset + (slot + 1) * length] for slot in (0, 1)]
            slot = valid_slot(headers, bodies)
            kept = parts if values else ()
            yield None if slot is None else _stored_shard(start, size, headers[slot], kept, bodies[slot])
        offset += 2 * length


def _headers(file: h5py.File) -> np.ndarray:
    """Return the headers in a store file of both slots of each shard and, last, of the position."""
    return file["headers"][...].view(HEADER)[..., 0]


def valid_slot(headers: np.ndarray, bodies: Sequence[np.ndarray]) -> int | None:
    """Return the newest of a store record's two slots whose checksum agrees; None where neither does."""
    written = [slot for slot in (0, 1) if headers[slot]["nanoseconds"]]
    whole = [slot for slot in written if headers[slot]["checksum"] == record_checksum(headers[slot], bodies[slot])]
    return max(whole, key=lambda slot: (int(headers[slot]["version"]), int(headers[slot]["nanoseconds"])), default=None)


def _stored_shard(start: int, size: int, header: np.ndarray, parts: Sequence[str], body: np.ndarray) -> StoredShard:
    """Return a shard of the store from the header and the body of its valid slot."""
    values = {part: body[place * size : (place + 1) * size] for place, part in enumerate(parts)}
    version, pushes, images, nanoseconds, batches, _ = header.item()
    if values:
        values[BATCHES] = np.array(batches, np.uint64).view(np.float64)
    return StoredShard(
        start=start,
        size=size,
        version=version,
        pushes=pushes,
        images=images,
        nanoseconds=nanoseconds,
        values=values,
    )
