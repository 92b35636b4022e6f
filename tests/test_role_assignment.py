"""The roles of ranks in the next generation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.base.errors import LostState
from adam_mpi.cluster.layout import NEW, Place, arrange, reassign_roles
from adam_mpi.config import Layout


def left(wanted, size, lost):
    """Return the places of the ranks that survive the loss of `lost`."""
    return [place for place in arrange(["h"] * size, wanted).places if place.rank not in lost]


def next_layout(wanted, size, lost):
    kept = left(wanted, size, lost)
    return reassign_roles(["h"] * len(kept), kept, wanted)


@given(st.integers(2, 40), st.integers(1, 4), st.data())
def test_surviving_ranks_keep_their_roles_and_no_role_is_missing(size, partitions, data):
    if partitions > size:
        return
    wanted = Layout(partitions=partitions)
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=size - partitions))
    kept = left(wanted, size, lost)
    layout = reassign_roles(["h"] * len(kept), kept, wanted)
    assert [place.member for place in layout.places] == [place.member for place in kept]
    for now, before in zip(layout.places, kept, strict=True):
        assert {role for role in before.roles if role != "worker"} <= set(now.roles)
    assert layout.data and layout.replicas >= 1
    strips = sorted((place.replica, place.strip) for place in layout.places if place.replica is not None)
    assert strips == [(r, s) for r in range(layout.replicas) for s in range(partitions)]


def test_a_replica_that_cannot_be_filled_becomes_standbys_and_they_fill_the_next():
    wanted = Layout(data=1, servers=1, partitions=2)
    first = next_layout(wanted, 8, {2})
    assert first.replicas == 2 and [place.member for place in first.places if not place.roles] == [3]
    kept = [place for place in first.places if place.member != 4]
    second = reassign_roles(["h"] * len(kept), kept, wanted)
    assert second.replicas == 2 and all(place.roles for place in second.places)
    # The surviving strip stays where it is; the standby takes that of the dead rank.
    assert next(place for place in second.places if place.member == 5).strip == 1
    assert next(place for place in second.places if place.member == 3).strip == 0


def test_the_last_data_rank_is_replaced_by_the_rank_with_the_fewest_roles():
    layout = next_layout(Layout(data=1, servers=2), 5, {0})
    assert [place.roles for place in layout.places] == [("server",), ("server",), ("data", "worker"), ("worker",)]
    assert layout.places[layout.coordinator].member == 3


def test_without_any_worker_other_ranks_train_too():
    layout = next_layout(Layout(data=1, servers=2), 4, {3})
    assert layout.replicas == 1 and layout.servers == (1, 2)


def test_a_joining_rank_gets_the_role_with_too_few_ranks():
    wanted = Layout(data=1, servers=3)
    newcomer = Place(NEW, "", (), member_id=9)
    kept = [*left(wanted, 7, {2}), newcomer]
    layout = reassign_roles(["h"] * 7, kept, wanted)
    assert layout.places[-1].roles == ("server",) and layout.places[-1].member == 9
    kept = [*left(wanted, 7, {6}), newcomer]
    assert reassign_roles(["h"] * 7, kept, wanted).places[-1].roles == ("worker",)


def test_too_few_ranks_for_a_replica_are_reported():
    with pytest.raises(LostState, match="2 ranks are left, a replica needs 3"):
        next_layout(Layout(partitions=3), 3, {1})


def test_joining_ranks_become_servers_first_then_data_ranks_then_workers():
    wanted = Layout(data=2, servers=3)
    fresh = [Place(NEW, "", (), member_id=member) for member in (20, 21, 22)]
    kept = [*left(wanted, 10, {1, 3, 9}), *fresh]
    layout = reassign_roles(["h"] * 10, kept, wanted)
    assert [place.roles for place in layout.places[-3:]] == [("server",), ("data",), ("worker",)]
    assert (len(layout.data), len(layout.servers), layout.replicas) == (2, 3, 5)


def test_a_joining_rank_replaces_the_coordinator_if_it_was_the_only_data_rank():
    wanted = Layout(servers=3)
    kept = [*left(wanted, 8, {0}), Place(NEW, "", (), member_id=8)]
    layout = reassign_roles(["h"] * 8, kept, wanted)
    assert layout.places[layout.coordinator].member == 8 and layout.places[layout.coordinator].roles == ("data",)
    assert layout.replicas == 4


def test_spares_are_started_by_the_rank_that_others_wait_for_least():
    layout = arrange(["h"] * 8, Layout(servers=3))
    assert layout.places[layout.starter].roles == ("worker",)
    standby = next_layout(Layout(data=1, servers=1, partitions=2), 8, {2})
    assert standby.places[standby.starter].roles == ()
    assert arrange(["h"], Layout()).starter == 0
