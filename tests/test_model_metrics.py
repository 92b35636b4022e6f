"""Metrics against numpy, added up over any split of the images; and the figure that decides when training stops."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_mpi.base.errors import UserError
from adam_mpi.config import load
from adam_mpi.config.training_sections import Train
from adam_mpi.inference.evaluate import Scores
from adam_mpi.model import metrics
from adam_mpi.model.metrics import BINS, CLASSES, SETS, VECTORS, Monitor, choose
from adam_mpi.sharding.training_state import PhaseSchedule

NAMES = {
    CLASSES: ["accuracy", "top1", "top3", "auc"],
    VECTORS: ["mean_absolute_error", "r2"],
    SETS: ["accuracy", "auc"],
}


def drawn(kind, seed, images, outputs):
    """Return outputs and targets of `kind` for `images` images."""
    random = np.random.default_rng(seed)
    values = random.random((images, outputs), np.float32)
    if kind == CLASSES:
        return values / values.sum(axis=1, keepdims=True), random.integers(0, outputs, images)
    if kind == SETS:
        return values, random.integers(0, 2, (images, outputs)).astype(np.uint8)
    return values, random.normal(3.0, 2.0, (images, outputs)).astype(np.float32)


def added(chosen, outputs, targets, cuts):
    """Return the sums over the pieces between `cuts`, as ranks add them up."""
    total = np.zeros(chosen.size(training=False))
    for first, last in pairwise([0, *sorted(cuts), len(outputs)]):
        part = outputs[first:last]
        correct = int((part.argmax(axis=1) == targets[first:last]).sum()) if targets.ndim == 1 else 0
        total += chosen.measure((0.5 * len(part), correct), lambda part=part: part, targets[first:last], training=False)
    return total


def exact_auc(scores, positive):
    """Return the share of pairs in the right order; pairs of equal scores count one half."""
    ahead = scores[positive][:, None] - scores[~positive][None, :]
    return np.mean((ahead > 0) + 0.5 * (ahead == 0))


def expected(name, kind, outputs, targets):
    """Return a metric by numpy alone; NaN where it is not defined."""
    if name.startswith("top"):
        order = np.argsort(-outputs, axis=1, kind="stable")[:, : int(name[3:])]
        return np.mean((order == targets[:, None]).any(axis=1))
    if name == "accuracy":
        return np.mean((outputs > 0.5) == targets) if kind == SETS else np.mean(outputs.argmax(axis=1) == targets)
    if name == "mean_absolute_error":
        return np.abs(outputs.astype(float) - targets).mean()
    if name == "r2":
        spread = ((targets - targets.mean(axis=0, dtype=float)) ** 2).sum(axis=0)
        residual = ((outputs.astype(float) - targets) ** 2).sum(axis=0)
        return np.mean(1 - residual / spread)
    marks = targets == 1 if kind == SETS else targets[:, None] == np.arange(outputs.shape[1])
    curves = [
        exact_auc(outputs[:, index], marks[:, index])
        for index in range(outputs.shape[1])
        if 0 < marks[:, index].sum() < len(marks)
    ]
    return np.mean(curves) if curves else math.nan


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from([CLASSES, VECTORS, SETS]),
    seed=st.integers(0, 2**32 - 1),
    images=st.integers(2, 60),
    outputs=st.integers(3, 6),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_metrics_are_those_of_numpy_however_the_images_are_split(kind, seed, images, outputs, cuts):
    values, targets = drawn(kind, seed, images, outputs)
    chosen = choose(NAMES[kind], "auto", "auto", kind, outputs)
    total = added(chosen, values, targets, [min(cut, images) for cut in cuts])
    found = chosen.values(total, images, images)
    assert found["loss"] == pytest.approx(0.5) and list(found) == list(chosen.names)
    for name in NAMES[kind]:
        wanted = expected(name, kind, values, targets)
        if name == "auc":
            # Scores whose logits are within an eighth may share a bin, where a pair counts one half.
            assert found[name] == pytest.approx(wanted, abs=0.08, nan_ok=True)
        else:
            assert found[name] == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    whole = added(chosen, values, targets, [])
    exact = [name for name in NAMES[kind] if name not in ("mean_absolute_error", "r2")]
    # Counts are whole numbers: their sums are the same to the bit.
    for name, start, end in zip(chosen.names[1:], chosen.starts, chosen.starts[1:], strict=False):
        if name in exact:
            np.testing.assert_array_equal(total[start:end], whole[start:end])


def test_the_area_under_the_curve_is_exact_for_scores_in_different_bins():
    places = np.random.default_rng(1).permutation(BINS)[:60]
    scores = 1 / (1 + np.exp(-((places + 0.5) / BINS * 32 - 16)))
    marks = np.random.default_rng(2).integers(0, 2, (60, 1)).astype(np.uint8)
    chosen = choose(["auc"], "auto", "auto", SETS, 1)
    values = chosen.values(added(chosen, scores[:, None], marks, [7, 20]), 60, 60)
    assert values["auc"] == pytest.approx(exact_auc(scores, marks[:, 0] == 1), rel=1e-12)


def test_equal_outputs_are_ranked_by_their_order_and_nan_is_no_answer():
    chosen = choose(["top1", "top2"], "auto", "auto", CLASSES, 3)
    outputs = np.array([[0.3, 0.3, 0.3], [0.3, 0.3, 0.3], [np.nan, 0.1, 0.2]], np.float32)
    sums = chosen.measure((0.0, 0), lambda: outputs, np.array([1, 0, 0]), training=False)
    assert sums.tolist() == [0.0, 1.0, 2.0]


def test_batches_of_training_report_no_metrics_of_evaluation():
    chosen = choose(["auc", "top2", "accuracy"], "auc", "auto", CLASSES, 4)
    assert chosen.names == ("loss", "top2", "accuracy", "auc") and chosen.size(True) == 3
    called = []

    def outputs():
        called.append(1)
        return np.full((2, 4), 0.25, np.float32)

    sums = chosen.measure((3.0, 1), outputs, np.array([0, 1]), training=True)
    assert sums.tolist() == [3.0, 2.0, 1.0] and len(called) == 1
    assert list(chosen.values(sums, 2, 2)) == ["loss", "top2", "accuracy"]


def test_accuracy_alone_asks_for_no_outputs():
    def outputs():
        raise AssertionError("the kernels of the loss have counted")

    sums = metrics.ACCURACY.measure((3.0, 2), outputs, np.array([0, 1, 1, 1]), training=True)
    assert metrics.ACCURACY.values(sums, 4, 4) == {"loss": 0.75, "accuracy": 0.5}


def test_losses_that_are_not_finite_do_not_count():
    assert metrics.ACCURACY.values(np.array([3.0, 2.0]), 4, 3)["loss"] == 1.0
    assert math.isnan(metrics.ACCURACY.values(np.zeros(2), 4, 0)["loss"])
    assert metrics.ACCURACY.values(np.zeros(2), 0, 0) == {"loss": 0.0, "accuracy": 0.0}


def test_r2_of_outputs_that_do_not_vary():
    chosen = choose(["r2"], "auto", "auto", VECTORS, 2)
    outputs = np.array([[1.0, 2.0], [2.0, 2.0]], np.float32)
    constant = chosen.measure((0.0, 0), lambda: outputs, np.full((2, 2), 5.0, np.float32), training=False)
    assert math.isnan(chosen.values(constant, 2, 2)["r2"])
    half = chosen.measure((0.0, 0), lambda: outputs, np.array([[1.0, 5.0], [2.0, 5.0]], np.float32), training=False)
    assert chosen.values(half, 2, 2)["r2"] == 1.0


def test_classes_and_their_most_frequent_error():
    matrix = np.zeros((3, 3), np.int64)
    outputs = np.eye(3)[[0, 0, 1, 1, 2]]
    metrics.count_confusions(outputs, np.array([0, 0, 0, 1, 0]), matrix)
    rows = metrics.class_rows(matrix, ("a", "b", "c"))
    assert rows[0] == ("a", 4, 0.5, "b (1)") and rows[1] == ("b", 1, 1.0, "") and math.isnan(rows[2][2])


@pytest.mark.parametrize(
    ("names", "monitor", "complaint"),
    [
        (["f1"], "auto", "'f1' is unknown for 10 outputs and targets that are classes"),
        (["top11"], "auto", "'top11' is unknown for 10 outputs"),
        (["r2"], "auto", "'r2' is unknown"),
        (["top5"], "accuracy", "train.monitor = 'accuracy': it must be one of loss, top5"),
    ],
)
def test_unknown_metrics_are_named(names, monitor, complaint):
    with pytest.raises(UserError, match=complaint):
        choose(names, monitor, "auto", CLASSES, 10)


def test_what_is_monitored():
    assert choose((), "auto", "auto").monitor == Monitor("accuracy", "max", True)
    assert choose((), "loss", "auto").monitor == Monitor("loss", "min", False)
    assert choose((), "auto", "auto", VECTORS, 3).monitor == Monitor("loss", "min", False)
    assert choose((), "r2", "auto", VECTORS, 3).monitor == Monitor("r2", "max", False)
    assert choose((), "accuracy", "min").monitor.mode == "min"
    assert load(None, ["train.monitor=loss", "train.target=1.5"]).train.target == 1.5


def epochs(train, monitor, values):
    """Return the epochs that are trained when the monitored figure has `values`, the best value, and why it ends."""
    schedule = PhaseSchedule(train, True, monitor=monitor)
    given_values = iter(values)
    count = 0
    while (phase := schedule.phase) is not None:
        count += phase.training
        schedule.advance(next(given_values) if phase.part == "validation" else math.nan)
    return count, schedule.best, schedule.reason


def test_a_smaller_figure_may_be_better():
    error = Monitor("mean_absolute_error", "min", False)
    assert epochs(Train(epochs=9, patience=2), error, [3.0, 2.0, 2.5, 2.1, 1.0]) == (4, 2.0, "patience")
    assert epochs(Train(epochs=9, target=0.5), error, [3.0, 0.4, 0.1]) == (2, 0.4, "target")
    assert epochs(Train(epochs=3), error, [math.nan, 5.0, 6.0]) == (3, 5.0, "epochs")
    assert epochs(Train(epochs=2, patience=1), Monitor(), [0.0, 0.0]) == (2, 0.0, "patience")


def test_eval_prints_the_metrics_the_classes_and_the_confusion_matrix():
    data = SimpleNamespace(sources={"train": SimpleNamespace(names=("cat", "dog"))}, classes=2)
    scores = Scores("test", choose(["accuracy", "top1"], "auto", "auto"), data, classes=True)
    outputs = np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]], np.float32)
    scores.add((1.5, 2), outputs, np.array([0, 0, 1]))
    assert list(scores.lines()) == [
        "test: accuracy 0.6667, top1 0.6667, loss 0.5000, 3 images",
        "  cat: 0.5000 of 2 images, most often taken for dog (1)",
        "  dog: 1.0000 of 1 images",
        "  class \\ predicted  cat  dog",
        "  cat                  1    1",
        "  dog                  0    1",
    ]
    plain = Scores("test", metrics.ACCURACY, data, classes=False)
    plain.add((1.5, 2), outputs, np.array([0, 0, 1]))
    assert list(plain.lines()) == ["test: accuracy 0.6667, loss 0.5000, 3 images"]
