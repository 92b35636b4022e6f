"""How a job continues from what the surviving ranks have: whose copy serves, where training stands."""

import math
from types import SimpleNamespace

import pytest

from adam_mpi.base.errors import LostState
from adam_mpi.base.log import format_ranges
from adam_mpi.cluster.layout import Layout, Place
from adam_mpi.runtime.recovery import earliest, order_to_follow, plan_recovery
from adam_mpi.runtime.shard_recovery import choose_members
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import Position, RankState, batch_id

SHARDS = [Shard(index, "dense1", 10 * index, 10) for index in range(6)]


def layout(*roles):
    places = [Place(rank, "h", (role,), rank if role == "worker" else None, 0) for rank, role in enumerate(roles)]
    return Layout(tuple(places), 1)


def position(epoch=1, batches=(), images=0):
    made = Position(8, epoch, images)
    made.batches[list(batches)] = True
    return made


def server(member, copies, served=(), **positions):
    return RankState(member, 1.0, copies=copies, served=frozenset(served), positions=positions or {0: position()})


def everything(version):
    return {shard.index: version for shard in SHARDS}


def test_the_first_preferred_member_with_the_newest_copy_serves():
    assert choose_members([1, 2, 3], {1: 5, 2: 5, 3: 5}, 5, 3) == ([1, 2, 3], [])
    assert choose_members([1, 2, 3], {1: 4, 2: 5, 3: 5}, 5, 3) == ([2, 3, 1], [1])
    # A member that is no longer preferred keeps its copy while a preferred one lacks it.
    assert choose_members([1, 4, 2], {1: 5, 2: 5, 3: 5, 4: -1}, 5, 3) == ([1, 2, 3, 4], [4])
    assert choose_members([1, 2], {1: 5, 2: 5, 3: 5}, 5, 2) == ([1, 2], [])


def test_a_lost_primary_is_followed_by_a_copy_of_the_newest_version():
    states = [server(0, everything(7), served=[0, 1]), server(1, everything(7) | {3: 8}, served=[2]), RankState(2)]
    plan = plan_recovery(states, layout("server", "server", "worker"), SHARDS, 3, math.inf)
    assert plan.holders[3] == (1, 0) and (0, 3) in plan.lacking and len(plan.lacking) == 1
    assert plan.promoted >= 3


def order(number):
    values = {"snapshots": ["epoch-0001"], "from_start": False, "learning_rate": 0.1, "rate_scale": 0.5, "state": {}}
    return {"number": number, **values}


def followed(number):
    """The restart point of an order that the roles of a rank have followed."""
    return SimpleNamespace(number=number)


@pytest.mark.parametrize(
    ("states", "number"),
    [
        # Nobody has an order.
        ([{}, {}], None),
        # One rank has received it; the coordinator that sent it may be gone.
        ([{}, {"order": order(1)}], 1),
        # All have followed it.
        ([{"restart": followed(1), "order": order(1)}, {"restart": followed(1)}], None),
        # A rank was lost before all had: they go back again.
        ([{"restart": followed(1)}, {"order": order(1)}], 1),
        ([{"restart": followed(1), "order": order(2)}, {"restart": followed(1), "order": order(1)}], 2),
        # A rank that joins has nothing to take back.
        ([{"restart": followed(1), "order": order(1)}, {"new": True}], None),
    ],
)
def test_all_ranks_go_back_if_one_has_not_followed_the_newest_order(states, number):
    found = order_to_follow([RankState(member, **state) for member, state in enumerate(states)])
    assert (found.number if found else None) == number


def test_a_shard_of_which_no_copy_is_left_is_lost():
    states = [server(0, {shard: 1 for shard in range(5)}), RankState(1)]
    with pytest.raises(LostState, match="no copy is left of 1 of 6 shards"):
        plan_recovery(states, layout("server", "worker"), SHARDS, 3, math.inf)


def worker(member, number=0, clock=0, strip=0):
    return RankState(member, clock=clock, acknowledged=(number, clock), strip=strip)


def behind(member, version, began, strips=None):
    """A server whose copies were all to be rebuilt; `began` are the acknowledged pushes when the generation began."""
    state = server(member, everything(version))
    state.behind = {shard.index: (strips or {}).get(shard.index, 0) for shard in SHARDS}
    state.began = began
    return state


THREE = layout("server", "worker", "worker")


def test_a_copy_that_pushes_were_acknowledged_without_does_not_serve():
    """Those that were waited for are lost with it: what it has is the newest that is left, and not all."""
    states = [behind(0, 7, {0: {1: 4, 2: 9}}), worker(1, 4), worker(2, 10)]
    told = r"^of 6 of 6 shards \(0-5\) only copies are left that were being rebuilt and may lack acknowledged pushes$"
    with pytest.raises(LostState, match=told):
        plan_recovery(states, THREE, SHARDS, 4, math.inf)


def test_a_copy_that_was_not_waited_for_serves_if_nothing_was_acknowledged_since():
    states = [behind(0, 7, {0: {1: 4, 2: 9}}), worker(1, 4), worker(2, 9)]
    plan = plan_recovery(states, THREE, SHARDS, 4, math.inf)
    assert plan.holders == ((0,),) * 6 and not plan.lacking and not plan.stale
    assert plan.acknowledged == {1: 4, 2: 9}


def test_a_lost_pusher_cannot_report_what_was_acknowledged():
    """The pusher 3 died with the servers that were waited for."""
    states = [behind(0, 7, {0: {1: 4, 2: 9, 3: 1}}), worker(1, 4), worker(2, 9)]
    with pytest.raises(LostState, match="may lack acknowledged pushes"):
        plan_recovery(states, THREE, SHARDS, 4, math.inf)


def test_only_the_pushers_of_a_shard_can_report_what_was_acknowledged():
    strips = {shard: shard % 2 for shard in range(6)}
    states = [behind(0, 7, {0: {1: 4}, 1: {2: 9}}, strips), worker(1, 4), worker(2, 10, strip=1)]
    with pytest.raises(LostState, match=r"of 3 of 6 shards \(1, 3, 5\) only copies"):
        plan_recovery(states, THREE, SHARDS, 4, math.inf)


def test_a_copy_that_is_not_sound_is_sent_again_by_one_that_is():
    states = [behind(0, 7, {0: {2: 4}}), server(1, everything(9)), worker(2, 5)]
    plan = plan_recovery(states, layout("server", "server", "worker"), SHARDS, 2, math.inf)
    assert plan.holders == ((1, 0),) * 6 and plan.lacking == tuple((0, shard) for shard in range(6))
    assert plan.stale == {(0, shard) for shard in range(6)}


def test_a_rank_with_a_new_strip_has_had_nothing_acknowledged_in_it():
    places = [Place(0, "h", ("server",)), *(Place(1 + n, "h", ("worker",), 0, n) for n in range(2))]
    states = [server(0, everything(1)), worker(1, 7, strip=1), worker(2, 8, strip=1)]
    assert plan_recovery(states, Layout(tuple(places), 2), SHARDS, 3, math.inf).acknowledged == {2: 8}


def test_lost_shards_are_reported_with_their_numbers():
    assert format_ranges([0, 1, 2, 7, 9, 10]) == "0-2, 7, 9-10" and format_ranges(range(0, 40, 2)).endswith(
        "12, 14, ..."
    )
    states = [behind(0, 7, {0: {1: 4}}), worker(1, 5)]
    del states[0].copies[2], states[0].copies[3]
    with pytest.raises(LostState, match=r"no copy is left of 2 of 6 shards \(2-3\); of 4 of 6 shards \(0-1, 4-5\) "):
        plan_recovery(states, layout("server", "worker"), SHARDS, 4, math.inf)


def in_step(*states):
    """Two servers and a worker, in synchronous training."""
    for state in states[:2]:
        state.positions = {version: position(1, range(version)) for version in (4, 5)}
    return plan_recovery(states, layout("server", "server", "worker"), SHARDS, 2, 0.0)


def test_a_copy_of_an_earlier_clock_than_is_acknowledged_does_not_serve():
    old = everything(5) | {3: 4}
    with pytest.raises(LostState, match=r"of 1 of 6 shards \(3\) only copies are left"):
        in_step(server(0, old), server(1, old), worker(2, 5, clock=5))
    # No surviving rank had it acknowledged: the clock is computed again.
    assert in_step(server(0, old), server(1, old), RankState(2)).version == 4


def test_a_clock_that_not_all_strips_have_had_acknowledged_is_taken_back():
    """Strips push shards of their own: the first has had clock 5 acknowledged, the other one not."""
    places = [Place(0, "h", ("server",)), *(Place(1 + n, "h", ("worker",), 0, n) for n in range(2))]
    states = [server(0, everything(5) | {3: 4}), worker(1, 5, clock=5), worker(2, 4, clock=4, strip=1)]
    states[0].positions = {4: position(1, range(4))}
    plan = plan_recovery(states, Layout(tuple(places), 2), SHARDS, 1, 0.0)
    assert plan.version == 4 and not plan.stale and plan.acknowledged == {2: 4}
    states[2].acknowledged = 5, 5
    with pytest.raises(LostState, match=r"of 1 of 6 shards \(3\) only copies"):
        plan_recovery(states, Layout(tuple(places), 2), SHARDS, 1, 0.0)
    # No surviving rank can report on the other strip.
    states[2].acknowledged = None
    assert plan_recovery(states, Layout(tuple(places), 2), SHARDS, 1, 0.0).version == 4


def test_no_clock_begins_before_the_one_before_is_complete():
    """A copy that is two clocks behind any other lacks what was acknowledged, whichever ranks survive."""
    old = everything(5) | {3: 3}
    with pytest.raises(LostState, match="may lack acknowledged pushes"):
        in_step(server(0, old), server(1, old), RankState(2))
    plan = in_step(server(0, old), server(1, everything(5)), RankState(2))
    assert plan.version == 5 and plan.stale == {(0, 3)} == set(plan.lacking)


def test_a_copy_whose_last_step_cannot_be_taken_back_counts_only_where_it_need_not():
    one, other = server(0, everything(5) | {0: 4}), server(1, everything(5) | {0: 4})
    one.firm = frozenset([1, 2])
    plan = in_step(one, other, worker(2, 4, clock=4))
    assert plan.version == 4 and plan.stale == {(0, 1), (0, 2)} == set(plan.lacking)
    other.firm = frozenset([2])
    with pytest.raises(LostState, match=r"of 1 of 6 shards \(2\)"):
        in_step(one, other, worker(2, 4, clock=4))
    one.copies[0] = other.copies[0] = 5
    assert in_step(one, other, worker(2, 4, clock=4)).stale == set()


def test_a_clock_whose_batches_no_rank_knows_is_lost():
    states = [server(0, everything(4)), worker(1, 4, clock=4)]
    states[0].positions = {2: position()}
    with pytest.raises(LostState, match="no surviving rank knows which batches clock 4 has"):
        plan_recovery(states, layout("server", "worker"), SHARDS, 1, 0.0)


def test_batches_are_handed_out_again_unless_a_part_of_them_is_applied_or_a_worker_has_them():
    known = {"0": position(2, [1, 2], 90)}, {"0": position(2, [2, 3], 60)}
    states = [
        server(0, everything(1)),
        server(1, everything(1)),
        RankState(2, clock=4, batches=frozenset([batch_id(2, 5)])),
    ]
    states[0].positions, states[1].positions = ({0: one["0"]} for one in known)
    plan = plan_recovery(states, layout("server", "server", "worker"), SHARDS, 3, math.inf)
    assert plan.position.batches.nonzero()[0].tolist() == [1, 2, 3] and plan.position.images == 90
    assert plan.out == {5} and plan.clocks == {2: 4} and plan.clock is None


def test_strips_of_a_replica_continue_at_one_clock():
    """Else a snapshot, which cuts a replica at one clock, would wait for the slower strip for ever."""
    places = [Place(0, "h", ("server",)), *(Place(1 + n, "h", ("worker",), n // 2, n % 2) for n in range(4))]
    states = [
        server(0, everything(1)),
        RankState(1, clock=9),
        RankState(2, clock=4),
        RankState(3, clock=6),
        RankState(4),
    ]
    plan = plan_recovery(states, Layout(tuple(places), 2), SHARDS, 3, math.inf)
    assert plan.clocks == {1: 9, 2: 9, 3: 6, 4: 6}


def test_batches_of_an_epoch_that_nothing_is_applied_of_yet_are_known_too():
    states = [server(0, everything(1)), RankState(1, clock=4, batches=frozenset([batch_id(2, 5)]))]
    plan = plan_recovery(states, layout("server", "worker"), SHARDS, 3, math.inf)
    assert plan.position.epoch == 2 and not plan.position.batches.any() and plan.out == {5}


@pytest.mark.parametrize(("versions", "complete"), [(everything(4) | {2: 5}, 4), (everything(5), 5)])
def test_a_clock_is_complete_when_every_shard_has_it(versions, complete):
    states = [server(0, versions), server(1, everything(4)), RankState(2, clock=4)]
    states[0].positions = {4: position(1, range(4)), 5: position(1, range(5))}
    plan = plan_recovery(states, layout("server", "server", "worker"), SHARDS, 3, 0.0)
    assert plan.version == plan.clock == complete and plan.position.count == complete
    assert len(plan.lacking) == (6 if complete == 5 else 0)


def test_the_newest_state_of_a_coordinator_counts():
    states = [
        server(0, everything(1)),
        RankState(1, coordinator={"number": 3}),
        RankState(2, coordinator={"number": 5}),
        RankState(3),
    ]
    assert plan_recovery(states, layout("server", "data", "data", "worker"), SHARDS, 1, math.inf).coordinator == {
        "number": 5
    }


def test_a_generation_works_when_the_first_server_has_a_push_of_one_pusher_and_of_all():
    assert earliest([(None, None), (5.0, None), (4.0, 9.0), (4.5, 8.0)]) == (4.0, 8.0)
    assert earliest([(None, None)]) == (None, None)
