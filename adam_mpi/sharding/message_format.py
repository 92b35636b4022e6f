"""The format of a message in a mailbox: its header, the kinds of bodies, and its length. Pure."""

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
