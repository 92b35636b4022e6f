"""Learning-rate schedules: the rate as a function of how much of the training is done. Pure."""

import math
from collections.abc import Callable

from adam_mpi.config import Optimiser

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def rate(optimiser: Optimiser, images: int, total: int) -> float:
    """The rate after `images` of the `total` images that all epochs have."""
    return optimiser.rate * SCHEDULES[optimiser.schedule](min(1.0, images / max(total, 1)))
