"""What travels between workers and data ranks: asks, batches, and reports of batches done.

answer = header (int64 x 8) | ids (int64) | labels (int64) | pixels (uint8 or float32, image by image)
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

# Tags. Every answer has a tag of its own, so that each finds the ask it belongs to: the number of the ask, from 1 on
# and round again; asks for the next phase have 0.
ASK, REPORT, ANSWER, NUMBERS = 1, 2, 16, 1 << 13

# Kinds of asks: which phase comes after the one I know; any batch of this phase; my share of this very batch.
NEXT_PHASE, ANY, SHARE = 1, 2, 3
# An ask is: kind, number of the ask, phase, batch number, replica, replicas; first column and end of columns (0: all)
# of each strip of the replica. The first strip asks, and all are answered.

# Kinds of answers.
PHASE, BATCH, EXHAUSTED, STOP = 1, 2, 3, 4
HEADER_WORDS = 8  # kind, phase, part, epoch, batch number, images, batches left; see `DataServer` for a phase

REPORT_WORDS = 5  # phase, images, loss, correct, batch number
PARTS = ("train", "validation", "test")
Shape = tuple[int, int, int]


@dataclass
class Batch:
    phase: int
    epoch: int
    number: int
    ids: np.ndarray
    labels: np.ndarray
    pixels: np.ndarray
    edges: tuple[int, ...] = ()
    """In a hybrid replica, whose ranks have pixels of their own images only: where those of each begin and end."""


def shares(images: int, ranks: int) -> tuple[int, ...]:
    """Edges of as many images for each of the ranks, or nearly."""
    return tuple(rank * images // ranks for rank in range(ranks + 1))


def cut_rounds(batch: Batch, rounds: int, rank: int) -> list[Batch]:
    """A batch of a hybrid replica, cut so that each round takes as many images of every rank's share, or nearly."""
    found = []
    for number in range(rounds):
        taken = [
            (a + number * (b - a) // rounds, a + (number + 1) * (b - a) // rounds) for a, b in pairwise(batch.edges)
        ]
        chosen = np.concatenate([np.arange(a, b) for a, b in taken])
        edges = (0, *(int(edge) for edge in np.cumsum([b - a for a, b in taken])))
        first, last = (image - batch.edges[rank] for image in taken[rank])
        own = batch.pixels[first:last]
        found.append(replace(batch, ids=batch.ids[chosen], labels=batch.labels[chosen], pixels=own, edges=edges))
    return found


def cut_batch(batch: Batch, parts: int) -> list[Batch]:
    """The images of a batch, cut into consecutive parts of nearly equal size."""
    edges = [part * batch.labels.size // parts for part in range(parts + 1)]
    return [
        replace(batch, ids=batch.ids[a:b], labels=batch.labels[a:b], pixels=batch.pixels[a:b])
        for a, b in pairwise(edges)
    ]


def message_bytes(images: int, shape: Shape, itemsize: int = 1) -> int:
    return 8 * HEADER_WORDS + images * (16 + int(np.prod(shape)) * itemsize)


def pack(header: list[int], ids: np.ndarray, labels: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    words = np.zeros(HEADER_WORDS, np.int64)
    words[: len(header)] = header
    parts = [words, ids.astype(np.int64), labels.astype(np.int64), np.ascontiguousarray(pixels).ravel()]
    return np.concatenate([part.view(np.uint8) for part in parts])


def unpack(message: np.ndarray, shape: Shape, itemsize: int = 1, rank: int = 0, ranks: int = 1) -> Batch:
    """Views into the message; nothing is copied. Of a hybrid replica's ranks each has pixels of its share only."""
    _, phase, _, epoch, number, count = message[: 8 * HEADER_WORDS].view(np.int64)[:6].tolist()
    edges = shares(count, ranks)
    own = edges[rank + 1] - edges[rank]
    body = message[8 * HEADER_WORDS :]
    ids, labels, pixels = body[: 8 * count], body[8 * count : 16 * count], body[16 * count :]
    pixels = pixels[: own * int(np.prod(shape)) * itemsize]
    values = pixels.view(np.uint8 if itemsize == 1 else np.float32).reshape(own, *shape)
    return Batch(phase, epoch, number, ids.view(np.int64), labels.view(np.int64), values, edges if ranks > 1 else ())
