"""Learning-rate schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.config import Optimiser
from adam_mpi.server.schedule import SCHEDULES, rate


def rates(schedule, images, total=900, warm_up=0.0):
    return [rate(Optimiser(rate=0.5, schedule=schedule, warm_up=warm_up), at, total) for at in images]


def test_constant_stays():
    assert rates("constant", [0, 450, 900, 2000]) == [0.5] * 4


def test_step_falls_after_each_third():
    assert rates("step", [0, 299, 300, 599, 600, 899]) == pytest.approx([0.5, 0.5, 0.15, 0.15, 0.045, 0.045])


def test_cosine_goes_from_the_rate_to_zero():
    assert rates("cosine", [0, 300, 450, 900, 1000]) == pytest.approx([0.5, 0.375, 0.25, 0, 0])


def test_warm_up_rises_in_proportion_and_then_lets_go():
    warmed = rates("constant", [0, 50, 89, 90, 91], warm_up=0.1)
    assert warmed == pytest.approx([0.5 / 90, 0.5 * 51 / 90, 0.5, 0.5, 0.5])
    assert rates("cosine", [450], warm_up=0.1) == rates("cosine", [450])


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 0.9))
def test_a_rate_is_never_negative_nor_above_the_first(schedule, images, total, warm_up):
    assert 0 <= rates(schedule, [images], total, warm_up)[0] <= 0.5
