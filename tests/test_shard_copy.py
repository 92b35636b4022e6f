"""A server's copies of shards, without other ranks: when a copy is whole, when a push is safe, what a copy lacks."""

import gc
import weakref
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
from local_server import LocalServer, additive

from adam_mpi.base.errors import LostState
from adam_mpi.config import Config
from adam_mpi.server.progress import ServerProgress, last_pushes
from adam_mpi.server.replication import Replicator
from adam_mpi.server.replication_messages import PART, PartMessage
from adam_mpi.sharding.message_formats import MOST_PARTS
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import Position, RankState, batch_id

SHARD = Shard(0, "dense1", 0, 4)
HEADER = ("kind", "sequence", "shard", "words", "values", "part", "parts", "first", "seen")


def replicator(lacking=(), remembers=False):
    """Return a replicator on rank 0 of three servers with one shard, served here; senders only keep messages."""
    made = Replicator.__new__(Replicator)
    made.world = SimpleNamespace(injector=SimpleNamespace(at=lambda point: None))
    made.memory_layout = SimpleNamespace(holders=((0, 1, 2),))
    made.ring_senders = {server: SimpleNamespace(waiting=deque(), sent=[], step=lambda: False) for server in (1, 2)}
    made.lacking = defaultdict(deque, {server: deque([0]) for server in lacking})
    made.sending = {}
    made.alone = defaultdict(list)
    made.arriving = {0: []}
    made.rebuilt = 0
    made.header = np.zeros((), [(name, np.int64) for name in HEADER])
    made.stepper = SimpleNamespace(shard_copies={0: ShardCopy.empty(SHARD, 1, False)}, remembers=remembers)
    made.began = {0: 4}
    made._collect = lambda: False
    return made


def step_to(own, version):
    """Take a step after which all weights are the number of the version."""
    own.remember()
    own.weights[:] = version
    own.version = version
    own.whole = True
    own.note(7, version)


def deliver(messages, receiver):
    """Let `receiver` take the messages as if they had arrived through a ring."""
    for sent in messages:
        assert isinstance(sent, PartMessage)
        body = np.zeros(8, np.uint32)
        header = sent.write(body)
        message = SimpleNamespace(**{name: int(header[name]) for name in HEADER})
        assert message.kind == PART
        receiver._values = lambda message, body=body: body[: message.words].view(np.float32)
        table = dict(sent.notes[1:].reshape(-1, 2).tolist())
        receiver._notes = lambda message, table=table: (table, np.empty(0, np.int64))
        receiver._take_replicated(message)


def test_what_was_sent_again_is_acknowledged_when_a_second_copy_has_arrived_and_not_when_it_is_sent():
    sender = replicator(lacking=[1, 2])
    called = []
    sender.when_safe(0, lambda: called.append("before"))
    sender.step()
    assert sender.ring_senders[1].waiting and sender._receivers(0)
    sender.when_safe(0, lambda: called.append("on its way"))
    assert called == []
    for message in sender.ring_senders[1].waiting:
        message.acknowledge()
    assert called == ["before", "on its way"]
    sender.when_safe(0, lambda: called.append("after"))
    assert called[-1] == "after" and sender.sending == {2: 0}


def test_a_push_that_arrives_while_the_first_copy_is_on_its_way_waits_for_it():
    """Nothing was deferred before: the copy was on its way at once."""
    sender = replicator(lacking=[1, 2])
    called = []
    sender.step()
    sender.when_safe(0, lambda: called.append("known"))
    assert called == []
    for message in sender.ring_senders[2].waiting:
        message.acknowledge()
    assert called == ["known"]


def test_one_other_copy_that_was_there_from_the_beginning_is_enough():
    sender = replicator(lacking=[1])
    called = []
    sender.step()
    sender.when_safe(0, lambda: called.append("known"))
    assert called == ["known"]


def test_a_copy_that_has_arrived_is_no_longer_behind():
    sender = replicator(lacking=[1])
    receiver = replicator()
    step_to(sender.stepper.shard_copies[0], 5)
    copy = receiver.stepper.shard_copies[0]
    copy.behind = True
    sender.step()
    deliver(sender.ring_senders[1].waiting, receiver)
    assert copy.whole and not copy.behind and copy.version == 5 and copy.table == {7: 5} and copy.firm


def test_a_copy_that_was_complete_when_the_generation_began_is_sent_once():
    sender = replicator(lacking=[1], remembers=True)
    receiver = replicator(remembers=True)
    for version in (3, 4):
        step_to(sender.stepper.shard_copies[0], version)
    sender.step()
    deliver(sender.ring_senders[1].waiting, receiver)
    copy = receiver.stepper.shard_copies[0]
    assert len(sender.ring_senders[1].waiting) == 2 and copy.version == 4 and copy.firm and not copy.behind


def test_in_synchronous_training_a_copy_arrives_with_its_last_step_so_that_the_step_can_be_taken_back():
    sender = replicator(lacking=[1], remembers=True)
    receiver = replicator(remembers=True)
    for version in (4, 5):
        step_to(sender.stepper.shard_copies[0], version)
    sender.step()
    messages = list(sender.ring_senders[1].waiting)
    copy = receiver.stepper.shard_copies[0]
    deliver(messages[: len(messages) // 2], receiver)
    # Clock 5 may be acknowledged to some pusher: until it is here, the copy counts as one that lacks it.
    assert copy.whole and copy.behind and copy.version == 4 and copy.weights.tolist() == [4] * 4
    deliver(messages[len(messages) // 2 :], receiver)
    assert not copy.behind and not copy.firm and copy.version == 5 and copy.weights.tolist() == [5] * 4
    copy.take_back()
    assert copy.version == 4 and copy.weights.tolist() == [4] * 4 and copy.table == {7: 4} and copy.firm
    for message in messages[: len(messages) // 2]:
        message.acknowledge()
    assert sender.rebuilt == 0
    for message in messages[len(messages) // 2 :]:
        message.acknowledge()
    assert sender.rebuilt == 1


@pytest.fixture
def local():
    made = LocalServer(additive(), 500)
    yield made
    made.free()


def pushes_in_all_shards(local):
    session = local.server.session
    return last_pushes(session.memory_layout, session.shards, session.shard_copies, session.began)


def test_a_push_is_in_all_shards_or_it_is_not_counted(local):
    local.push(1.0)
    local.push(1.0)
    assert pushes_in_all_shards(local) == local.server.stats()["tables"] == [("0", 0, 2)]
    local.server.shard_copies[1].table = {0: MOST_PARTS}
    assert pushes_in_all_shards(local) == [("0", 0, 1)]
    local.server.shard_copies[3].table = {}
    assert pushes_in_all_shards(local) == [("0", 0, 0)]
    assert local.pushes.last == (2, 2)


def test_a_server_does_not_begin_with_a_shard_that_lacks_an_acknowledged_push(local):
    local.push(1.0)
    local.server.begin(local.generation, acknowledged={0: 1})
    local.server.shard_copies[2].table = {}
    with pytest.raises(LostState, match="shards 2 lack acknowledged pushes"):
        local.server.begin(local.generation, acknowledged={0: 1})


def test_a_server_reports_which_copies_were_not_waited_for_and_since_when(local):
    local.push(1.0)
    local.server.begin(local.generation, acknowledged={0: 1}, lacking=[(0, 1), (5, 2)])
    state = RankState(0)
    local.server.export_state(state)
    assert state.behind == {1: 0} and state.began == {0: {0: 1}} and set(state.copies) == {0, 1, 2, 3}
    local.server.discard([1])
    local.server.export_state(state)
    assert set(state.copies) == {0, 2, 3} and not state.behind
    local.server.begin(local.generation)
    local.server.export_state(state)
    assert not state.behind


def test_counts_of_a_generation_that_is_over_are_kept(local):
    local.push(np.nan)
    refused = local.counts["refused"]
    local.server.begin(local.generation)
    assert refused > 0 and local.counts["refused"] == refused


def test_the_session_of_a_generation_that_is_over_is_freed_without_a_garbage_collection(local):
    """It refers to the memory of windows: as long as it exists, that memory does."""
    local.push(1.0)
    earlier = weakref.ref(local.server.session)
    gc.disable()
    try:
        local.server.begin(local.generation)
        assert earlier() is None
    finally:
        gc.enable()


def test_a_server_without_shards_of_its_own_may_miss_clocks_before_its_first_copy():
    config = Config()
    config.consistency.staleness = 0.0
    progress = ServerProgress(config, Position(8), 100)
    progress.note_copy_step(SimpleNamespace(sequence=4, images=10), np.array([batch_id(1, 3)]))
    assert set(progress.positions) == {0}
    progress.note_copy_step(SimpleNamespace(sequence=1, images=10), np.array([batch_id(1, 0)]))
    assert set(progress.positions) == {0, 1}


def test_a_lost_rank_that_mpi_reports_finds_no_step_that_is_in_the_weights_and_in_no_table(local, monkeypatch):
    """Its pushes are sent again, and would be applied again."""

    def check_and_sync():
        in_weights = {index: bool(own.weights.any()) for index, own in local.server.shard_copies.items()}
        in_tables = {index: bool(own.table) for index, own in local.server.shard_copies.items()}
        assert in_weights == in_tables
        sync()

    window = local.generation.weights_window
    sync = window.sync
    monkeypatch.setattr(window, "sync", check_and_sync)
    local.push(1.0)
    assert (local.weights == 1).all()
