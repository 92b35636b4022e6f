"""A batch, and the parts that it is cut into so that threads have work while one waits for a neighbor. Pure.

A batch on strips is cut into consecutive parts. In a hybrid replica, whose ranks each hold pixels of their own share of
the images, it is cut into rounds: each takes images of every rank's share.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

LEAST_IMAGES = 16
"""Of a part, and of each rank of a hybrid replica: fewer images would leave vectors empty."""


@dataclass
class Batch:
    """Images with their ids and labels: batch `number` of an epoch, or one replica's share of it."""

    phase: int
    epoch: int
    number: int
    ids: np.ndarray
    labels: np.ndarray
    pixels: np.ndarray
    edges: tuple[int, ...] = ()
    """In a hybrid replica, whose ranks have pixels of their own images only: where the images of each begin and end."""


def most(in_flight: int, ranks: int) -> tuple[int, int]:
    """Return the most parts of a batch, and the ranks that share its images.

    A hybrid replica of `ranks` ranks has as many rounds as ranks; otherwise `in_flight` parts are computed at a time.
    """
    return (ranks, ranks) if ranks > 1 else (in_flight, 1)


def count(images: int, most: int, ranks: int = 1) -> int:
    """Return how many parts a batch of `images` images has, at most `most`."""
    return max(1, min(most, -(-images // (LEAST_IMAGES * ranks))))


def largest(batch: int, most: int, ranks: int = 1) -> int:
    """Return how many images a part of a batch of up to `batch` images has at most: the capacity of a context.

    Shares and rounds are both cut evenly: that may add an image for each rank but one.
    """
    return min(batch, max(LEAST_IMAGES * ranks, -(-batch // most)) + ranks - 1)


def shares(images: int, ranks: int) -> tuple[int, ...]:
    """Return the edges of `ranks` consecutive shares of `images` images, of nearly equal size."""
    return tuple(rank * images // ranks for rank in range(ranks + 1))


def cut_batch(batch: Batch, parts: int) -> list[Batch]:
    """Return `batch` cut into `parts` consecutive parts of nearly equal size."""
    edges = shares(batch.labels.size, parts)
    return [
        replace(batch, ids=batch.ids[a:b], labels=batch.labels[a:b], pixels=batch.pixels[a:b])
        for a, b in pairwise(edges)
    ]


def cut_rounds(batch: Batch, rounds: int, rank: int) -> list[Batch]:
    """Return `batch` of a hybrid replica, as `rank` has it, cut into `rounds` with nearly equal parts of all shares."""
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
