"""Messages in a mailbox: how a push is packed, and how its arrival is judged.

A put completes locally only and may be seen half written, so a message counts as arrived when its header carries
the expected ring position and its checksum agrees. Words are weighted by their place: a sum would pass a torn message.

    message = header (128 bytes) | float32 values, padded to 8 bytes | batch numbers (int64)
"""

import numpy as np
from numba import njit

HEADER = np.dtype(
    {
        "names": ["position", "checksum", "generation", "pusher", "sequence", "clock", "shard", "kind", "last",
                  "values", "batches", "images", "seen"],
        "formats": ["<i8", "<u8", "<i8", "<i8", "<i8", "<i8", "<i4", "<i2", "<i2", "<i8", "<i8", "<i8", "<i8"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 52, 54, 56, 64, 72, 80],
        "itemsize": 128,
    }
)  # fmt: skip
"""position: place in the ring since the generation began, from 1; sequence: number of the push, for life;
last: the push has no more messages for this server; seen: version of the shard that the gradients were computed on."""

DELTA = 1
HEADER_WORDS = HEADER.itemsize // 4
FIRST_SUMMED = 4  # words 0-3 are the position and the checksum itself


def message_words(values: int, batches: int) -> int:
    """Length of a message in 32-bit words."""
    return HEADER_WORDS + values + values % 2 + 2 * batches


def pack(message: np.ndarray, header: np.void | np.ndarray, values: np.ndarray, batches: np.ndarray) -> int:
    """Write a message into a buffer of 32-bit words; returns its length in words."""
    words = message_words(values.size, batches.size)
    message[:HEADER_WORDS].view(HEADER)[0] = header
    body = HEADER_WORDS + values.size + values.size % 2
    message[body - 1] = 0
    message[body:words] = batches.view(np.uint32)
    total = _copy(message, values.view(np.uint32), HEADER_WORDS) + checksum(message, FIRST_SUMMED, HEADER_WORDS)
    total += checksum(message, HEADER_WORDS + values.size, words)
    message[2:4].view(np.uint64)[0] = total
    return words


@njit(nogil=True, cache=True)
def checksum(words: np.ndarray, first: int, last: int) -> np.uint64:
    total = np.uint64(0)
    for i in range(first, last):
        total += np.uint64(words[i]) * np.uint64(np.uint32(2 * i + 1))
    return total


@njit(nogil=True, cache=True)
def _copy(message: np.ndarray, values: np.ndarray, start: int) -> np.uint64:
    """Copy the values into the message and sum them up on the way."""
    total = np.uint64(0)
    for i in range(values.size):
        word = values[i]
        message[start + i] = word
        total += np.uint64(word) * np.uint64(np.uint32(2 * (start + i) + 1))
    return total


@njit(nogil=True, cache=True)
def arrived(ring: np.ndarray, start: int, slot_words: int, position: int) -> bool:
    """Whether the message for this position is whole in the slot that starts at word `start`."""
    header = ring[start : start + HEADER_WORDS].view(np.int64)
    if header[0] != position:
        return False
    values, batches = header[7], header[8]
    if values < 0 or batches < 0 or HEADER_WORDS + values + 1 + 2 * batches > slot_words:
        return False
    words = HEADER_WORDS + values + values % 2 + 2 * batches
    message = ring[start : start + words]
    return np.uint64(header[1]) == checksum(message, FIRST_SUMMED, words)


@njit(nogil=True, cache=True)
def finite(values: np.ndarray) -> bool:
    """Whether no word is the bit pattern of a NaN or an infinity."""
    bad = 0
    for i in range(values.size):
        bad += (values[i] & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    return bad == 0
