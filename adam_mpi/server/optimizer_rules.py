"""What one step on the gradients of several pushes does, so that it comes to what as many steps would do. Pure.

Folding depends on the load, and a push may have any number of images. So decay, momentum and average do not count
steps but batches: a step on the gradients of n images is n / `train.batch` batches, whole or not. Written for one
batch, every rule but AdaGrad's is a linear map of (velocity, weight) and of the batch's gradient,

    (velocity, weight) <- M (velocity, weight) + b gradient

and a step on u batches whose gradients are G together is M^u and (1 + M + ... + M^(u - 1)) b G / u: exactly what u
steps on the mean gradient do. A gradient that comes in several parts has M^u with the first of them, and moves the
average with the last.
"""

import cmath
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from adam_mpi.config import Optimizer

NEAR = 1e-6
"""Eigenvalues that are nearer to each other are moved apart; those nearer to 1 have their sum by its series."""
Square = tuple[complex, complex, complex, complex]
"""A matrix of two rows, one after the other."""


class Counted(NamedTuple):
    """Images whose gradients are in a step: of pushes that begin in it, of all with a part in it, of those that end."""

    begun: int
    present: int
    ended: int


class Numbers(NamedTuple):
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
def numbers(kind: str, optimizer: tuple[float, float], rate: float, begun: float, present: float) -> np.ndarray:
    """For the kernel of a rule with (momentum, decay), a rate, and so many batches; see `Counted`."""
    momentum, decay = optimizer
    if kind == "additive":
        found = Numbers()
    elif kind == "descent":
        kept = 1 - rate * decay
        found = Numbers(1 - kept**begun, rate * _mean_power(kept, present).real)
    elif kind == "adagrad":
        found = Numbers(gain=rate, take=1 / present if present else 1.0, pull=decay * begun)
    else:
        found = _velocity(kind, momentum, decay, rate, begun, present)
    return np.array(found, np.float32)


def ema_weight(optimizer: Optimizer, ended: float) -> np.float32:
    """The share of the new weights in their running average after so many batches."""
    return np.float32(1 - (1 - optimizer.ema) ** ended)


def _velocity(kind: str, momentum: float, decay: float, rate: float, begun: float, present: float) -> Numbers:
    """Momentum steps by the velocity, Nesterov's by the gradient and the velocity after it."""
    carried, stepped = rate * momentum, rate
    if kind == "nesterov":
        carried, stepped = rate * momentum**2, rate * (1 + momentum)
    matrix: Square = momentum, decay, -carried, 1 - stepped * decay
    keep, pull, carry, stay = _function(lambda value: value**begun, matrix)
    a, b, c, d = _function(lambda value: _mean_power(value, present), matrix)
    return Numbers(1 - stay, stepped * d - c, -carry, keep, a - stepped * b, pull)


def _function(of: Callable[[complex], complex], matrix: Square) -> tuple[float, float, float, float]:
    """A function of a matrix, by the line through what it does to the eigenvalues."""
    a, b, c, d = matrix
    middle, root = (a + d) / 2, cmath.sqrt(((a - d) / 2) ** 2 + b * c)
    root = root if abs(root) > NEAR else complex(NEAR)
    first, second = of(middle + root), of(middle - root)
    slope = (first - second) / (2 * root)
    start = first - slope * (middle + root)
    return (start + slope * a).real, (slope * b).real, (slope * c).real, (start + slope * d).real


def _mean_power(value: complex, count: float) -> complex:
    """(1 + value + ... + value^(count - 1)) / count; 1 for a count of zero, whose gradients others have counted."""
    if count == 0:
        return 1.0
    away = value - 1
    if abs(away) < NEAR:
        return 1 + (count - 1) / 2 * away * (1 + (count - 2) / 3 * away)
    return (value**count - 1) / (away * count)
