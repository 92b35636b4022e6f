"""Messages between workers and data ranks: asks for batches, answers, and reports of computed batches.

answer = header (int64 x 8) | ids (int64) | labels (int64) | pixels (uint8 or float32, image by image)
"""

import numpy as np

from adam_mpi.sharding.batch_parts import Batch, shares

# Tags. Every answer has a tag of its own, so that it matches its ask: `ANSWER` plus the number of the ask, from 1 to
# `NUMBERS` - 1 and round again; asks for the next phase have number 0.
ASK = 1
REPORT = 2
ANSWER = 16
NUMBERS = 1 << 13

# Kinds of asks: the phase after the one that the worker knows; any batch of this phase; its share of a given batch.
NEXT_PHASE, ANY, SHARE = range(1, 4)
# An ask is: kind, number of the ask, phase, batch number, replica, replicas; first column and end of columns (0: all)
# of each strip of the replica. The first strip asks, and all are answered.

# Kinds of answers.
PHASE, BATCH, EXHAUSTED, STOP = range(1, 5)
HEADER_WORDS = 8  # kind, phase, part, epoch, batch number, images, batches left; see `DataServer` for a phase

REPORT_WORDS = 5  # phase, images, loss, correct, batch number
PARTS = ("train", "validation", "test")
Shape = tuple[int, int, int]


def message_bytes(images: int, shape: Shape, itemsize: int = 1) -> int:
    """Return the bytes of an answer with `images` images of `shape`, of `itemsize` bytes per value."""
    return 8 * HEADER_WORDS + images * (16 + int(np.prod(shape)) * itemsize)


def pack(header: list[int], ids: np.ndarray, labels: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Return an answer as bytes."""
    words = np.zeros(HEADER_WORDS, np.int64)
    words[: len(header)] = header
    parts = [words, ids.astype(np.int64), labels.astype(np.int64), np.ascontiguousarray(pixels).ravel()]
    return np.concatenate([part.view(np.uint8) for part in parts])


def unpack(message: np.ndarray, shape: Shape, itemsize: int = 1, rank: int = 0, ranks: int = 1) -> Batch:
    """Return the batch of an answer, as views into `message`; nothing is copied.

    Of the `ranks` ranks of a hybrid replica, `rank` has pixels of its share only.
    """
    _, phase, _, epoch, number, count = message[: 8 * HEADER_WORDS].view(np.int64)[:6].tolist()
    edges = shares(count, ranks)
    own = edges[rank + 1] - edges[rank]
    body = message[8 * HEADER_WORDS :]
    pixels = body[16 * count :][: own * int(np.prod(shape)) * itemsize]
    return Batch(
        phase=phase,
        epoch=epoch,
        number=number,
        ids=body[: 8 * count].view(np.int64),
        labels=body[8 * count : 16 * count].view(np.int64),
        pixels=pixels.view(np.uint8 if itemsize == 1 else np.float32).reshape(own, *shape),
        edges=edges if ranks > 1 else (),
    )
