"""What a job decides about asynchronous training where the configuration leaves it open."""

import math

import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.config import load
from adam_mpi.planning.recipe import decide


def decided(*settings, threads=4, crowded=False):
    config = load(None, ["optimizer.momentum=0.9", *settings])
    decide(config, threads, crowded)
    return config.optimizer.momentum_where, config.optimizer.clip_norm, config.push.in_flight


def test_several_threads_without_clocks_keep_velocities_and_clip():
    assert decided() == ("replica", 1.0, 4)
    assert decided(threads=2) == ("replica", 1.0, 5)


@pytest.mark.parametrize(("momentum", "limit"), [(0, 4.0), (0.5, 2.0), (0.9, 1.0)])
def test_gradients_that_momentum_repeats_are_clipped_to_less(momentum, limit):
    assert decided(f"optimizer.momentum={momentum}")[1] == limit


def test_threads_that_share_cores_have_fewer_pushes_in_flight():
    assert decided(threads=20, crowded=True)[2] < decided(threads=20)[2]


def test_one_thread_alone_trains_as_with_clocks():
    assert decided(threads=1) == ("server", 0.0, 1)


@pytest.mark.parametrize("settings", ["consistency.staleness=0", "layout.partitions=2", "push.protocol=factor"])
def test_the_servers_keep_the_velocity_where_replicas_cannot(settings):
    assert decided(settings)[0] == "server"


def test_what_is_configured_stays():
    found = decided("optimizer.momentum_where=server", "optimizer.clip_norm=none", "push.in_flight=3")
    assert found == ("server", math.inf, 3)


@pytest.mark.parametrize("settings", ["consistency.staleness=0", "layout.partitions=2", "push.protocol=factor"])
def test_a_velocity_of_replicas_is_refused_where_they_cannot_keep_it(settings):
    with pytest.raises(UserError, match="momentum_where"):
        load(None, ["optimizer.momentum_where=replica", settings])


@pytest.mark.parametrize("stale", ["drop", "drop:x", "half"])
def test_an_unknown_reaction_to_late_pushes_is_refused(stale):
    with pytest.raises(UserError, match=r"keep, scale, or drop:R"):
        load(None, [f"optimizer.stale={stale}"])
