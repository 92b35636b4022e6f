"""Metrics: sums over images that ranks add up exactly, and the figures computed from them. Pure.

A batch reports one flat vector of sums. The first is that of the losses, then come those of each metric; the metrics
that are computed only in evaluation come last, so that batches of training report a prefix of the vector.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.model import metric_kernels as kernels

LOSS = "loss"
CLASSES = "classes"
VECTORS = "vectors"
SETS = "sets"
SEQUENCES = "sequences"
BINS = 256
"""Bins of scores, from which the area under the ROC curve is computed."""
MOST_CURVES = 100
"""Outputs up to which the area under the ROC curve is computed."""
KNOWN = "accuracy, topK (top5), auc, mean_absolute_error, r2"
Outputs = Callable[[], np.ndarray]
"""Returns what the network computes for the images of a batch: (images, outputs)."""


@dataclass(frozen=True)
class Metric:
    """A figure of merit: how its sums are added up from outputs and targets, and its value."""

    name: str
    sums: int
    """How many numbers it adds up."""
    value: Callable[[np.ndarray, float], float]
    """(sums, images) -> the value."""
    add: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None
    """Adds to the sums, from outputs and targets of a batch; None where the kernels of the loss count it."""
    mode: str = "max"
    """Whether a larger value is better ("max") or a smaller one ("min")."""
    percent: bool = False
    """Whether it is shown as a percentage."""
    evaluated: bool = False
    """Whether it is computed only in evaluation, because it costs time or has many sums."""


@dataclass(frozen=True)
class Monitor:
    """The figure of the validation part that decides which epoch is best and when training stops."""

    name: str = "accuracy"
    mode: str = "max"
    percent: bool = True

    def better(self, value: float, best: float | None) -> bool:
        """Return whether `value` is better than `best`; any number is better than None, and NaN than nothing."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value > best if self.mode == "max" else value < best

    def reaches(self, value: float, target: float) -> bool:
        """Return whether `value` is at least as good as `target`."""
        return value >= target if self.mode == "max" else value <= target

    def text(self, value: float) -> str:
        """Return `value` as people read it."""
        return f"{value:.2%}" if self.percent else f"{value:.4g}"


@dataclass(frozen=True)
class MetricSet:
    """The metrics of a job, in the order of their sums, and the one that is monitored."""

    metrics: tuple[Metric, ...]
    monitor: Monitor
    starts: tuple[int, ...] = field(init=False)
    """Where the sums of each metric begin, and where the last ones end."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", tuple(accumulate((metric.sums for metric in self.metrics), initial=1)))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all figures: the loss, and the metrics."""
        return (LOSS, *(metric.name for metric in self.metrics))

    def chosen(self, training: bool) -> Sequence[Metric]:
        """Return the metrics of batches in training or in evaluation."""
        return [metric for metric in self.metrics if not (training and metric.evaluated)]

    def size(self, training: bool) -> int:
        """Return the numbers that a batch reports."""
        return self.starts[len(self.chosen(training))]

    def measure(self, result: tuple[float, int], outputs: Outputs, targets: np.ndarray, training: bool) -> np.ndarray:
        """Return the sums of a batch whose loss and number of correct images are `result`.

        `outputs` is called only where a metric needs more than `result`.
        """
        sums = np.zeros(self.size(training))
        sums[0] = result[0]
        for metric, start, end in zip(self.chosen(training), self.starts, self.starts[1:], strict=False):
            if metric.add is None:
                sums[start] = result[1]
            elif len(targets):
                metric.add(sums[start:end], outputs(), targets)
        return sums

    def values(self, sums: np.ndarray, images: float, finite: float) -> dict[str, float]:
        """Return the figures by name, from `sums` over `images` images, of which `finite` have a finite loss."""
        found = {LOSS: math.nan if 0 < images and not finite else float(sums[0]) / max(finite, 1)}
        for metric, start, end in zip(self.metrics, self.starts, self.starts[1:], strict=False):
            if end <= len(sums):
                found[metric.name] = metric.value(np.asarray(sums[start:end]), images)
        return found

    def texts(self, figures: Mapping[str, float], percent: bool = False) -> dict[str, str]:
        """Return the figures that are metrics as text, by name."""
        found = {LOSS: f"{figures[LOSS]:.4f}"}
        for metric in self.metrics:
            if metric.name in figures:
                shown = f"{figures[metric.name]:.2%}" if percent and metric.percent else f"{figures[metric.name]:.4f}"
                found[metric.name] = shown
        return found


def _mean(sums: np.ndarray, images: float) -> float:
    return float(sums[0]) / max(images, 1)


def _mean_of_counted(sums: np.ndarray, images: float) -> float:
    return float(sums[0]) / max(float(sums[1]), 1)


def r_squared(sums: np.ndarray, images: float) -> float:
    """Return the coefficient of determination, averaged over the outputs that vary; NaN where none does."""
    count = sums[0]
    total, squares, residual = sums[1:].reshape(-1, 3).T
    if not count:
        return math.nan
    spread = squares - total * total / count
    varies = spread > 1e-12 * squares
    return float(np.mean(1 - residual[varies] / spread[varies])) if varies.any() else math.nan


def area_under_curve(sums: np.ndarray, images: float) -> float:
    """Return the area under the ROC curve, averaged over outputs that have images of both kinds; NaN without any.

    Scores in one bin count as equal.
    """
    counts = sums.reshape(-1, 2, BINS)
    negative, positive = counts[:, 0], counts[:, 1]
    below = np.cumsum(negative, axis=1) - negative / 2
    pairs = negative.sum(axis=1) * positive.sum(axis=1)
    wins = (below * positive).sum(axis=1)
    return float(np.mean(wins[pairs > 0] / pairs[pairs > 0])) if (pairs > 0).any() else math.nan


def class_rows(confusion: np.ndarray, names: Sequence[str]) -> list[tuple[str, int, float, str]]:
    """Return name, images, share of them that is right (NaN without images) and most frequent error of each class.

    `confusion` is a matrix [class, predicted class]; see `count_confusions`.
    """
    found = []
    for number, row in enumerate(confusion):
        others = row.copy()
        others[number] = 0
        images = int(row.sum())
        error = f"{names[others.argmax()]} ({others.max()})" if others.any() else ""
        found.append((names[number], images, float(row[number]) / images if images else math.nan, error))
    return found


def count_confusions(outputs: np.ndarray, targets: np.ndarray, matrix: np.ndarray) -> None:
    """Count each image of a batch in `matrix` at its class and the one with the largest output."""
    np.add.at(matrix, (targets, outputs.argmax(axis=1)), 1)


def make(name: str, kind: str, outputs: int) -> Metric:
    """Return the metric `name` of `outputs` outputs for targets of `kind`; raise UserError for an unknown one."""
    top = re.fullmatch(r"top([1-9]\d*)", name)
    if name == "accuracy" and kind == CLASSES:
        return Metric(name, 1, _mean, percent=True)
    if name == "accuracy" and kind == SETS:
        return Metric(name, 2, _mean_of_counted, kernels.count_labels, percent=True)
    if name == "accuracy" and kind == SEQUENCES:
        return Metric(name, 2, _mean_of_counted, kernels.count_positions, percent=True)
    if top and kind == CLASSES and int(top[1]) <= outputs:
        return Metric(name, 1, _mean, partial(kernels.count_top, int(top[1])), percent=True)
    if name == "mean_absolute_error" and kind == VECTORS:
        return Metric(name, 2, _mean_of_counted, kernels.add_absolute_errors, mode="min")
    if name == "r2" and kind == VECTORS:
        return Metric(name, 1 + 3 * outputs, r_squared, kernels.add_squares)
    if name == "auc" and kind in (CLASSES, SETS) and outputs <= MOST_CURVES:
        add = kernels.count_classes_in_bins if kind == CLASSES else kernels.count_labels_in_bins
        return Metric(name, 2 * BINS * outputs, area_under_curve, add, evaluated=True)
    raise UserError(
        f"train.metrics: {name!r} is unknown for {outputs} outputs and targets that are {kind}; known: {KNOWN}"
    )


DEFAULTS = {
    CLASSES: ("accuracy",),
    VECTORS: ("mean_absolute_error", "r2"),
    SETS: ("accuracy", "auc"),
    SEQUENCES: ("accuracy",),
}
"""Metrics of each kind of targets where none are configured."""


def choose(names: Sequence[str], monitor: str, mode: str, kind: str = CLASSES, outputs: int = 2) -> MetricSet:
    """Return the metrics `names`, or those that suit targets of `kind`; `monitor` and `mode` may be "auto".

    Raises UserError for a metric that is unknown, and for a monitor that is none of them.
    """
    found = [make(name, kind, outputs) for name in dict.fromkeys(names or DEFAULTS[kind])]
    ordered = sorted(found, key=lambda metric: metric.evaluated)
    modes = {LOSS: Metric(LOSS, 1, _mean, mode="min")} | {metric.name: metric for metric in ordered}
    chosen = (ordered[0].name if kind == CLASSES else LOSS) if monitor == "auto" else monitor
    if chosen not in modes:
        raise UserError(f"train.monitor = {chosen!r}: it must be one of {', '.join(modes)}; see train.metrics")
    direction = modes[chosen].mode if mode == "auto" else mode
    return MetricSet(tuple(ordered), Monitor(chosen, direction, modes[chosen].percent))


def read_monitor(summary: Mapping[str, Any]) -> Monitor:
    """Return the monitored figure of a run by its summary; accuracy where the summary does not name one."""
    found = summary.get("monitor")
    if found is None:
        return Monitor()
    return Monitor(found["name"], found["mode"], found["name"] == "accuracy" or found["name"].startswith("top"))


ACCURACY = choose((), "auto", "auto")
"""What classification computes where nothing else is configured."""
