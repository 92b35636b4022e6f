"""Learning-rate schedules: the rate as a function of how much of the training is done. Pure.

With the configured rate r, f = `final_rate`, and t the share of `schedule_length` (by default all epochs) that has
passed:

| schedule | rate |
| --- | --- |
| constant | r |
| step | r times `schedule_factor` for each milestone that has passed, by default after each third |
| cosine | f + (r - f) (1 + cos(pi t)) / 2 |
| linear | r + (f - r) t |
| polynomial | f + (r - f) (1 - t)^power |
| one_cycle | along half a cosine from r / 25 to r in 30 % of the steps, and then from r to f (Smith and Topin, 2018) |
| plateau | r times `schedule_factor` for each `schedule_patience` + 1 epochs without a better validation loss |

A warmup multiplies any of them. The rate of a step is that before it, as in PyTorch.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from adam_mpi.config import Optimizer

THIRDS = 3
ONE_CYCLE_START = 1 / 25
ONE_CYCLE_RISE = 0.3
THRESHOLD = 1e-4
"""A validation loss is better if it is below the best one by more than this share of it."""


@dataclass(frozen=True)
class Progress:
    """How much of the training has passed, in images of all epochs."""

    images: float
    total: int
    batch: int = 1
    """Images of a step."""
    epoch: int = 0
    """Images of an epoch; 0 is all of them."""


@dataclass(frozen=True)
class Stretch:
    """The part of the training that a schedule extends over."""

    images: float
    length: float
    batch: int
    unit: float
    """Images of the unit in which milestones are given."""

    @property
    def done(self) -> float:
        """Return the share that has passed."""
        return min(1.0, self.images / max(self.length, 1))


def _constant(optimizer: Optimizer, stretch: Stretch) -> float:
    return optimizer.learning_rate


def _step(optimizer: Optimizer, stretch: Stretch) -> float:
    passed = sum(milestone * stretch.unit <= stretch.images for milestone in optimizer.milestones)
    if not optimizer.milestones:
        passed = int(stretch.done * THIRDS)
    return optimizer.learning_rate * optimizer.schedule_factor**passed


def _cosine(optimizer: Optimizer, stretch: Stretch) -> float:
    return _along_cosine(optimizer.learning_rate, optimizer.final_rate, stretch.done)


def _linear(optimizer: Optimizer, stretch: Stretch) -> float:
    return optimizer.learning_rate + (optimizer.final_rate - optimizer.learning_rate) * stretch.done


def _polynomial(optimizer: Optimizer, stretch: Stretch) -> float:
    left = (1 - stretch.done) ** optimizer.power
    return optimizer.final_rate + (optimizer.learning_rate - optimizer.final_rate) * left


def _one_cycle(optimizer: Optimizer, stretch: Stretch) -> float:
    """Return the rate of one cycle, whose highest and last rate are those of whole steps."""
    highest = ONE_CYCLE_RISE * stretch.length - stretch.batch
    last = stretch.length - stretch.batch
    if stretch.images < highest:
        return _along_cosine(
            ONE_CYCLE_START * optimizer.learning_rate, optimizer.learning_rate, stretch.images / highest
        )
    share = (stretch.images - highest) / max(last - highest, 1)
    return _along_cosine(optimizer.learning_rate, optimizer.final_rate, min(1.0, share))


def _along_cosine(first: float, last: float, share: float) -> float:
    """Return the value at `share` of the way from `first` to `last` along half a cosine."""
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * share))


SCHEDULES: dict[str, Callable[[Optimizer, Stretch], float]] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
    "linear": _linear,
    "polynomial": _polynomial,
    "one_cycle": _one_cycle,
    "plateau": _constant,
}


def learning_rate(optimizer: Optimizer, progress: Progress) -> float:
    """Return the rate of the next step; `plateau` multiplies it by `Plateau.scale` besides."""
    unit = progress.batch if optimizer.schedule_unit == "steps" else progress.epoch or progress.total
    length = optimizer.schedule_length * unit or progress.total
    stretch = Stretch(progress.images, length, progress.batch, unit)
    done = min(1.0, progress.images / max(progress.total, 1))
    warm = 1.0 if done >= optimizer.warmup else (done + 1 / max(progress.total, 1)) / optimizer.warmup
    return SCHEDULES[optimizer.schedule](optimizer, stretch) * min(warm, 1.0)


@dataclass(frozen=True)
class Plateau:
    """The state of the schedule plateau: it follows the losses of validation."""

    best: float | None = None
    bad_epochs: int = 0
    """Epochs since the best loss, or since the rate was reduced."""
    scale: float = 1.0
    """By what the rate is multiplied."""

    def after(self, loss: float, optimizer: Optimizer) -> "Plateau":
        """Return the state after an epoch with this validation `loss`."""
        if self.best is None or loss < self.best * (1 - THRESHOLD):
            return replace(self, best=loss, bad_epochs=0)
        if self.bad_epochs < optimizer.schedule_patience:
            return replace(self, bad_epochs=self.bad_epochs + 1)
        return replace(self, bad_epochs=0, scale=self.scale * optimizer.schedule_factor)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values, from which `Plateau(**values)` is made."""
        return asdict(self)
