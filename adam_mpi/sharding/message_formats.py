"""The formats of messages: of pushes in a mailbox, and of batches between workers and data ranks. Pure.

answer = header (int64 x 8) | ids (int64) | labels (int64) | pixels (uint8 or float32, image by image)
"""

import numpy as np

from adam_mpi.sharding.batches import Batch, shares

HEADER = np.dtype(
    {
        "names": [
            "position",
            "checksum",
            "generation",
            "pusher",
            "sequence",
            "clock",
            "words",
            "batches",
            "first",
            "values",
            "images",
            "seen",
            "shard",
            "kind",
            "codec",
            "last",
            "finite",
            "part",
            "parts",
        ],
        "formats": ["<i8", "<u8"] + ["<i8"] * 10 + ["<i4"] * 7,
        "offsets": [*range(0, 96, 8), *range(96, 124, 4)],
        "itemsize": 128,
    }
)
"""position: place in the ring since the generation began, from 1; pusher: its member number; sequence: number of the
push of this member, across generations; words: length of the body; batches: how many batch ids follow it; first,
values: which parameters of the shard; images: how many images' gradients are summed; seen: version of the shard that
they were computed on; last: the push has no more messages for this server; finite: there is no NaN or infinity among
the values; part, parts: a large factor push has several messages."""

# Kinds of bodies: values of a run of parameters; (index, value) pairs; activations and errors to be multiplied.
DELTA, SPARSE, FACTOR = range(1, 4)
KINDS = (DELTA, SPARSE, FACTOR)
HEADER_WORDS = HEADER.itemsize // 4
MOST_PARTS = 1 << 12
"""More than the parts of any push: sequence * MOST_PARTS + part grows with every message of a pusher to a shard."""


def message_words(body: int, batches: int) -> int:
    """Return the length in 32-bit words of a message with a body of `body` words and `batches` batch ids."""
    return HEADER_WORDS + body + body % 2 + 2 * batches


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
BATCH_HEADER_WORDS = 8  # kind, phase, part, epoch, batch number, images, batches left; for a phase see `Phase`
REPORT_WORDS = 5  # phase, images, loss, correct, batch number
PARTS = ("train", "validation", "test")
Shape = tuple[int, int, int]


def batch_message_bytes(images: int, shape: Shape, itemsize: int = 1) -> int:
    """Return the bytes of an answer with `images` images of `shape`, of `itemsize` bytes per value."""
    return 8 * BATCH_HEADER_WORDS + images * (16 + int(np.prod(shape)) * itemsize)


def pack_batch(header: list[int], ids: np.ndarray, labels: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Return an answer as bytes."""
    words = np.zeros(BATCH_HEADER_WORDS, np.int64)
    words[: len(header)] = header
    parts = [words, ids.astype(np.int64), labels.astype(np.int64), np.ascontiguousarray(pixels).ravel()]
    return np.concatenate([part.view(np.uint8) for part in parts])


def unpack_batch(message: np.ndarray, shape: Shape, itemsize: int = 1, rank: int = 0, ranks: int = 1) -> Batch:
    """Return the batch of an answer, as views into `message`; nothing is copied.

    Of the `ranks` ranks of a hybrid replica, `rank` has pixels of its share only.
    """
    _, phase, _, epoch, number, count = message[: 8 * BATCH_HEADER_WORDS].view(np.int64)[:6].tolist()
    edges = shares(count, ranks)
    own = edges[rank + 1] - edges[rank]
    body = message[8 * BATCH_HEADER_WORDS :]
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
