"""A generation is claimed once, and a rank that is not in it is evicted."""

import errno
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from adam_mpi.base.errors import RankFailure
from adam_mpi.cluster import fence
from adam_mpi.config import load
from adam_mpi.runtime import run


def test_a_generation_is_claimed_by_one_side_only(tmp_path):
    fence.claim(tmp_path, 1, [0, 1, 2])
    fence.claim(tmp_path, 1, [0, 1, 2])
    with pytest.raises(fence.Evicted, match="generation 1 has begun with other members"):
        fence.claim(tmp_path, 1, [3])


def test_a_rank_that_is_not_in_the_newest_generation_is_evicted(tmp_path):
    fence.check_membership(tmp_path, 0, 3)
    fence.claim(tmp_path, 1, [0, 3])
    fence.check_membership(tmp_path, 0, 3)
    fence.claim(tmp_path, 4, [0, 2])
    fence.check_membership(tmp_path, 4, 3)
    with pytest.raises(fence.Evicted, match="declared dead; generation 4"):
        fence.check_membership(tmp_path, 0, 3)
    fence.clear_fences(tmp_path)
    fence.check_membership(tmp_path, 0, 3)


@pytest.mark.parametrize("why", ["late", "out"])
def test_a_watch_ends_a_rank_that_is_late_or_evicted(tmp_path, why):
    ended = threading.Event()
    watch = fence.MembershipWatch(tmp_path, 0.2 if why == "late" else 60.0, ended.set, lambda error: ended.set())
    assert not watch.end()
    watch.begin(0, 3)
    if why == "out":
        fence.claim(tmp_path, 1, [0])
    assert ended.wait(20)
    assert watch.end()


@pytest.fixture
def failing(monkeypatch):
    """Make every access to the run directory fail."""

    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    for name in ("exists", "glob"):
        monkeypatch.setattr(Path, name, fail)


def test_a_watch_over_a_failing_disk_ends_a_rank_that_is_late(tmp_path, failing):
    ended = threading.Event()
    watch = fence.MembershipWatch(tmp_path, 0.1, ended.set, lambda error: None)
    watch.begin(0, 3)
    assert ended.wait(20)
    assert watch.end()


def test_a_loss_is_survived_though_the_run_directory_fails(tmp_path, failing, monkeypatch):
    served = []

    def run_roles(world, runtime):
        served.append(world)
        if len(served) == 1:
            raise RankFailure("rank 3 is gone")

    owner = SimpleNamespace(check=lambda: None)
    job = SimpleNamespace(directory=tmp_path, failure_file=tmp_path / "failure.txt", config=load(None), owner=owner)
    world = SimpleNamespace(survivable=True, broken=False, generation=0, place=SimpleNamespace(member=1))
    world.recover = lambda full: "the next generation"
    monkeypatch.setattr(run, "_run_roles", run_roles)
    runtime = SimpleNamespace(compute_on=lambda: None)
    monkeypatch.setattr(run, "begin_generation", lambda world, job, previous: runtime)
    connection = SimpleNamespace(send=lambda text: None, close=lambda: None)
    assert run._run_generations(world, job, connection)[0] == "the next generation" and len(served) == 2
