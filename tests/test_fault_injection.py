"""Faults are parsed strictly and triggered at the step they name."""

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
        "kill rank=1 at=push step=soon",
        "",
    ],
)
def test_mistakes_are_named(line):
    with pytest.raises(UserError, match=r"inject.faults\[0\]"):
        parse_faults([line])
