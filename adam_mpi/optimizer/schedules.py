"""Learning-rate schedules: the rate as a function of how much of the training is done. Pure."""

import math
from collections.abc import Callable

from adam_mpi.config import Optimizer

STEPS = 3
STEP_FACTOR = 0.3

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "step": lambda done: STEP_FACTOR ** int(done * STEPS),
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def learning_rate(optimizer: Optimizer, images: float, total: int) -> float:
    """Return the rate after `images` of the `total` images of all epochs."""
    done = min(1.0, images / max(total, 1))
    warm = 1.0 if done >= optimizer.warmup else (done + 1 / max(total, 1)) / optimizer.warmup
    return optimizer.learning_rate * SCHEDULES[optimizer.schedule](done) * min(warm, 1.0)
