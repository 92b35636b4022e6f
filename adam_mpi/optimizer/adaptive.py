"""Coefficients of the rules with a step size of its own for each parameter. Pure.

They are not linear in the gradient, so the gradients of different pushes are not summed: each push is as many steps as
it has batches, on its mean gradient, one after the other. A push of u batches, where u is no whole number, takes
ceil(u) steps of u / ceil(u) batches each: what a batch keeps of a moment is raised to that power. AdaGrad sums squares
and keeps all of them, so it takes one step on the mean gradient however many batches a push has.
"""

import math
from typing import NamedTuple

from adam_mpi.optimizer.settings import BatchCounts, Settings


class Adagrad(NamedTuple):
    """The factors of a step of AdaGrad, in the order in which the kernel reads them.

    gradient = sum + pull * weight
    squares' = squares + take * gradient^2
    weight' = weight - gain * gradient / (sqrt(squares') + epsilon)
    """

    gain: float
    take: float
    pull: float
    epsilon: float


class Rmsprop(NamedTuple):
    """The factors of a step of RMSProp, in the order in which the kernel reads them.

    gradient = mean * sum + pull * weight
    square' = keep * square + take * gradient^2
    weight' = weight - gain * gradient / (sqrt(square') + epsilon)
    """

    mean: float
    pull: float
    keep: float
    take: float
    gain: float
    epsilon: float


class Adam(NamedTuple):
    """The factors of a step of Adam or AdamW, in the order in which the kernel reads them.

    gradient = mean * sum + pull * weight
    moment' = moment + turn * (gradient - moment)
    square' = keep * square + take * gradient^2
    weight' = weight - shrink * weight - gain * moment' / (sqrt(square') + epsilon)

    The bias corrections are in gain and epsilon.
    """

    mean: float
    pull: float
    shrink: float
    turn: float
    keep: float
    take: float
    gain: float
    epsilon: float


class Ftrl(NamedTuple):
    """The factors of a step of FTRL-Proximal, in the order in which the kernel reads them.

    gradient = mean * sum
    squares' = squares + take * gradient^2
    dual' = dual + gain * gradient - (sqrt(squares') - sqrt(squares)) * weight
    weight' = -sign(dual') * max(0, |dual'| - l1) / (base + sqrt(squares'))

    The dual vector is the textbook's, times the learning rate.
    """

    mean: float
    take: float
    gain: float
    l1: float
    base: float


def adagrad(settings: Settings, rate: float, counts: BatchCounts) -> list[Adagrad]:
    """Return the coefficients of AdaGrad, which adds the square of the mean gradient once for each batch."""
    take = 1 / counts.present if counts.present else 1.0
    return [Adagrad(rate, take, settings.decay * counts.begun, settings.epsilon)]


def rmsprop(settings: Settings, rate: float, counts: BatchCounts) -> list[Rmsprop]:
    """Return the coefficients of RMSProp, whose state is the running mean of squared gradients."""
    keep = settings.beta2 ** _batches_of_step(counts)
    step = Rmsprop(
        mean=1 / max(counts.present, 1e-30),
        pull=settings.decay,
        keep=keep,
        take=1 - keep,
        gain=rate * _batches_of_step(counts),
        epsilon=settings.epsilon,
    )
    return [step] * _steps(counts)


def adam(settings: Settings, rate: float, counts: BatchCounts) -> list[Adam]:
    """Return the coefficients of Adam, which adds the decay to the gradient."""
    return [_adam(settings, rate, counts, number) for number in range(_steps(counts))]


def adamw(settings: Settings, rate: float, counts: BatchCounts) -> list[Adam]:
    """Return the coefficients of AdamW, which subtracts the decay from the weights."""
    kept = (1 - rate * settings.decay) ** _batches_of_step(counts)
    return [step._replace(pull=0.0, shrink=1 - kept) for step in adam(settings, rate, counts)]


def ftrl(settings: Settings, rate: float, counts: BatchCounts) -> list[Ftrl]:
    """Return the coefficients of FTRL-Proximal, whose weights are zero where the gradients do not exceed l1."""
    batches = _batches_of_step(counts)
    step = Ftrl(
        mean=1 / max(counts.present, 1e-30),
        take=batches,
        gain=rate * batches,
        l1=rate * settings.l1,
        base=1 + rate * settings.decay,
    )
    return [step] * _steps(counts)


def _adam(settings: Settings, rate: float, counts: BatchCounts, number: int) -> Adam:
    """Return the coefficients of step `number` of a push."""
    batches = _batches_of_step(counts)
    after = counts.before + (number + 1) * batches
    keep = settings.beta2**batches
    root = math.sqrt(1 - settings.beta2**after)
    return Adam(
        mean=1 / counts.present,
        pull=settings.decay,
        shrink=0.0,
        turn=1 - settings.beta1**batches,
        keep=keep,
        take=1 - keep,
        gain=rate * batches * root / (1 - settings.beta1**after),
        epsilon=settings.epsilon * root,
    )


def _steps(counts: BatchCounts) -> int:
    """Return how many steps a push takes; none if it has no images."""
    return math.ceil(counts.present)


def _batches_of_step(counts: BatchCounts) -> float:
    """Return how many batches one step of a push stands for."""
    return counts.present / max(1, _steps(counts))
