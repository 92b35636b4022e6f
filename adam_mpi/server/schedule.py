"""Learning-rate schedules: the rate as a function of how much of the training is done. Pure."""

import math
from collections.abc import Callable

from adam_mpi.config import Optimizer
from adam_mpi.sharding.position import Position

STEPS = 3
STEP_FACTOR = 0.3

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "step": lambda done: STEP_FACTOR ** int(done * STEPS),
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def images_passed(position: Position, batch: int, images: int) -> float:
    """Return how many images of all epochs, of `images` each, have passed, including those that were left out.

    A batch counts as whole although images of it were bad. An epoch that ended early counts as whole when the next one
    begins; that one is assumed to have as many batches.
    """
    if not position.epoch:
        return position.images
    done = position.count * batch
    expected = min(images, position.lasted * batch or images)
    return max(position.images, images * (position.epoch - 1 + min(1, done / max(expected, 1))))


def learning_rate(optimizer: Optimizer, images: float, total: int) -> float:
    """Return the rate after `images` of the `total` images of all epochs."""
    done = min(1.0, images / max(total, 1))
    warm = 1.0 if done >= optimizer.warmup else (done + 1 / max(total, 1)) / optimizer.warmup
    return optimizer.learning_rate * SCHEDULES[optimizer.schedule](done) * min(warm, 1.0)
