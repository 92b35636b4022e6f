"""The formats of messages: of pushes in a mailbox, and of asks and reports between workers and data ranks. Pure.

Batches are in `fields.py`.
"""

import numpy as np

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
REPORT_HEADER = 3  # phase, batch number, images; the sums of loss and metrics follow
PARTS = ("train", "validation", "test")


def pack_report(phase: int, number: int, images: int, sums: np.ndarray) -> np.ndarray:
    """Return a worker's report message of `images` images of batch `number`, with sums of loss and metrics."""
    return np.concatenate([np.array([phase, number, images], np.float64), sums])


def unpack_report(report: np.ndarray) -> tuple[int, int, int, np.ndarray]:
    """Return phase, batch number, images and sums of a worker's report message."""
    phase, number, images = report[:REPORT_HEADER].astype(int).tolist()
    return phase, number, images, report[REPORT_HEADER:]
