"""A server's copies of shards, without other ranks: what makes one whole, what may be told of it, what it lacks."""

from collections import defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
from house import House, additive

from adam_mpi.base.errors import LostState
from adam_mpi.config import Config
from adam_mpi.server.progress import ServerProgress
from adam_mpi.server.replication import PART, PartMessage, Replicator
from adam_mpi.sharding.message_format import MOST_PARTS
from adam_mpi.sharding.position import Position, batch_id
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard

SHARD = Shard(0, "dense1", 0, 4)


def replicator(lacking=(), remembers=False):
    """On rank 0 of three servers that have one shard, served here; lanes only keep what is sent."""
    made = Replicator.__new__(Replicator)
    made.world = SimpleNamespace(injector=SimpleNamespace(at=lambda point: None))
    made.memory_layout = SimpleNamespace(holders=((0, 1, 2),))
    made.lanes = {server: SimpleNamespace(waiting=deque(), sent=[], step=lambda: False) for server in (1, 2)}
    made.lacking = defaultdict(deque, {server: deque([0]) for server in lacking})
    made.sending, made.alone, made.arriving, made.rebuilt = {}, defaultdict(list), {0: []}, 0
    made.header = np.zeros((), [(name, np.int64) for name in HEADER])
    made.stepper, made.began = SimpleNamespace(holdings={0: ShardCopy.empty(SHARD, False)}, remembers=remembers), {0: 4}
    made._collect = lambda: False
    return made


HEADER = ("kind", "sequence", "shard", "words", "values", "part", "parts", "first")


def step_to(holding, version):
    """A step after which all weights are the number of the version."""
    holding.remember()
    holding.weights[:], holding.version, holding.whole = version, version, True
    holding.note(7, version)


def deliver(letters, receiver):
    """What was sent, taken as if it had come through a ring."""
    for letter in letters:
        assert isinstance(letter, PartMessage)
        body = np.zeros(8, np.uint32)
        header = letter.write(body)
        mail = SimpleNamespace(**{name: int(header[name]) for name in HEADER})
        assert mail.kind == PART
        receiver._values = lambda mail, body=body: body[: mail.words].view(np.float32)
        table = dict(letter.notes[1:].reshape(-1, 2).tolist())
        receiver._notes = lambda mail, table=table: (table, np.empty(0, np.int64))
        receiver._take(mail)


def test_what_was_sent_again_is_acknowledged_when_a_second_copy_has_come_and_not_when_it_is_sent():
    sender, told = replicator(lacking=[1, 2]), []
    sender.when_safe(0, lambda: told.append("before"))
    sender.step()
    assert sender.lanes[1].waiting and sender._ready(0)
    sender.when_safe(0, lambda: told.append("on its way"))
    assert told == []
    for letter in sender.lanes[1].waiting:
        letter.settled()
    assert told == ["before", "on its way"]
    sender.when_safe(0, lambda: told.append("after"))
    assert told[-1] == "after" and sender.sending == {2: 0}


def test_what_comes_while_the_first_copy_is_on_its_way_waits_for_it():
    """Nothing was deferred before: the copy was on its way at once."""
    sender, told = replicator(lacking=[1, 2]), []
    sender.step()
    sender.when_safe(0, lambda: told.append("known"))
    assert told == []
    for letter in sender.lanes[2].waiting:
        letter.settled()
    assert told == ["known"]


def test_one_other_copy_that_was_there_from_the_beginning_is_enough():
    sender, told = replicator(lacking=[1]), []
    sender.step()
    sender.when_safe(0, lambda: told.append("known"))
    assert told == ["known"]


def test_a_copy_that_has_come_is_behind_no_more():
    sender, receiver = replicator(lacking=[1]), replicator()
    step_to(sender.stepper.holdings[0], 5)
    copy = receiver.stepper.holdings[0]
    copy.behind = True
    sender.step()
    deliver(sender.lanes[1].waiting, receiver)
    assert copy.whole and not copy.behind and copy.version == 5 and copy.table == {7: 5} and copy.firm


def test_what_was_complete_when_the_generation_began_is_sent_once():
    sender, receiver = replicator(lacking=[1], remembers=True), replicator(remembers=True)
    for version in (3, 4):
        step_to(sender.stepper.holdings[0], version)
    sender.step()
    deliver(sender.lanes[1].waiting, receiver)
    copy = receiver.stepper.holdings[0]
    assert len(sender.lanes[1].waiting) == 2 and copy.version == 4 and copy.firm and not copy.behind


def test_in_step_a_copy_comes_with_its_last_step_so_that_this_can_be_taken_back():
    sender, receiver = replicator(lacking=[1], remembers=True), replicator(remembers=True)
    for version in (4, 5):
        step_to(sender.stepper.holdings[0], version)
    sender.step()
    letters, copy = list(sender.lanes[1].waiting), receiver.stepper.holdings[0]
    deliver(letters[: len(letters) // 2], receiver)
    # Somebody may have had clock 5 acknowledged: until it is here, the copy counts as one that is not.
    assert copy.whole and copy.behind and copy.version == 4 and copy.weights.tolist() == [4] * 4
    deliver(letters[len(letters) // 2 :], receiver)
    assert not copy.behind and not copy.firm and copy.version == 5 and copy.weights.tolist() == [5] * 4
    copy.take_back()
    assert copy.version == 4 and copy.weights.tolist() == [4] * 4 and copy.table == {7: 4} and copy.firm
    for letter in letters[: len(letters) // 2]:
        letter.settled()
    assert sender.rebuilt == 0
    for letter in letters[len(letters) // 2 :]:
        letter.settled()
    assert sender.rebuilt == 1


@pytest.fixture
def house():
    made = House(additive(), 500)
    yield made
    made.free()


def test_a_push_is_in_all_shards_or_it_is_not_counted(house):
    house.push(1.0)
    house.push(1.0)
    assert house.server.tables() == [("0", 0, 2)]
    house.server.holdings[1].table = {0: MOST_PARTS}
    assert house.server.tables() == [("0", 0, 1)]
    house.server.holdings[3].table = {}
    assert house.server.tables() == [("0", 0, 0)]
    assert house.pushes.last == (2, 2)


def enter(house, **settled):
    """The next generation, with the same ranks and windows."""
    server = house.server
    server.enter(house.generation, **settled)


def test_a_server_does_not_begin_with_a_shard_that_lacks_what_was_acknowledged(house):
    house.push(1.0)
    enter(house, acknowledged={0: 1})
    house.server.holdings[2].table = {}
    with pytest.raises(LostState, match="shards 2 lack acknowledged pushes"):
        enter(house, acknowledged={0: 1})


def test_a_server_tells_which_copies_were_not_waited_for_and_since_when(house):
    house.push(1.0)
    enter(house, acknowledged={0: 1}, lacking=[(0, 1), (5, 2)])
    state = RankState(0)
    house.server.export_state(state)
    assert state.behind == {1: 0} and state.began == {0: {0: 1}} and set(state.copies) == {0, 1, 2, 3}
    house.server.discard([1])
    house.server.export_state(state)
    assert set(state.copies) == {0, 2, 3} and not state.behind
    enter(house)
    house.server.export_state(state)
    assert not state.behind


def test_a_server_without_shards_of_its_own_may_miss_clocks_before_its_first_copy():
    config = Config()
    config.consistency.staleness = 0.0
    books = ServerProgress(config, Position(8), 100)
    record = SimpleNamespace(sequence=4, images=10)
    books.taken(record, np.array([batch_id(1, 3)]))
    assert set(books.positions) == {0}
    books.taken(SimpleNamespace(sequence=1, images=10), np.array([batch_id(1, 0)]))
    assert set(books.positions) == {0, 1}


def test_a_loss_that_mpi_tells_of_finds_no_step_that_is_in_the_weights_and_in_no_table(house, monkeypatch):
    """Its pushes come again, and would be applied again."""

    def lost():
        in_weights = {index: bool(held.weights.any()) for index, held in house.server.holdings.items()}
        in_tables = {index: bool(held.table) for index, held in house.server.holdings.items()}
        assert in_weights == in_tables
        sync()

    sync = house.server.window.sync
    monkeypatch.setattr(house.server.window, "sync", lost)
    house.push(1.0)
    assert (house.weights == 1).all()
