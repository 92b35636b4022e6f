"""The stall watchdog: what is awaited for too long is told once, with whom and since when, and stacks of both sides."""

import re
import types

import pytest
from launch import given, spread

from adam_mpi.base.errors import Stall
from adam_mpi.cluster import watchdog
from adam_mpi.cluster.layout import Place
from adam_mpi.cluster.watchdog import Wait, Watchdog
from adam_mpi.config import load

ENDLESS = given("data.images=1000", "train.epochs=1000000", "observe.interval=0.2")


@pytest.fixture
def clock(monkeypatch):
    """Time as the test wants it."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now.seconds)
    return now


class ControlChannel:
    def __init__(self):
        self.sent, self.signs = [], []

    def send(self, message, to):
        if message["kind"] == "sign":
            self.signs.append((to, message))
        else:
            self.sent.append((to, message["asked"]))


@pytest.fixture
def dog(clock):
    """The watchdog of rank 0, with rank 1 on another host."""
    places = [Place(0, "a", ("worker",), 0, 0), Place(1, "b", ("server",))]
    layout = types.SimpleNamespace(places=places)
    world = types.SimpleNamespace(config=load(None), hosts=["a", "b"], place=places[0], rank=0, layout=layout)
    world.survivable = False
    world.config.watchdog.seconds = 10.0
    return Watchdog(world, ControlChannel())


def test_a_wait_is_told_once_and_again_only_when_it_began_anew(dog, clock, caplog):
    for turn in (0, 0, 1, 1):
        for _ in range(12):
            clock.seconds += 1
            dog.look(lambda turn=turn: [Wait("clock 7", 1, turn, patient=True)])
            answer_signs(dog)
    assert len(dog.channel.sent) == 2
    to, asked = dog.channel.sent[0]
    assert to == 1
    pattern = r"rank 0, worker .* on a waited for clock 7 from rank 1, server on b since \d\d:\d\d:\d\d, 1\d\.\d s"
    assert re.fullmatch(pattern, asked)


def test_what_moves_on_is_never_told(dog, clock):
    for turn in range(100):
        clock.seconds += 3
        dog.look(lambda turn=turn: [Wait("a batch", 1, turn)])
    assert dog.channel.sent == []


def test_what_is_owed_for_too_long_ends_the_job(dog, clock):
    dog.limit = 30.0
    with pytest.raises(Stall, match=r"rank 0, worker .* has waited for a batch from rank 1, server on b since .*ends"):
        for _ in range(40):
            clock.seconds += 1
            dog.look(lambda: [Wait("a batch", 1, 0), Wait("clock 7", 1, 0, patient=True)])
            answer_signs(dog)
    assert 130 < clock.seconds < 134


def answer_signs(dog):
    """As the other side does, whose main thread goes on."""
    for to, message in dog.channel.signs:
        dog.hear(to, {**message, "asks": False})
    dog.channel.signs = []


def test_a_patient_wait_lasts_while_the_other_side_gives_signs_of_life(dog, clock):
    for _ in range(1000):
        clock.seconds += 1
        dog.look(lambda: [Wait("clock 7", 1, 0, patient=True)])
        answer_signs(dog)


def test_a_patient_wait_ends_when_the_other_side_gives_no_sign_of_life(dog, clock):
    dog.limit = 30.0
    with pytest.raises(Stall, match=r"rank 0, worker .* has waited for a sign of life from rank 1, server on b .*ends"):
        for _ in range(100):
            clock.seconds += 1
            dog.look(lambda: [Wait("clock 7", 1, 0, patient=True)])
    assert 130 < clock.seconds < 135
    assert len(dog.channel.signs) == 1


def test_nobody_is_asked_for_signs_of_life_while_waits_are_short(dog, clock):
    for turn in range(100):
        clock.seconds += 1
        dog.look(lambda turn=turn: [Wait("clock", 1, turn, patient=True)])
    assert dog.channel.signs == []


def test_who_is_asked_for_a_sign_of_life_gives_it(dog):
    dog.hear(1, {"kind": "sign", "asks": True, "number": 7})
    assert dog.channel.signs == [(1, {"kind": "sign", "asks": False, "number": 7})]


def test_where_others_can_go_on_the_head_acts_before_those_who_wait(dog, clock):
    dog.limit, dog.world.survivable = 30.0, True
    with pytest.raises(Stall):
        for _ in range(400):
            clock.seconds += 0.1
            dog.look(lambda: [Wait("a batch", 1, 0)])
    assert 132 < clock.seconds < 134


def test_the_time_in_which_this_rank_stood_still_counts_for_nobody(dog, clock):
    dog.limit = 30.0
    for seconds in (1, 5, 60, 2, 1, 90, 1):
        clock.seconds += seconds
        dog.look(lambda: [Wait("a batch", 1, 0)])
    assert dog.channel.sent == []


def test_stacks_name_the_threads_and_where_they_are():
    assert "thread MainThread" in watchdog.stacks() and "in test_stacks_name_the_threads" in watchdog.stacks()


@pytest.mark.parametrize(("rank", "mpi"), spread([1, 0]), indirect=["mpi"])
def test_a_rank_that_does_not_answer_is_told_of_with_its_stacks(rank, start_job):
    keys = given("watchdog.seconds=1", "cluster.stopped=0", "snapshot.minutes=0")
    job = start_job(4, "train", *ENDLESS, *keys)
    job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")
    server = r"the acknowledgement of push \d+, (shard \d+|layer \S+)|the \w+ of pull \d+"
    what = {1: server, 0: "a batch|the next phase"}[rank]
    other = {1: "rank 1, server on", 0: "rank 0, data on"}[rank]
    job.rank(rank).suspend()
    told = re.compile(rf"rank [23], worker .* waited for ({what}) from {other} \S+ since .* s; stacks here:\nthread ")
    job.until(lambda: any(told.search(text) for text in job.logs().values()), "the watchdog's word")
    job.rank(rank).resume()
    stack = re.compile(r"^  File .*run\.py\", line \d+ in _serve$", re.M)
    job.until(lambda: stack.search(job.logs()[f"rank-{rank:05d}"]), "the stack of the other side's main thread")


STRIPS = given(
    "layout.partitions=2",
    "layout.data=1",
    "layout.servers=1",
    "kernels.engine=reference",
    "data.validation=0",
    'model.layers=[{kind="conv", channels=4, kernel=3}, "tanh", {kind="dense", units=10}]',
)


@pytest.mark.parametrize(("transport", "mpi"), spread(["shared", "send"]), indirect=["mpi"])
def test_strips_tell_of_what_does_not_come_from_others_and_end_the_job(transport, start_job):
    """Columns that stay under way for ever, as those of a network that loses them."""
    keys = given("watchdog.seconds=1", "cluster.seconds=5", "snapshot.minutes=0", f"cluster.transport={transport}")
    fault = given('inject.faults=["delay rank=3 at=exchange seconds=1000"]')
    job = start_job(4, "train", *ENDLESS, *STRIPS, *keys, *fault)
    assert job.wait().returncode
    other = r"from rank 3, worker \(replica 0, strip 1\) on \S+ since \S+"
    what = rf"rank 2, worker .* waited for what dense1 needs on the right, part 0 of the batches, {other}"
    assert re.search(rf"{what} \d\.\d s; stacks here:\nthread ", job.logs()["rank-00002"])
    # Strip 1 in turn waits for what strip 0 would compute from its columns, and may be the first to end the job.
    end = r"worker .* has waited for what (dense1|loss) needs on the (right|left), part 0 .* [5-9]\.\d s; the job ends"
    assert re.search(end, job.stderr), job.said()


def test_a_strip_that_only_receives_batches_tells_who_asks_for_them(start_job):
    """Wherever in a batch that strip is stopped; the end of an epoch, where all wait for the head, is far away."""
    keys = given("watchdog.seconds=1", "cluster.stopped=0", "snapshot.minutes=0", "data.images=50000")
    job = start_job(4, "train", *ENDLESS, *STRIPS, *keys)
    job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")
    job.rank(2).suspend()
    exchange = r"what \w+ (needs|gives back) on the left, part \d+ of the batches,"
    what = rf"an ask for a batch|{exchange}|its (share of sum \d+|end of what was sent before \w+ \d+) of .*"
    told = rf"rank 3, worker .* waited for ({what}) from rank 2, worker .*; stacks here"
    job.until(lambda: re.search(told, job.logs()["rank-00003"]), "the watchdog's word")
    job.rank(2).resume()
