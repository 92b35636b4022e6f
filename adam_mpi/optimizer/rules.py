"""The table of optimizer rules: the state of each, its coefficients, and what several pushes together are. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from adam_mpi.config import Optimizer
from adam_mpi.optimizer import adaptive, linear
from adam_mpi.optimizer.rule_kernels import ADAGRAD, ADAM, ADDITIVE, DESCENT, FTRL, RMSPROP, VELOCITY
from adam_mpi.optimizer.settings import BatchCounts, Settings

WIDTH = 8
"""Numbers in a row of coefficients."""


@dataclass(frozen=True)
class Rule:
    """What servers, workers and files have to know about a rule."""

    name: str
    kernel: int
    """The number of its kernel in `rule_kernels.py`."""
    coefficients: Callable[[Settings, float, BatchCounts], Sequence[tuple[float, ...]]]
    """(settings, learning rate, batch counts) -> the coefficients of each step on the gradients of one push."""
    states: tuple[str, ...] = ()
    """The names of its state vectors, each as long as the weights."""
    linear: bool = True
    """Whether one step on the sum of the gradients of several pushes equals as many steps one after the other. If not,
    servers take the steps of each push in turn. In synchronous training the gradients of a clock are one gradient."""
    counts_batches: bool = False
    """Whether its coefficients depend on how many batches a shard has been stepped on."""
    stays: bool = True
    """Whether a gradient of zero leaves weights and state as they are, without decay."""
    predicts: bool = True
    """Whether a worker may predict, between two pulls, the weights that its own gradients will lead to by plain descent
    at the learning rate of the servers."""


RULES = {
    rule.name: rule
    for rule in (
        Rule("additive", ADDITIVE, linear.additive),
        Rule("descent", DESCENT, linear.descent),
        Rule("momentum", VELOCITY, linear.momentum, ("velocity",), stays=False),
        Rule("nesterov", VELOCITY, linear.nesterov, ("velocity",), stays=False),
        Rule("adagrad", ADAGRAD, adaptive.adagrad, ("squares",), linear=False, predicts=False),
        Rule("rmsprop", RMSPROP, adaptive.rmsprop, ("mean_square",), linear=False, stays=False, predicts=False),
        Rule(
            "adam",
            ADAM,
            adaptive.adam,
            ("mean_gradient", "mean_square"),
            linear=False,
            counts_batches=True,
            stays=False,
            predicts=False,
        ),
        Rule(
            "adamw",
            ADAM,
            adaptive.adamw,
            ("mean_gradient", "mean_square"),
            linear=False,
            counts_batches=True,
            stays=False,
            predicts=False,
        ),
        Rule("ftrl", FTRL, adaptive.ftrl, ("dual", "squares"), linear=False, predicts=False),
    )
}


AVERAGE = Rule("average", DESCENT, linear.average)
"""The rule of running statistics."""


def rule_of(optimizer: Optimizer) -> Rule:
    """Return the rule of the servers; they keep no velocity without momentum, or where each replica has its own."""
    if optimizer.where == "worker":
        return RULES["additive"]
    elsewhere = not optimizer.momentum or optimizer.momentum_where == "replica"
    plain = optimizer.kind in ("momentum", "nesterov") and elsewhere
    return RULES["descent" if plain else optimizer.kind]


def coefficients(rule: Rule, settings: Settings, rate: float, counts: BatchCounts) -> np.ndarray:
    """Return the coefficients of the steps on one push, or on a sum of pushes: a row of float32 for each step."""
    if not rule.counts_batches:
        counts = BatchCounts(0.0, counts.begun, counts.present)
    return _rows(rule.name, settings, rate, counts)


@lru_cache(maxsize=1024)
def _rows(name: str, settings: Settings, rate: float, counts: BatchCounts) -> np.ndarray:
    """Return the coefficients of the rule `name`: shards have the same ones at the same step."""
    rule = AVERAGE if name == AVERAGE.name else RULES[name]
    steps = rule.coefficients(settings, rate, counts)
    rows = np.zeros((len(steps), WIDTH), np.float32)
    for row, step in zip(rows, steps, strict=True):
        row[: len(step)] = step
    return rows
