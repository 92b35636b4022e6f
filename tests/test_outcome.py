"""Whether a job has learned anything, from its figures."""

import math

import numpy as np
import pytest

from adam_mpi.data.epoch import EpochProgress, Order
from adam_mpi.monitor import aggregate_statistics
from adam_mpi.sharding.training_state import Phase

TEN = np.arange(1000) % 10


@pytest.mark.parametrize(
    ("images", "not_finite", "done", "ends"),
    [
        (320, 320, False, True),
        (320, 161, False, True),
        # One bad push, or a few of them, are refused, and the job continues.
        (320, 160, False, False),
        (320, 0, False, False),
        # Too early to judge, unless the phase is over.
        (319, 319, False, False),
        (64, 64, True, True),
        (0, 0, True, False),
    ],
)
def test_a_phase_of_nothing_but_nan_ends_the_job(images, not_finite, done, ends):
    assert aggregate_statistics.diverged({"images": images, "images_not_finite": not_finite}, 32, done) is ends


def test_a_loss_that_is_not_finite_is_counted_separately():
    order = Order(Phase(0, "train", 1), 96, 32, 1)
    tally = EpochProgress(order, range(3), lambda number: 0, 1, None)
    for number, loss in enumerate((64.0, math.nan, math.inf)):
        tally.report(number, 32, np.array([loss, 8.0]))
    assert (tally.sums[0], tally.not_finite, tally.finished, tally.complete) == (64.0, 64, 96, True)


@pytest.mark.parametrize(("accuracy", "share"), [(0.08, 0.1), (0.1, 0.1), (0.128, 0.1), (0.129, None), (0.99, None)])
def test_an_accuracy_within_the_noise_of_the_largest_class_is_guessed(accuracy, share):
    """Of 1,000 images in ten classes: three deviations of 0.95 % above a tenth."""
    assert aggregate_statistics.guessed(accuracy, TEN) == share


def test_the_largest_class_counts():
    uneven = np.array([0] * 900 + [1] * 100)
    assert aggregate_statistics.guessed(0.92, uneven) == 0.9 and aggregate_statistics.guessed(0.95, uneven) is None
    assert aggregate_statistics.guessed(1.0, np.zeros(5, np.int64)) is None


@pytest.mark.parametrize(
    ("layers", "dead"),
    [
        ({}, []),
        ({"a": {"dead": 1.0, "gradient_norm": 0.0}, "b": {"gradient_norm": 0.3}}, ["a"]),
        ({"a": {"dead": 0.99, "gradient_norm": 0.1}, "b": {"gradient_norm": 0.3}}, []),
        # No error at all: it has learned everything.
        ({"a": {"dead": 1.0, "gradient_norm": 0.0}, "b": {"gradient_norm": 0.0}}, []),
    ],
)
def test_a_layer_is_dead_when_no_error_comes_through_it(layers, dead):
    assert aggregate_statistics.dead(layers) == dead


@pytest.mark.parametrize(
    ("accuracy", "loss", "guesses"),
    [
        (0.1, 2.303, True),
        (0.1, 40.0, True),
        (0.1, math.nan, True),
        # Rare classes: the largest one is always the best guess, but the loss knows more.
        (0.1, 2.0, False),
        (0.5, 2.303, False),
    ],
)
def test_a_network_guesses_if_neither_accuracy_nor_loss_says_anything(accuracy, loss, guesses):
    results = {"test_accuracy": accuracy, "test_loss": loss}
    assert aggregate_statistics.at_chance(results, "test", TEN) is guesses
    assert not aggregate_statistics.at_chance(results, "test", TEN[:0])


def test_the_test_part_counts_before_the_validation_part():
    results, layers = {"test_accuracy": 0.1135, "validation_accuracy": 0.9}, {}
    (warning,) = aggregate_statistics.warnings(results, {"test": TEN, "validation": TEN}, layers)
    assert warning.startswith("nothing was learned: test accuracy 11.35%, and always the largest class is 10.00%; try")
    assert aggregate_statistics.warnings(results, {"validation": TEN}, layers) == []
    assert aggregate_statistics.warnings(results, {"test": TEN[:0]}, layers) == []
    assert aggregate_statistics.warnings({}, {}, {"a": {"dead": 1.0}, "b": {"gradient_norm": 1.0}}) == [
        "all units of a are dead: no image makes one of them answer"
    ]
