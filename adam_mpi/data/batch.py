"""What travels between workers and data ranks: asks, batches, and reports of batches done.

    answer = header (int64 x 8) | ids (int64) | labels (int64) | pixels (uint8, image by image)
"""

from dataclasses import dataclass

import numpy as np

# Tags. Answers have a tag of their own per prefetch slot, so that each finds the ask it belongs to.
ASK, REPORT, ANSWER = 1, 2, 16

# Kinds of asks: which phase comes after the one I know; any batch of this phase; my share of this very batch.
NEXT_PHASE, ANY, SHARE = 1, 2, 3
ASK_WORDS = 8  # kind, slot, phase, batch number, replica, replicas

# Kinds of answers.
PHASE, BATCH, EXHAUSTED, STOP = 1, 2, 3, 4
HEADER_WORDS = 8  # kind, phase, part, epoch, batch number, images

REPORT_WORDS = 5  # phase, images, loss, correct, batch number
PARTS = ("train", "validation", "test")


@dataclass
class Batch:
    phase: int
    epoch: int
    number: int
    source: int
    """The data rank it came from, which hears when it is done."""
    ids: np.ndarray
    labels: np.ndarray
    pixels: np.ndarray


def message_bytes(images: int, shape: tuple[int, int, int]) -> int:
    return 8 * HEADER_WORDS + images * (16 + int(np.prod(shape)))


def pack(header: list[int], ids: np.ndarray, labels: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    words = np.zeros(HEADER_WORDS, np.int64)
    words[: len(header)] = header
    parts = [words, ids.astype(np.int64), labels.astype(np.int64), np.ascontiguousarray(pixels).ravel()]
    return np.concatenate([part.view(np.uint8) for part in parts])


def unpack(message: np.ndarray, source: int, shape: tuple[int, int, int]) -> Batch:
    """Views into the message; nothing is copied."""
    _, phase, _, epoch, number, count = message[: 8 * HEADER_WORDS].view(np.int64)[:6].tolist()
    ids, labels, pixels = np.split(message[8 * HEADER_WORDS : message_bytes(count, shape)], [8 * count, 16 * count])
    return Batch(phase, epoch, number, source, ids.view(np.int64), labels.view(np.int64), pixels.reshape(count, *shape))
