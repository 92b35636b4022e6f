"""Learning-rate schedules: the rate as a function of how much of the training is done. Pure."""

import math
from collections.abc import Callable

from adam_mpi.config import Optimiser

STEPS, STEP_FACTOR = 3, 0.3

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "step": lambda done: STEP_FACTOR ** int(done * STEPS),
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def rate(optimiser: Optimiser, images: int, total: int) -> float:
    """The rate after `images` of the `total` images that all epochs have."""
    done = min(1.0, images / max(total, 1))
    warm = 1.0 if done >= optimiser.warm_up else (done + 1 / max(total, 1)) / optimiser.warm_up
    return optimiser.rate * SCHEDULES[optimiser.schedule](done) * min(warm, 1.0)
