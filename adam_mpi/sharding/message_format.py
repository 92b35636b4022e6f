"""The header of a message in a mailbox, the kinds of bodies, and the length of a message."""

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
"""position: place in the ring since the generation began, from 1; sequence: number of the push, for life;
words: length of the body; first, values: which parameters of the shard; images: whose gradients are summed;
seen: version of the shard they were computed on; last: the push has no more messages for this server;
finite: there is no NaN or infinity among the values; part, parts: a large factor push comes in several messages."""

# Kinds of bodies: values of a run of parameters; (index, value) pairs; activations and errors to be multiplied.
DELTA, SPARSE, FACTOR = KINDS = 1, 2, 3

HEADER_WORDS = HEADER.itemsize // 4
MOST_PARTS = 1 << 12


def message_words(body: int, batches: int) -> int:
    """Length of a message in 32-bit words."""
    return HEADER_WORDS + body + body % 2 + 2 * batches
