"""Faults are parsed strictly and triggered at the step they name."""

import numpy as np
import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.fault_injection import InjectedFault, Injector, check_faults, parse_faults
from adam_mpi.cluster.layout import Place

PLACE = Place(2, "h", ("worker",), 0, 0)


def test_raises_at_the_named_step_only():
    injector = Injector(parse_faults(["raise rank=2 at=push step=3"]), PLACE, seed=1)
    for point in ("push", "pull", "push"):
        injector.at(point)
    with pytest.raises(InjectedFault, match="push, step 3, on rank 2, worker"):
        injector.at("push")


def test_a_learning_rate_is_wrong_for_some_visits():
    faults = parse_faults(["rate rank=2 factor=100 step=2 steps=2", "rate rank=2 factor=3 step=3"])
    injector = Injector(faults, PLACE, seed=1)
    factors = []
    for _ in range(5):
        injector.at("apply")
        factors.append(injector.rate_factor())
    assert factors == [1, 100, 300, 3, 3]
    assert Injector(parse_faults([]), PLACE, seed=1).rate_factor() == 1


def test_images_get_the_labels_of_others_from_a_visit_on():
    injector = Injector(parse_faults(["labels rank=2 step=2"]), PLACE, seed=1)
    injector.at("batch")
    assert injector.target_order(100) == slice(None)
    found = []
    for _ in range(2):
        injector.at("batch")
        found.append(injector.target_order(100))
    assert all(sorted(order) == list(range(100)) for order in found) and not np.array_equal(*found)
    assert np.mean(found[0] == np.arange(100)) < 0.1


def test_other_ranks_do_not_have_the_fault():
    assert not Injector(parse_faults(["kill rank=1 at=push", "kill role=server at=apply"]), PLACE, seed=1).faults


def test_a_range_of_steps_is_drawn_by_the_seed():
    faults = parse_faults(["kill rank=2 at=push step=10..50"])
    steps = {Injector(faults, PLACE, seed).faults[0][1] for seed in range(20)}
    assert len(steps) > 5 and all(10 <= step <= 50 for step in steps)
    assert Injector(faults, PLACE, 3).faults[0][1] == Injector(faults, PLACE, 3).faults[0][1]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("kill rank=3 at=push", r"inject.faults\[1\]: there is no rank 3; give one of 0 to 2"),
        ("slow rank=-1 factor=2", r"inject.faults\[1\]: there is no rank -1; give one of 0 to 2"),
        ("kill role=servers at=apply", r"inject.faults\[1\]: no rank has the role servers; give one of data, worker"),
    ],
)
def test_a_fault_that_applies_to_no_rank_is_refused(line, complaint):
    places = [Place(0, "h", ("data",)), Place(1, "h", ("worker",)), PLACE]
    check_faults(parse_faults(["kill rank=2", "slow role=data"]), places)
    with pytest.raises(UserError, match=complaint):
        check_faults(parse_faults(["slow role=worker", line]), places)


@pytest.mark.parametrize(
    "line",
    [
        "explode rank=1",
        "kill at=push",
        "kill rank=1 role=data",
        "kill rank=x",
        "kill rank=1 at=lunch",
        "slow rank=1 at=push",
        "rate role=server factor=100 at=push",
        "labels role=data steps=x",
        "kill rank=1 at=push step=soon",
        "",
    ],
)
def test_mistakes_are_named(line):
    with pytest.raises(UserError, match=r"inject.faults\[0\]"):
        parse_faults([line])
