"""Coefficients of one step on the gradients of several pushes, equal to as many steps one after the other. Pure.

How many pushes a step folds depends on the load, and a push may have any number of images. So decay, momentum and the
running average count batches, not steps: a step on the gradients of n images is n / `train.batch` batches, whole or
not. Written for one batch, every rule but AdaGrad's is a linear map of (velocity, weight) and of the batch's gradient,

    (velocity, weight) <- M (velocity, weight) + b gradient

and a step on u batches whose gradients sum to G is M^u and (1 + M + ... + M^(u - 1)) b G / u: exactly what u steps on
the mean gradient do. A gradient that arrives in several parts applies M^u with the first part, and moves the running
average with the last one.
"""

import cmath
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from adam_mpi.config import Optimizer
from adam_mpi.sharding.training_state import Position

NEAR = 1e-6
"""Eigenvalues nearer to each other than this are moved apart; those nearer to 1 have their sum by its series."""
Matrix2 = tuple[complex, complex, complex, complex]
"""A matrix of two rows, one after the other."""


class ImageCounts(NamedTuple):
    """Images whose gradients are in a step: of pushes that begin in it, of all with a part in it, of those that end."""

    begun: int
    present: int
    ended: int


class Coefficients(NamedTuple):
    """The factors of a step, in the order in which the kernels read them.

    velocity' = keep * velocity + (take * sum + pull * weight)
    weight' = weight - (carry * velocity + (gain * sum + shrink * weight))

    AdaGrad's gradient is sum + pull * weight, its squares grow by take * gradient^2, and gain is its rate.
    """

    shrink: float = 0.0
    gain: float = 0.0
    carry: float = 0.0
    keep: float = 0.0
    take: float = 0.0
    pull: float = 0.0


@lru_cache(maxsize=256)
def coefficients(kind: str, optimizer: tuple[float, float], rate: float, begun: float, present: float) -> np.ndarray:
    """Return the coefficients of one step of rule `kind`, as the kernels read them.

    `optimizer` is (momentum, decay); `begun` and `present` are the batches of `ImageCounts`.
    """
    momentum, decay = optimizer
    if kind == "additive":
        found = Coefficients()
    elif kind == "descent":
        kept = 1 - rate * decay
        found = Coefficients(1 - kept**begun, rate * _mean_power(kept, present).real)
    elif kind == "adagrad":
        found = Coefficients(gain=rate, take=1 / present if present else 1.0, pull=decay * begun)
    else:
        found = _velocity(kind, optimizer, rate, begun, present)
    return np.array(found, np.float32)


def ema_weight(optimizer: Optimizer, ended: float) -> np.float32:
    """Return the share of the new weights in their running average after `ended` batches."""
    return np.float32(1 - (1 - optimizer.ema) ** ended)


def _velocity(kind: str, optimizer: tuple[float, float], rate: float, begun: float, present: float) -> Coefficients:
    """Return the coefficients of momentum, or of Nesterov's rule, which steps by the gradient and the new velocity."""
    momentum, decay = optimizer
    carried = rate * momentum
    stepped = rate
    if kind == "nesterov":
        carried = rate * momentum**2
        stepped = rate * (1 + momentum)
    matrix: Matrix2 = (momentum, decay, -carried, 1 - stepped * decay)
    keep, pull, carry, stay = _function(lambda value: value**begun, matrix)
    a, b, c, d = _function(lambda value: _mean_power(value, present), matrix)
    return Coefficients(shrink=1 - stay, gain=stepped * d - c, carry=-carry, keep=keep, take=a - stepped * b, pull=pull)


def _function(of: Callable[[complex], complex], matrix: Matrix2) -> tuple[float, float, float, float]:
    """Return the function `of` of a matrix, by the line through its values at the eigenvalues."""
    a, b, c, d = matrix
    middle = (a + d) / 2
    root = cmath.sqrt(((a - d) / 2) ** 2 + b * c)
    root = root if abs(root) > NEAR else complex(NEAR)
    first = of(middle + root)
    second = of(middle - root)
    slope = (first - second) / (2 * root)
    start = first - slope * (middle + root)
    return (start + slope * a).real, (slope * b).real, (slope * c).real, (start + slope * d).real


def _mean_power(value: complex, count: float) -> complex:
    """Return (1 + value + ... + value^(count - 1)) / count; 1 for a count of 0, whose gradients others have counted."""
    if count == 0:
        return 1.0
    away = value - 1
    if abs(away) < NEAR:
        return 1 + (count - 1) / 2 * away * (1 + (count - 2) / 3 * away)
    return (value**count - 1) / (away * count)


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
