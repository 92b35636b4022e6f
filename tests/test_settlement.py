"""What follows from what the survivors have: whose copy serves, where training stands."""

import math

import pytest

from adam_mpi.base.errors import LostState
from adam_mpi.base.text import number_ranges
from adam_mpi.cluster.layout import Layout, Place
from adam_mpi.runtime.recovery import act, earliest, plan_recovery
from adam_mpi.sharding.position import Position, batch_id
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.sharding.shards import Shard

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


def test_of_the_newest_copies_the_most_wanted_serves_and_others_follow():
    assert act([1, 2, 3], {1: 5, 2: 5, 3: 5}, 5, 3) == ([1, 2, 3], [])
    assert act([1, 2, 3], {1: 4, 2: 5, 3: 5}, 5, 3) == ([2, 3, 1], [1])
    # One that is not wanted any more stays while a wanted one is behind.
    assert act([1, 4, 2], {1: 5, 2: 5, 3: 5, 4: -1}, 5, 3) == ([1, 2, 3, 4], [4])
    assert act([1, 2], {1: 5, 2: 5, 3: 5}, 5, 2) == ([1, 2], [])


def test_a_lost_primary_is_followed_by_a_copy_of_the_newest_version():
    words = [server(0, everything(7), served=[0, 1]), server(1, everything(7) | {3: 8}, served=[2]), RankState(2)]
    settled = plan_recovery(words, layout("server", "server", "worker"), SHARDS, 3, math.inf)
    assert settled.holders[3] == (1, 0) and (0, 3) in settled.lacking and len(settled.lacking) == 1
    assert settled.promoted >= 3


def test_a_shard_that_nobody_has_is_lost():
    words = [server(0, {shard: 1 for shard in range(5)}), RankState(1)]
    with pytest.raises(LostState, match="no copy is left of 1 of 6 shards"):
        plan_recovery(words, layout("server", "worker"), SHARDS, 3, math.inf)


def worker(member, number=0, clock=0, strip=0):
    return RankState(member, clock=clock, acknowledged=(number, clock), strip=strip)


def behind(member, version, began, strips=None):
    """A server whose copies were all to be sent anew, in a generation that began with so many acknowledged pushes."""
    word = server(member, everything(version))
    word.behind = {shard.index: (strips or {}).get(shard.index, 0) for shard in SHARDS}
    word.began = began
    return word


THREE = layout("server", "worker", "worker")


def test_a_copy_that_pushes_were_acknowledged_without_does_not_serve():
    """Those that were waited for are lost with it: what it has is the newest that is left, and not all."""
    words = [behind(0, 7, {0: {1: 4, 2: 9}}), worker(1, 4), worker(2, 10)]
    told = r"^of 6 of 6 shards \(0-5\) only copies are left that were being rebuilt and may lack acknowledged pushes$"
    with pytest.raises(LostState, match=told):
        plan_recovery(words, THREE, SHARDS, 4, math.inf)


def test_a_copy_that_was_not_waited_for_serves_if_nothing_was_acknowledged_since():
    words = [behind(0, 7, {0: {1: 4, 2: 9}}), worker(1, 4), worker(2, 9)]
    settled = plan_recovery(words, THREE, SHARDS, 4, math.inf)
    assert settled.holders == ((0,),) * 6 and not settled.lacking and not settled.stale
    assert settled.acknowledged == {1: 4, 2: 9}


def test_who_is_lost_cannot_tell_what_was_acknowledged_to_him():
    """The pusher 3 died with the servers that were waited for."""
    words = [behind(0, 7, {0: {1: 4, 2: 9, 3: 1}}), worker(1, 4), worker(2, 9)]
    with pytest.raises(LostState, match="may lack acknowledged pushes"):
        plan_recovery(words, THREE, SHARDS, 4, math.inf)


def test_of_a_shard_only_those_can_tell_who_push_it():
    strips = {shard: shard % 2 for shard in range(6)}
    words = [behind(0, 7, {0: {1: 4}, 1: {2: 9}}, strips), worker(1, 4), worker(2, 10, strip=1)]
    with pytest.raises(LostState, match=r"of 3 of 6 shards \(1, 3, 5\) only copies"):
        plan_recovery(words, THREE, SHARDS, 4, math.inf)


def test_a_copy_that_does_not_count_is_sent_anew_by_one_that_does():
    words = [behind(0, 7, {0: {2: 4}}), server(1, everything(9)), worker(2, 5)]
    settled = plan_recovery(words, layout("server", "server", "worker"), SHARDS, 2, math.inf)
    assert settled.holders == ((1, 0),) * 6 and settled.lacking == tuple((0, shard) for shard in range(6))
    assert settled.stale == {(0, shard) for shard in range(6)}


def test_whoever_has_another_strip_now_has_had_nothing_acknowledged_in_it():
    places = [Place(0, "h", ("server",)), *(Place(1 + n, "h", ("worker",), 0, n) for n in range(2))]
    words = [server(0, everything(1)), worker(1, 7, strip=1), worker(2, 8, strip=1)]
    assert plan_recovery(words, Layout(tuple(places), 2), SHARDS, 3, math.inf).acknowledged == {2: 8}


def test_lost_shards_are_told_with_their_numbers():
    assert number_ranges([0, 1, 2, 7, 9, 10]) == "0-2, 7, 9-10" and number_ranges(range(0, 40, 2)).endswith(
        "12, 14, ..."
    )
    words = [behind(0, 7, {0: {1: 4}}), worker(1, 5)]
    del words[0].copies[2], words[0].copies[3]
    with pytest.raises(LostState, match=r"no copy is left of 2 of 6 shards \(2-3\); of 4 of 6 shards \(0-1, 4-5\) "):
        plan_recovery(words, layout("server", "worker"), SHARDS, 4, math.inf)


def in_step(*words):
    """Two servers and a worker, in synchronous training."""
    for word in words[:2]:
        word.positions = {version: position(1, range(version)) for version in (4, 5)}
    return plan_recovery(words, layout("server", "server", "worker"), SHARDS, 2, 0.0)


def test_a_copy_of_an_earlier_clock_than_is_acknowledged_does_not_serve():
    old = everything(5) | {3: 4}
    with pytest.raises(LostState, match=r"of 1 of 6 shards \(3\) only copies are left"):
        in_step(server(0, old), server(1, old), worker(2, 5, clock=5))
    # Nobody is left who had it acknowledged: the clock is computed again.
    assert in_step(server(0, old), server(1, old), RankState(2)).version == 4


def test_a_clock_that_not_all_strips_have_had_acknowledged_is_taken_back():
    """Strips push shards of their own: the first has had clock 5 acknowledged, the other one not."""
    places = [Place(0, "h", ("server",)), *(Place(1 + n, "h", ("worker",), 0, n) for n in range(2))]
    words = [server(0, everything(5) | {3: 4}), worker(1, 5, clock=5), worker(2, 4, clock=4, strip=1)]
    words[0].positions = {4: position(1, range(4))}
    settled = plan_recovery(words, Layout(tuple(places), 2), SHARDS, 1, 0.0)
    assert settled.version == 4 and not settled.stale and settled.acknowledged == {2: 4}
    words[2].acknowledged = 5, 5
    with pytest.raises(LostState, match=r"of 1 of 6 shards \(3\) only copies"):
        plan_recovery(words, Layout(tuple(places), 2), SHARDS, 1, 0.0)
    # Nobody is left who could tell of the other strip.
    words[2].acknowledged = None
    assert plan_recovery(words, Layout(tuple(places), 2), SHARDS, 1, 0.0).version == 4


def test_no_clock_begins_before_the_one_before_is_complete():
    """A copy that is two behind any other lacks what was acknowledged, whoever is left to tell."""
    old = everything(5) | {3: 3}
    with pytest.raises(LostState, match="may lack acknowledged pushes"):
        in_step(server(0, old), server(1, old), RankState(2))
    settled = in_step(server(0, old), server(1, everything(5)), RankState(2))
    assert settled.version == 5 and settled.stale == {(0, 3)} == set(settled.lacking)


def test_a_copy_whose_last_step_cannot_be_taken_back_counts_only_where_it_need_not():
    one, other = server(0, everything(5) | {0: 4}), server(1, everything(5) | {0: 4})
    one.firm = frozenset([1, 2])
    settled = in_step(one, other, worker(2, 4, clock=4))
    assert settled.version == 4 and settled.stale == {(0, 1), (0, 2)} == set(settled.lacking)
    other.firm = frozenset([2])
    with pytest.raises(LostState, match=r"of 1 of 6 shards \(2\)"):
        in_step(one, other, worker(2, 4, clock=4))
    one.copies[0] = other.copies[0] = 5
    assert in_step(one, other, worker(2, 4, clock=4)).stale == set()


def test_a_clock_whose_batches_nobody_knows_is_lost():
    words = [server(0, everything(4)), worker(1, 4, clock=4)]
    words[0].positions = {2: position()}
    with pytest.raises(LostState, match="nobody is left who knows which batches clock 4 has"):
        plan_recovery(words, layout("server", "worker"), SHARDS, 1, 0.0)


def test_batches_are_handed_out_again_unless_a_part_of_them_is_applied_or_somebody_has_them():
    known = {"0": position(2, [1, 2], 90)}, {"0": position(2, [2, 3], 60)}
    words = [
        server(0, everything(1)),
        server(1, everything(1)),
        RankState(2, clock=4, batches=frozenset([batch_id(2, 5)])),
    ]
    words[0].positions, words[1].positions = ({0: one["0"]} for one in known)
    settled = plan_recovery(words, layout("server", "server", "worker"), SHARDS, 3, math.inf)
    assert settled.position.batches.nonzero()[0].tolist() == [1, 2, 3] and settled.position.images == 90
    assert settled.out == {5} and settled.clocks == {2: 4} and settled.clock is None


def test_strips_of_a_replica_go_on_at_one_clock():
    """Else a snapshot, which cuts a replica at one clock, would wait for the slower strip for ever."""
    places = [Place(0, "h", ("server",)), *(Place(1 + n, "h", ("worker",), n // 2, n % 2) for n in range(4))]
    words = [
        server(0, everything(1)),
        RankState(1, clock=9),
        RankState(2, clock=4),
        RankState(3, clock=6),
        RankState(4),
    ]
    settled = plan_recovery(words, Layout(tuple(places), 2), SHARDS, 3, math.inf)
    assert settled.clocks == {1: 9, 2: 9, 3: 6, 4: 6}


def test_batches_of_an_epoch_that_nothing_is_applied_of_yet_are_known_too():
    words = [server(0, everything(1)), RankState(1, clock=4, batches=frozenset([batch_id(2, 5)]))]
    settled = plan_recovery(words, layout("server", "worker"), SHARDS, 3, math.inf)
    assert settled.position.epoch == 2 and not settled.position.batches.any() and settled.out == {5}


@pytest.mark.parametrize(("versions", "complete"), [(everything(4) | {2: 5}, 4), (everything(5), 5)])
def test_a_clock_is_complete_when_every_shard_has_it(versions, complete):
    words = [server(0, versions), server(1, everything(4)), RankState(2, clock=4)]
    words[0].positions = {4: position(1, range(4)), 5: position(1, range(5))}
    settled = plan_recovery(words, layout("server", "server", "worker"), SHARDS, 3, 0.0)
    assert settled.version == settled.clock == complete and settled.position.count == complete
    assert len(settled.lacking) == (6 if complete == 5 else 0)


def test_the_newest_word_of_a_head_counts():
    words = [server(0, everything(1)), RankState(1, head={"number": 3}), RankState(2, head={"number": 5}), RankState(3)]
    assert plan_recovery(words, layout("server", "data", "data", "worker"), SHARDS, 1, math.inf).head == {"number": 5}


def test_a_generation_went_on_when_the_first_server_saw_one_pusher_and_when_one_saw_all():
    assert earliest([(None, None), (5.0, None), (4.0, 9.0), (4.5, 8.0)]) == (4.0, 8.0)
    assert earliest([(None, None)]) == (None, None)
