"""The messages between servers that hold copies of the same shard: steps, whole copies, and checksums.

They lie in rings as pushes do, and use the fields of `HEADER` of `sharding/message_formats.py` in their own way:

    field     RECORD: a step                   PART: an array of a copy         CHECK: a checksum
    shard     the shard                        the shard                        the shard
    sequence  version after the step           version of the copy
    seen      learning rate (bits of float64)  batches (bits of float64)        checksum
    values    size of the folded gradient      size of the array
    first     its offset in the arena          whether a newer copy follows
    clock     images of pushes that begin
    part      images of pushes with a part     number of the array
    codec     images of pushes that end
    images    images of the step
    last      whether it is for some of the
              parameters, NaN for the others

In the place of batch numbers they carry notes: see `notes`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adam_mpi.optimizer.settings import ImageCounts
from adam_mpi.sharding.shards import Shard

# Kinds of bodies, beside those of pushes.
RECORD, PART, CHECK = range(4, 7)


@dataclass(eq=False)
class Record:
    """A step of a shard: what every other copy needs to take the same one."""

    shard: Shard
    version: int
    rate: float
    values: np.ndarray
    """The folded gradient; empty when no message had values to add."""
    notes: np.ndarray
    done: Callable[[], None]
    """Called when all copies have taken the step."""
    images: int = 0
    image_counts: ImageCounts = ImageCounts(0, 0, 0)
    partial: bool = False
    """Whether the gradient is for some of the parameters, and NaN for the others."""
    pending: int = 0
    """Servers that have not taken it yet."""


@dataclass(frozen=True)
class RecordMessage:
    """A record, for one server."""

    record: Record
    header: np.ndarray
    place: int | None
    """Offset of the values in the arena of the sender, for a server that can read them there; else they travel."""

    def write(self, body: np.ndarray) -> np.ndarray:
        """Write the values into `body` if they travel; return the header."""
        record = self.record
        header = self.header.copy()
        header["kind"] = RECORD
        header["sequence"] = record.version
        header["shard"] = record.shard.index
        header["seen"] = np.float64(record.rate).view(np.int64)
        header["values"] = record.values.size
        header["images"] = record.images
        header["last"] = record.partial
        header["clock"], header["part"], header["codec"] = record.image_counts
        if self.place is None:
            header["words"] = record.values.size
            body[: record.values.size] = record.values.view(np.uint32)
        else:
            header["first"] = self.place
        return header

    def batches(self) -> np.ndarray:
        """Return the notes of the record."""
        return self.record.notes

    def acknowledge(self) -> None:
        """Count one server that has taken the step; the last one completes the record."""
        self.record.pending -= 1
        if not self.record.pending:
            self.record.done()


@dataclass(frozen=True)
class PartMessage:
    """One of the arrays of a copy; the last one carries version and table, and makes the copy whole.

    Where a step may have to be taken back, the copy before that step is sent first: `follows` says that the copy after
    it comes next.
    """

    shard: int
    values: np.ndarray
    part: int
    parts: int
    version: int
    stepped: float
    """Batches that the copy has been stepped on."""
    follows: bool
    notes: np.ndarray
    header: np.ndarray
    done: Callable[[], None]

    def write(self, body: np.ndarray) -> np.ndarray:
        """Write the array into `body`; return the header."""
        header = self.header.copy()
        body[: self.values.size] = self.values.view(np.uint32)
        header["kind"] = PART
        header["sequence"] = self.version
        header["shard"] = self.shard
        header["words"] = self.values.size
        header["values"] = self.values.size
        header["seen"] = np.float64(self.stepped).view(np.int64)
        header["part"] = self.part
        header["parts"] = self.parts
        header["first"] = self.follows
        return header

    def batches(self) -> np.ndarray:
        """Return the notes of the copy."""
        return self.notes

    def acknowledge(self) -> None:
        """Report the copy as complete, with its last array."""
        if self.part == self.parts - 1 and not self.follows:
            self.done()


@dataclass(frozen=True)
class CheckMessage:
    """The checksum of a shard, between the records before and after it: the copy must have the same."""

    shard: int
    checksum: int
    header: np.ndarray
    done: Callable[[], None]

    def write(self, body: np.ndarray) -> np.ndarray:
        """Return the header; there is no body."""
        header = self.header.copy()
        header["kind"] = CHECK
        header["shard"] = self.shard
        header["seen"] = self.checksum
        return header

    def batches(self) -> np.ndarray:
        """Return no batches."""
        return np.empty(0, np.int64)

    def acknowledge(self) -> None:
        """Report the comparison as done."""
        self.done()


ReplicationMessage = RecordMessage | PartMessage | CheckMessage


def notes(numbers: Mapping[int, int], batches: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Return the notes of a step or copy: how many pushers, (pusher, number) of each, then the ids of its batches.

    `numbers`: pusher -> the highest number of its messages that is in the step or copy.
    """
    pairs = np.array([len(numbers), *(word for pair in numbers.items() for word in pair)], np.int64)
    some = [ids for ids in batches if ids.size]
    return np.concatenate([pairs, np.unique(np.concatenate(some))]) if some else pairs


def read_notes(words: np.ndarray) -> tuple[dict[int, int], np.ndarray]:
    """Return pusher -> number, and the ids of batches, from the notes of a message."""
    pairs = int(words[0]) if words.size else 0
    numbers = words[1 : 1 + 2 * pairs].tolist()
    return dict(zip(numbers[::2], numbers[1::2], strict=True)), words[1 + 2 * pairs :].copy()
