"""The detector of divergence, on streams of losses such as jobs report them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.monitor.divergence import DivergenceDetector, LossTotals, LossWindow, LossWindows

TEN = math.log(10)
STEP = 0.5
"""Seconds between two windows, as data ranks report."""


def window(index, loss, norm=None, dead=False):
    finite = math.isfinite(loss)
    return LossWindow(
        began=index * STEP,
        ended=(index + 1) * STEP,
        images=1000,
        loss=loss,
        not_finite=0.0 if finite else 1.0,
        weight_norm=norm,
        dead=dead,
    )


def first_alarm(losses, chance=TEN, detector=None, norms=(), dead=()):
    """Return the index of the window that raises the alarm, and the alarm; None and None without one."""
    detector = detector or DivergenceDetector(chance)
    for index, loss in enumerate(losses):
        norm = norms[index] if index < len(norms) else None
        alarm = detector.add(window(index, float(loss), norm, index in dead))
        if alarm is not None:
            return index, alarm
    return None, None


def learning(windows, begin=TEN, end=0.05, speed=0.3, noise=0.03, seed=0):
    """Return losses that fall from `begin` to `end`, with noise in proportion to them."""
    draw = np.random.default_rng(seed)
    falling = end + (begin - end) * np.exp(-speed * np.arange(windows))
    return falling * (1 + noise * draw.standard_normal(windows))


def seconds_to_alarm(good, bad, **given):
    """Return the seconds from the first window of `bad` to the alarm; assert that there is none in `good`."""
    index, alarm = first_alarm([*good, *bad], **given)
    assert index is not None and index >= len(good), alarm
    return (index + 1 - len(good)) * STEP


RELEARNED = [8.0, 6.0, 4.0, 3.0, *[2.32] * 10]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([math.nan] * 20, "not finite"),
        ([1e4, 1e6, *[math.nan] * 20], "exploded"),
        ([1e4, *[2.3026] * 20], "lost"),
        ([0.9, *[2.3026] * 20], "lost"),
        ([50.0] * 20, "exploded"),
        (RELEARNED, "lost"),
    ],
    ids=["nan", "grows to nan", "dead units", "slowly", "stays large", "wrong labels"],
)
@pytest.mark.parametrize("length", [6, 40, 400])
def test_a_divergence_in_the_middle_is_noticed_within_three_seconds(bad, reason, length):
    good = learning(length)
    assert seconds_to_alarm(good, bad) <= 3.0
    assert first_alarm([*good, *bad])[1].reason == reason


@pytest.mark.parametrize(
    "losses",
    [
        learning(400),
        learning(400, speed=0.005),
        learning(400, begin=1.3 * TEN, speed=0.02),
        [TEN] * 400,
        [*[TEN * 1.001] * 200, *learning(100)],
        learning(300, begin=40.0, end=2.2, speed=0.1),
        [12.0, 8.0, 5.0, *[TEN] * 100, *learning(100)],
        learning(400, noise=0.2),
        [*learning(60), *(0.05 + 0.4 * np.sin(np.linspace(0, np.pi, 60))), *learning(60, begin=0.06)],
    ],
    ids=["fast", "slow", "above chance", "at chance", "plateau", "large first", "large, plateau", "noisy", "one-cycle"],
)
def test_good_runs_raise_no_alarm(losses):
    assert first_alarm(losses) == (None, None)


@given(
    st.floats(0.001, 2.0),
    st.floats(0.0, 0.12),
    st.floats(0.0, 0.9),
    st.floats(1.0, 3.0),
    st.integers(2, 20_000),
    st.integers(0, 1000),
)
def test_no_falling_loss_raises_an_alarm(speed, noise, end, begin, classes, seed):
    """Whatever its speed, its noise and where it ends, as shares of chance."""
    chance = math.log(classes)
    losses = learning(200, begin=begin * chance, end=end * chance, speed=speed, noise=noise, seed=seed)
    assert first_alarm(np.abs(losses), chance=chance) == (None, None)


@given(st.integers(10, 200), st.integers(2, 2000), st.integers(0, 1000), st.sampled_from([math.nan, 1.0, 30.0]))
def test_a_learned_loss_that_is_lost_raises_an_alarm(length, classes, seed, level):
    chance = math.log(classes)
    good = learning(length, begin=chance, end=0.1 * chance, seed=seed)
    assert seconds_to_alarm(good, [level * chance] * 12, chance=chance) <= 3.0


def test_a_spike_that_passes_is_no_alarm():
    spike = [1.5, 9.0, 1.0]
    assert first_alarm([*learning(50), *spike, *learning(50, begin=0.5), *spike, *learning(50)]) == (None, None)


def test_a_rate_too_high_from_the_start_is_noticed_by_its_spike_or_by_dead_units():
    never = [TEN, 40.0, *[TEN * 1.0005] * 40]
    index, alarm = first_alarm(never)
    assert alarm.reason == "never learned" and (index + 1) * STEP <= 10
    index, alarm = first_alarm([TEN] * 40, dead=range(3, 40))
    assert alarm.reason == "dead" and "all units of a layer are dead" in alarm.describe() and index <= 8


def test_exploding_weights_shorten_the_wait():
    good = learning(20)
    bad = [TEN] * 10
    slow = seconds_to_alarm(good, bad)
    norms = [30.0] * 20 + [900.0] * 10
    quick = seconds_to_alarm(good, bad, norms=norms)
    assert quick < slow
    alarm = first_alarm([*good, *bad], norms=norms)[1]
    assert alarm.growth == 30 and "weights are 30 times as large as before" in alarm.describe()
    # Weights that grow while the loss is good are no reason.
    assert first_alarm(learning(30), norms=np.geomspace(1, 1e6, 30)) == (None, None)


def test_without_classes_the_first_losses_stand_for_chance():
    good = learning(60, begin=100.0, end=1.0)
    assert first_alarm(good, chance=None) == (None, None)
    assert seconds_to_alarm(good, [90.0] * 10, chance=None) <= 3.0


def test_good_weights_are_from_before_the_last_good_window():
    detector = DivergenceDetector(TEN)
    assert first_alarm(learning(20), detector=detector) == (None, None)
    assert detector.good_from == 19 * STEP
    # Neither suspect nor good.
    assert detector.add(window(20, 0.9)) is None and detector.good_from == 19 * STEP
    assert detector.add(window(21, 2.3)) is None and detector.good_from == 19 * STEP
    assert detector.add(window(22, 0.06)) is None and detector.good_from == 22 * STEP


def test_the_next_coordinator_continues_with_the_same_judgment():
    before = DivergenceDetector(TEN)
    first_alarm(learning(30), detector=before)
    after = DivergenceDetector(TEN)
    after.restore(json.loads(json.dumps(before.to_json())))
    assert first_alarm([TEN] * 10, detector=after)[1] == first_alarm([TEN] * 10, detector=before)[1]
    fresh = DivergenceDetector(None)
    fresh.restore(json.loads(json.dumps(DivergenceDetector(None).to_json())))
    assert fresh.best == math.inf and fresh.chance is None


def test_windows_have_enough_images_and_seconds():
    windows = LossWindows(10.0)
    assert windows.add(10.1, LossTotals(1000, 2000.0, 0)) is None, "too short"
    assert windows.add(11.0, LossTotals(255, 500.0, 0)) is None, "too few images"
    made = windows.add(11.5, LossTotals(512, 512.0, 256), weight_norm=3.0, dead=True)
    assert made == LossWindow(10.0, 11.5, 512, 2.0, not_finite=0.5, weight_norm=3.0, dead=True)
    made = windows.add(12.0, LossTotals(1024, 512.0, 768))
    assert math.isnan(made.loss) and made.not_finite == 1.0 and made.began == 11.5


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([*learning(20, noise=0), *[math.nan] * 5], "most losses have not been finite for 1.0 s"),
        ([*learning(20, noise=0), *[2.3] * 8], "the loss has been 2.3 or so for 2.0 s; it was 0.0"),
        ([TEN, 40.0, *[TEN] * 40], "and guessing has 2.3, and nothing better was reached"),
    ],
)
def test_an_alarm_says_what_happened(losses, text):
    assert text.removeprefix("and ") in first_alarm(losses)[1].describe()
