"""Asks of workers as a data rank reads them, and the messages that answer them."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from adam_mpi.data.batch_loader import LoadedBatch
from adam_mpi.sharding.phases import Phase
from adam_mpi.transport import batch_message


@dataclass(frozen=True)
class Ask:
    """A worker's ask for the next phase, for any batch of a phase, or for a share of one batch."""

    source: int
    """The rank that asks."""
    kind: int
    """NEXT_PHASE, ANY or SHARE of `batch_message`."""
    slot: int
    """The number of the ask, which its answer carries in its tag."""
    phase: int
    """The number of the last phase that the worker knows."""
    number: int
    """The batch, of an ask for a share."""
    replica: int
    replicas: int
    columns: tuple[slice, ...]
    """The columns of an image that each strip of the replica needs."""

    @classmethod
    def parse(cls, source: int, words: np.ndarray) -> "Ask":
        """Read the ask that `words` from rank `source` hold; an end of columns that is 0 stands for all columns."""
        kind, slot, phase, number, replica, replicas, *edges = words.tolist()
        columns = tuple(slice(first, end or None) for first, end in zip(edges[::2], edges[1::2], strict=True))
        return cls(source, kind, slot, phase, number=number, replica=replica, replicas=replicas, columns=columns)


def stop() -> np.ndarray:
    """Return the answer to every ask once the job stops."""
    return _header_only(batch_message.STOP)


def exhausted(phase: int) -> np.ndarray:
    """Return the answer that no batch of `phase` is left."""
    return _header_only(batch_message.EXHAUSTED, phase)


def phase(phase: Phase, count: int, itemsize: int, first: int) -> np.ndarray:
    """Return the answer that names `phase`: its `count` images, the bytes of a pixel, its `first` batch not done."""
    part = batch_message.PARTS.index(phase.part)
    return _header_only(batch_message.PHASE, phase.number, part, phase.epoch, count, itemsize, first)


def batch(
    phase: Phase, number: int, batch: LoadedBatch, columns: tuple[slice, ...], *, remaining: int, hybrid: bool
) -> list[np.ndarray]:
    """Return a message for each strip of a replica, with the ids and labels of batch `number` and part of its pixels.

    A strip gets its `columns` of all images, a rank of a hybrid replica all columns of its images.
    `remaining` is the number of batches that are not handed out.
    """
    part = batch_message.PARTS.index(phase.part)
    header = [batch_message.BATCH, phase.number, part, phase.epoch, number, batch.ids.size, remaining]
    if hybrid:
        edges = batch_message.shares(batch.ids.size, len(columns))
        pixels = [batch.pixels[first:last] for first, last in pairwise(edges)]
    else:
        pixels = [batch.pixels[..., own] for own in columns]
    return [batch_message.pack(header, batch.ids, batch.labels, own) for own in pixels]


def _header_only(*header: int) -> np.ndarray:
    """Return a message without images."""
    return batch_message.pack(
        list(header), ids=np.empty(0, np.int64), labels=np.empty(0, np.int64), pixels=np.empty(0, np.uint8)
    )
