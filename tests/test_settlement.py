"""What follows from what the survivors have: whose copy serves, where training stands."""

import math

import pytest

from adam_mpi.cluster.layout import Layout, Place
from adam_mpi.durable.position import Position, batch_id
from adam_mpi.errors import LostState
from adam_mpi.server.shards import Shard
from adam_mpi.settlement import Word, act, earliest, settle

SHARDS = [Shard(index, "dense1", 10 * index, 10) for index in range(6)]


def layout(*roles):
    places = [Place(rank, "h", (role,), rank if role == "worker" else None, 0) for rank, role in enumerate(roles)]
    return Layout(tuple(places), 1)


def position(epoch=1, batches=(), images=0):
    made = Position(8, epoch, images)
    made.batches[list(batches)] = True
    return made


def server(member, copies, served=(), **positions):
    return Word(member, 1.0, copies=copies, served=frozenset(served), positions=positions or {0: position()})


def everything(version):
    return {shard.index: version for shard in SHARDS}


def test_of_the_newest_copies_the_most_wanted_serves_and_others_follow():
    assert act([1, 2, 3], {1: 5, 2: 5, 3: 5}, 5, 3) == ([1, 2, 3], [])
    assert act([1, 2, 3], {1: 4, 2: 5, 3: 5}, 5, 3) == ([2, 3, 1], [1])
    # One that is not wanted any more stays while a wanted one is behind.
    assert act([1, 4, 2], {1: 5, 2: 5, 3: 5, 4: -1}, 5, 3) == ([1, 2, 3, 4], [4])
    assert act([1, 2], {1: 5, 2: 5, 3: 5}, 5, 2) == ([1, 2], [])


def test_a_lost_primary_is_followed_by_a_copy_of_the_newest_version():
    words = [server(0, everything(7), served=[0, 1]), server(1, everything(7) | {3: 8}, served=[2]), Word(2)]
    settled = settle(words, layout("server", "server", "worker"), SHARDS, 3, math.inf)
    assert settled.holders[3] == (1, 0) and (0, 3) in settled.lacking and len(settled.lacking) == 1
    assert settled.promoted >= 3


def test_a_shard_that_nobody_has_is_lost():
    words = [server(0, {shard: 1 for shard in range(5)}), Word(1)]
    with pytest.raises(LostState, match="no copy is left of 1 of 6 shards"):
        settle(words, layout("server", "worker"), SHARDS, 3, math.inf)


def test_batches_are_handed_out_again_unless_a_part_of_them_is_applied_or_somebody_has_them():
    known = {"0": position(2, [1, 2], 90)}, {"0": position(2, [2, 3], 60)}
    words = [server(0, everything(1)), server(1, everything(1)), Word(2, clock=4, batches=frozenset([batch_id(2, 5)]))]
    words[0].positions, words[1].positions = ({0: one["0"]} for one in known)
    settled = settle(words, layout("server", "server", "worker"), SHARDS, 3, math.inf)
    assert settled.position.batches.nonzero()[0].tolist() == [1, 2, 3] and settled.position.images == 90
    assert settled.out == {5} and settled.clocks == {2: 4} and settled.clock is None


def test_strips_of_a_replica_go_on_at_one_clock():
    """Else a snapshot, which cuts a replica at one clock, would wait for the slower strip for ever."""
    places = [Place(0, "h", ("server",)), *(Place(1 + n, "h", ("worker",), n // 2, n % 2) for n in range(4))]
    words = [server(0, everything(1)), Word(1, clock=9), Word(2, clock=4), Word(3, clock=6), Word(4)]
    settled = settle(words, Layout(tuple(places), 2), SHARDS, 3, math.inf)
    assert settled.clocks == {1: 9, 2: 9, 3: 6, 4: 6}


def test_batches_of_an_epoch_that_nothing_is_applied_of_yet_are_known_too():
    words = [server(0, everything(1)), Word(1, clock=4, batches=frozenset([batch_id(2, 5)]))]
    settled = settle(words, layout("server", "worker"), SHARDS, 3, math.inf)
    assert settled.position.epoch == 2 and not settled.position.batches.any() and settled.out == {5}


@pytest.mark.parametrize(("versions", "complete"), [(everything(4) | {2: 5}, 4), (everything(5), 5)])
def test_a_clock_is_complete_when_every_shard_has_it(versions, complete):
    words = [server(0, versions), server(1, everything(4)), Word(2, clock=4)]
    words[0].positions = {4: position(1, range(4)), 5: position(1, range(5))}
    settled = settle(words, layout("server", "server", "worker"), SHARDS, 3, 0.0)
    assert settled.version == settled.clock == complete and settled.position.count == complete
    assert len(settled.lacking) == (6 if complete == 5 else 0)


def test_the_newest_word_of_a_head_counts():
    words = [server(0, everything(1)), Word(1, head={"number": 3}), Word(2, head={"number": 5}), Word(3)]
    assert settle(words, layout("server", "data", "data", "worker"), SHARDS, 1, math.inf).head == {"number": 5}


def test_a_generation_went_on_when_the_first_server_saw_one_pusher_and_when_one_saw_all():
    assert earliest([(None, None), (5.0, None), (4.0, 9.0), (4.5, 8.0)]) == (4.0, 8.0)
    assert earliest([(None, None)]) == (None, None)
