"""Coefficients of the linear rules: one step on a sum of gradients equals as many steps one after the other. Pure.

How many pushes a step folds depends on the load, and a push may have any number of images. So decay, momentum and the
running average count batches, not steps: a step on the gradients of n images is n / `train.batch` batches, whole or
not. Written for one batch, these rules are linear maps of (velocity, weight) and of the batch's gradient,

    (velocity, weight) <- M (velocity, weight) + b gradient

and a step on u batches whose gradients sum to G is M^u and (1 + M + ... + M^(u - 1)) b G / u: exactly what u steps on
the mean gradient do. A gradient that arrives in several parts applies M^u with the first part, and moves the running
average with the last one.
"""

import cmath
from collections.abc import Callable
from typing import NamedTuple

from adam_mpi.optimizer.settings import BatchCounts, Settings

NEAR = 1e-6
"""Eigenvalues nearer to each other than this are moved apart; those nearer to 1 have their sum by its series."""
Matrix2 = tuple[complex, complex, complex, complex]
"""A matrix of two rows, one after the other."""


class Coefficients(NamedTuple):
    """The factors of a step, in the order in which the kernels read them.

    velocity' = keep * velocity + (take * sum + pull * weight)
    weight' = weight - (carry * velocity + (gain * sum + shrink * weight))
    """

    shrink: float = 0.0
    gain: float = 0.0
    carry: float = 0.0
    keep: float = 0.0
    take: float = 0.0
    pull: float = 0.0


def additive(settings: Settings, rate: float, counts: BatchCounts) -> list[Coefficients]:
    """Return the coefficients of an addition, which has none."""
    return [Coefficients()]


def descent(settings: Settings, rate: float, counts: BatchCounts) -> list[Coefficients]:
    """Return the coefficients of gradient descent, which is momentum without a velocity."""
    kept = 1 - rate * settings.decay
    return [Coefficients(1 - kept**counts.begun, rate * _mean_power(kept, counts.present).real)]


AVERAGED = 0.1
"""What a batch has of a running statistic."""


def average(settings: Settings, rate: float, counts: BatchCounts) -> list[Coefficients]:
    """Return the coefficients of a running average, whose gradients are what was observed, not a change of it."""
    kept = 1 - AVERAGED
    return [Coefficients(1 - kept**counts.begun, -AVERAGED * _mean_power(kept, counts.present).real)]


def momentum(settings: Settings, rate: float, counts: BatchCounts) -> list[Coefficients]:
    """Return the coefficients of a step along the velocity."""
    return [_velocity(settings, rate * settings.momentum, rate, counts)]


def nesterov(settings: Settings, rate: float, counts: BatchCounts) -> list[Coefficients]:
    """Return the coefficients of Nesterov's rule, which steps by the gradient and the new velocity."""
    return [_velocity(settings, rate * settings.momentum**2, rate * (1 + settings.momentum), counts)]


def _velocity(settings: Settings, carried: float, stepped: float, counts: BatchCounts) -> Coefficients:
    """Return the coefficients of a rule that steps by `carried` velocities and `stepped` gradients."""
    matrix: Matrix2 = (settings.momentum, settings.decay, -carried, 1 - stepped * settings.decay)
    keep, pull, carry, stay = _function(lambda value: value**counts.begun, matrix)
    a, b, c, d = _function(lambda value: _mean_power(value, counts.present), matrix)
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
