"""Roles for any number of ranks, on any hosts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.layout import arrange
from adam_mpi.config import Layout


def roles(size, **wanted):
    return ["+".join(place.roles) for place in arrange(["h"] * size, Layout(**wanted)).places]


def test_small_numbers_share_roles():
    assert roles(1) == ["data+worker+server"]
    assert roles(2) == ["data+server", "worker"]
    assert roles(3) == ["data", "server", "worker"]
    assert roles(4) == ["data", "server", "worker", "worker"]


def test_a_single_strip_wide_replica_may_take_every_rank():
    layout = arrange(["h"] * 2, Layout(partitions=2))
    assert layout.workers == (0, 1) and layout.replicas == 1 and layout.coordinator == 0


@given(st.integers(1, 300), st.integers(1, 6), st.integers(1, 8))
def test_every_size_has_all_roles_and_whole_replicas(size, partitions, hosts):
    if partitions > size:
        return
    layout = arrange([f"h{rank * hosts // size}" for rank in range(size)], Layout(partitions=partitions))
    assert layout.data and layout.servers and layout.replicas >= 1
    assert len(layout.workers) == layout.replicas * partitions
    strips = sorted((place.replica, place.strip) for place in layout.places if place.replica is not None)
    assert strips == [(r, s) for r in range(layout.replicas) for s in range(partitions)]
    if size >= 3 + partitions:
        assert all(len(place.roles) <= 1 for place in layout.places)


def test_wanted_numbers_are_honored():
    layout = arrange(["h"] * 9, Layout(data=2, servers=3, partitions=2))
    assert (len(layout.data), len(layout.servers), layout.replicas) == (2, 3, 2)


def test_strips_prefer_one_host_and_servers_are_spread():
    hosts = [f"h{rank // 4}" for rank in range(12)]
    layout = arrange(hosts, Layout(data=3, servers=3, partitions=2))
    assert {hosts[rank] for rank in layout.servers} == {hosts[rank] for rank in layout.data} == {"h0", "h1", "h2"}
    for replica in range(layout.replicas):
        assert len({place.host for place in layout.places if place.replica == replica}) == 1


def test_places_pin_roles_to_hosts():
    hosts = [f"cpu-{rank // 2}" for rank in range(8)]
    layout = arrange(hosts, Layout(servers=2, place={"server": ["cpu-3"], "data": ["cpu-1"]}))
    assert layout.servers == (6, 7) and layout.data == (2,)


@pytest.mark.parametrize(
    ("size", "wanted", "named"),
    [
        (3, {"data": 2, "servers": 2}, "layout.data = 2 and layout.servers = 2 leave no worker"),
        (3, {"partitions": 4}, "layout.partitions = 4: only 3 ranks"),
        (4, {"place": {"server": ["x*"]}}, "layout.place.server = ['x*']: matches 0 free ranks"),
        (4, {"place": {"worker": ["x*"]}}, "layout.place.worker"),
    ],
)
def test_impossible_layouts_are_named(size, wanted, named):
    with pytest.raises(UserError, match=".*") as error:
        roles(size, **wanted)
    assert named in str(error.value) and "\n" not in str(error.value)
