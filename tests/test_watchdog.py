"""The stall watchdog logs a long wait once, with its rank, its beginning and the stacks of both ranks."""

import dataclasses
import re
import types

import pytest
from launch import given, spread

from adam_mpi.base.errors import Stall
from adam_mpi.cluster import watchdog
from adam_mpi.cluster.control_messages import DumpStacks, SignOfLife
from adam_mpi.cluster.layout import Place
from adam_mpi.cluster.watchdog import Wait, Watchdog
from adam_mpi.config import load

ENDLESS = given("data.images=1000", "train.epochs=1000000", "observe.interval=0.2")


@pytest.fixture
def clock(monkeypatch):
    """Replace the monotonic clock by `seconds` that the test sets."""
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now.seconds)
    return now


class Channel:
    """A control channel that keeps the signs of life and the requests for stacks that are sent."""

    def __init__(self):
        self.signs = []
        self.dumps = []

    def send(self, message, to):
        kept = {SignOfLife: self.signs, DumpStacks: self.dumps}
        kept[type(message)].append((to, message))


@pytest.fixture
def dog(clock):
    """The watchdog of rank 0, with rank 1 on another host."""
    places = [Place(0, "a", ("worker",), 0, 0), Place(1, "b", ("server",))]
    layout = types.SimpleNamespace(places=places)
    world = types.SimpleNamespace(config=load(None), hosts=["a", "b"], place=places[0], rank=0, layout=layout)
    world.survivable = False
    world.config.watchdog.seconds = 10.0
    return Watchdog(world, Channel())


def test_a_wait_is_logged_once_and_again_only_in_another_turn(dog, clock, caplog):
    for turn in (0, 0, 1, 1):
        for _ in range(12):
            clock.seconds += 1
            dog.check(lambda turn=turn: [Wait("clock 7", 1, turn, patient=True)])
            answer_signs(dog)
    assert len(dog.channel.dumps) == 2
    to, message = dog.channel.dumps[0]
    assert to == 1
    pattern = r"rank 0, worker .* on a waited for clock 7 from rank 1, server on b since \d\d:\d\d:\d\d, 1\d\.\d s"
    assert re.fullmatch(pattern, message.reason)


def test_waits_that_end_are_never_logged(dog, clock):
    for turn in range(100):
        clock.seconds += 3
        dog.check(lambda turn=turn: [Wait("a batch", 1, turn)])
    assert dog.channel.dumps == []


def test_a_request_unanswered_for_too_long_ends_the_job(dog, clock):
    dog.limit = 30.0
    with pytest.raises(Stall, match=r"rank 0, worker .* has waited for a batch from rank 1, server on b since .*ends"):
        for _ in range(40):
            clock.seconds += 1
            dog.check(lambda: [Wait("a batch", 1, 0), Wait("clock 7", 1, 0, patient=True)])
            answer_signs(dog)
    assert 130 < clock.seconds < 134


def answer_signs(dog):
    """Answer as the other rank does while its main thread runs."""
    for to, message in dog.channel.signs:
        dog.handle(to, dataclasses.replace(message, asks=False))
    dog.channel.signs = []


def test_a_patient_wait_lasts_while_the_other_rank_gives_signs_of_life(dog, clock):
    for _ in range(1000):
        clock.seconds += 1
        dog.check(lambda: [Wait("clock 7", 1, 0, patient=True)])
        answer_signs(dog)


def test_a_patient_wait_ends_when_the_other_rank_gives_no_sign_of_life(dog, clock):
    dog.limit = 30.0
    with pytest.raises(Stall, match=r"rank 0, worker .* has waited for a sign of life from rank 1, server on b .*ends"):
        for _ in range(100):
            clock.seconds += 1
            dog.check(lambda: [Wait("clock 7", 1, 0, patient=True)])
    assert 130 < clock.seconds < 135
    assert len(dog.channel.signs) == 1


def test_no_rank_is_asked_for_signs_of_life_while_waits_are_short(dog, clock):
    for turn in range(100):
        clock.seconds += 1
        dog.check(lambda turn=turn: [Wait("clock", 1, turn, patient=True)])
    assert dog.channel.signs == []


def test_a_rank_that_is_asked_for_a_sign_of_life_gives_it(dog):
    dog.handle(1, SignOfLife(asks=True, number=7))
    assert dog.channel.signs == [(1, SignOfLife(asks=False, number=7))]


def test_in_a_survivable_job_the_coordinator_acts_before_waiting_ranks(dog, clock):
    dog.limit = 30.0
    dog.world.survivable = True
    with pytest.raises(Stall):
        for _ in range(400):
            clock.seconds += 0.1
            dog.check(lambda: [Wait("a batch", 1, 0)])
    assert 132 < clock.seconds < 134


def test_the_time_in_which_this_rank_was_stopped_does_not_count(dog, clock):
    dog.limit = 30.0
    for seconds in (1, 5, 60, 2, 1, 90, 1):
        clock.seconds += seconds
        dog.check(lambda: [Wait("a batch", 1, 0)])
    assert dog.channel.dumps == []


def test_stacks_name_the_threads_and_where_they_are():
    assert "thread MainThread" in watchdog.stacks() and "in test_stacks_name_the_threads" in watchdog.stacks()


@pytest.mark.parametrize(("rank", "mpi"), spread([1, 0]), indirect=["mpi"])
def test_a_rank_that_does_not_answer_is_logged_with_its_stack(rank, start_job):
    keys = given("watchdog.seconds=1", "cluster.stopped=0", "snapshot.minutes=0")
    job = start_job(4, "train", *ENDLESS, *keys)
    job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")
    server = r"the acknowledgement of push \d+, (shard \d+|layer \S+)|the \w+ of pull \d+"
    what = {1: server, 0: "a batch|the next phase"}[rank]
    other = {1: "rank 1, server on", 0: "rank 0, data on"}[rank]
    job.rank(rank).suspend()
    expected = re.compile(
        rf"rank [23], worker .* waited for ({what}) from {other} \S+ since .* s; stacks here:\nthread "
    )
    job.until(lambda: any(expected.search(text) for text in job.logs().values()), "the message of the watchdog")
    job.rank(rank).resume()
    stack = re.compile(r"^  File .*run\.py\", line \d+ in _run_roles$", re.M)
    job.until(lambda: stack.search(job.logs()[f"rank-{rank:05d}"]), "the stack of the other rank's main thread")


STRIPS = given(
    "layout.partitions=2",
    "layout.data=1",
    "layout.servers=1",
    "kernels.engine=reference",
    "data.validation=0",
    'model.layers=[{kind="conv", channels=4, kernel=3}, "tanh", {kind="dense", units=10}]',
)


@pytest.mark.parametrize(("transport", "mpi"), spread(["shared", "send"]), indirect=["mpi"])
def test_strips_log_what_other_strips_do_not_send_and_end_the_job(transport, start_job):
    """Columns are delayed forever, as in a network that loses them."""
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


def test_a_strip_that_only_receives_batches_logs_the_strip_that_asks_for_them(start_job):
    """The strip may be stopped anywhere in a batch, but far from the end of an epoch, where all ranks wait."""
    keys = given("watchdog.seconds=1", "cluster.stopped=0", "snapshot.minutes=0", "data.images=50000")
    job = start_job(4, "train", *ENDLESS, *STRIPS, *keys)
    job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")
    job.rank(2).suspend()
    exchange = r"what \w+ (needs|gives back) on the left, part \d+ of the batches,"
    what = rf"an ask for a batch|{exchange}|its (share of sum \d+|end of what was sent before \w+ \d+) of .*"
    expected = rf"rank 3, worker .* waited for ({what}) from rank 2, worker .*; stacks here"
    job.until(lambda: re.search(expected, job.logs()["rank-00003"]), "the message of the watchdog")
    job.rank(2).resume()
