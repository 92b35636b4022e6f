"""The push queue: what it refuses and asks for again, and that pushes allocate nothing; in one process."""

import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from local_server import LocalServer, additive

from adam_mpi.base.errors import UserError
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.codecs import CODECS, NUMBERS

SIZE = 500  # four shards, the last one smaller


@pytest.fixture
def build():
    """Return a function that makes local servers; their windows are freed at the end."""
    made = []

    def call(size=SIZE, **settings):
        made.append(LocalServer(additive(**settings), size))
        return made[-1]

    yield call
    for local in made:
        local.free()


@dataclass
class Forged:
    """A message of 100 ones for the first parameters of shard 1, with any field of its header changed."""

    fields: dict
    words: np.ndarray = field(default_factory=lambda: np.ones(100, np.float32).view(np.uint32))
    answered: bool = False

    def write(self, body):
        header = np.zeros((), message_formats.HEADER)
        body[: self.words.size] = self.words
        plain = {
            "shard": 1,
            "kind": message_formats.DELTA,
            "values": 100,
            "words": self.words.size,
            "finite": 1,
            "last": 1,
        }
        for name, value in (plain | self.fields).items():
            header[name] = value
        return header

    def batches(self):
        return np.zeros(0, np.int64)

    def acknowledge(self):
        self.answered = True


def pairs(indices):
    return np.concatenate([np.array(indices, np.uint32), np.ones(len(indices), np.float32).view(np.uint32)])


WRONG = {
    "generation": (Forged({"generation": 3}), "generation 3, the current one is 0"),
    "unknown shard": (Forged({"shard": 99}), "shard 99 is not held here"),
    "negative shard": (Forged({"shard": -1}), "shard -1 is not held here"),
    "more values than the shard": (Forged({"values": 129, "words": 129}), "129 values from 0 of shard 1 with 128"),
    "beyond the end": (Forged({"first": 29}), "100 values from 29 of shard 1"),
    "before the start": (Forged({"first": -1}), "values from -1"),
    "no values": (Forged({"values": 0, "words": 0}), "0 values"),
    "words for other values": (Forged({"values": 99}), "100 words for 99 values"),
    "kind": (Forged({"kind": 77}), "kind 77"),
    "codec": (Forged({"codec": 50}), "codec 50"),
    "negative codec": (Forged({"codec": -1}), "codec -1"),
    "index": (
        Forged({"kind": message_formats.SPARSE, "values": 2}, pairs([1, 128])),
        "an index beyond the 128 parameters",
    ),
    "top index": (
        Forged({"codec": NUMBERS["topk"], "values": 100}, pairs([7, 100])),
        "an index beyond the 100 parameters",
    ),
    "NaN": (Forged({"finite": 0}), "NaN or infinity for shard 1 (dense1)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_push_is_refused_and_named(name, build, caplog):
    local = build()
    message, reason = WRONG[name]
    local.push(2.0)
    # More often than there are slots: each must be freed.
    for number in range(local.memory_layout.slots + 1):
        message.answered = False
        message.fields["sequence"] = 10 + number
        local.ring_sender.waiting.append(message)
        local.apply_pushes()
        assert message.answered
    assert np.array_equal(local.weights, np.full(SIZE, 2.0))
    assert local.counts["refused"] == local.memory_layout.slots + 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == local.memory_layout.slots + 1
    assert said[0].startswith("push 10 of rank 0, data+worker+server") and reason in said[0]


def test_a_good_push_after_a_wrong_one_is_applied(build):
    local = build()
    local.ring_sender.waiting.append(Forged({"shard": 99}))
    local.push(1.0)
    local.push(1.0)
    assert np.array_equal(local.weights, np.full(SIZE, 2.0))


def test_several_apply_threads_add_the_same(build):
    local = build(size=2000, threads=3)
    for number in range(1, 6):
        local.push(np.arange(2000) * number)
    assert np.array_equal(local.weights, 15.0 * np.arange(2000))


def test_a_push_sent_again_is_dropped(build, caplog):
    caplog.set_level("DEBUG")
    local = build()
    for sequence in (1, 2, 2, 1, 3):
        local.ring_sender.waiting.append(Forged({"sequence": sequence}))
    local.apply_pushes()
    assert local.weights[128:228].tolist() == [3.0] * 100 and local.weights.sum() == 300
    assert local.counts["duplicates"] == 2 and local.counts["refused"] == 0
    assert "it was applied before" in caplog.text


def test_a_nan_ends_the_job_where_that_is_configured(build):
    local = build()
    local.world.config.server.on_nan = "stop"
    values = np.ones(SIZE, np.float32)
    values[200] = np.nan
    with pytest.raises(UserError, match=r"push 1 of rank 0.*NaN or infinity for shard 1 \(dense1\).*on_nan = stop"):
        local.push(values)


@pytest.mark.parametrize("codec", CODECS)
def test_a_nan_costs_its_own_shard_of_one_push_only(codec, build):
    """With error feedback it must not stay in the residual either."""
    local = build(codec=codec)
    values = np.ones(SIZE, np.float32)
    values[200] = np.nan
    local.push(values)
    assert local.counts["refused"] == 1
    assert not local.weights[128:256].any() and local.weights[:128].any()
    local.push(1.0)
    assert local.counts["refused"] == 1 and np.isfinite(local.weights).all()
    assert local.weights[128:256].any()


@pytest.mark.parametrize("word", [8, message_formats.HEADER_WORDS, message_formats.HEADER_WORDS + 50])
def test_a_torn_message_is_asked_for_again_and_applied_once(word, build, caplog):
    local = build()
    local.pushes.push(local.gradient_buffer(1.0))
    local.pushes.step()
    local.world.wait(
        lambda: all(request is None or request.Test() for request in local.ring_sender.requests), "puts", 20
    )
    local.generation.mailbox_window.sync()
    # The first message of the ring loses a word on its way.
    local.generation.mailbox_window.memory.view(np.uint32)[word] ^= np.uint32(0x10)
    local.apply_pushes()
    assert np.array_equal(local.weights, np.ones(SIZE))
    assert local.counts["torn"] == 1 and local.ring_sender.resent == 1
    assert local.counts["duplicates"] == local.counts["refused"] == 0
    assert "message 1 of rank 0" in caplog.text and "stays torn; it is asked for again" in caplog.text


def test_a_message_that_is_torn_again_is_asked_for_again(build):
    local = build()
    local.pushes.push(local.gradient_buffer(1.0))
    local.pushes.step()
    for times in (1, 2, 3):
        local.world.wait(
            lambda: all(request is None or request.Test() for request in local.ring_sender.requests), "puts", 20
        )
        local.generation.mailbox_window.sync()
        local.generation.mailbox_window.memory.view(np.uint32)[60] ^= np.uint32(0x10)
        local.world.wait(lambda times=times: sent_again(local, times), "it to be sent again", 20)
    local.apply_pushes()
    assert np.array_equal(local.weights, np.ones(SIZE)) and local.counts["torn"] == 3


def sent_again(local, times):
    """Step once, so that the server does not take the message before the test has torn it."""
    if local.counts["torn"] < times:
        local.server.step()
    local.pushes.step()
    return local.ring_sender.resent == times


@pytest.mark.parametrize("transport", ["shared", "rma", "send"])
@pytest.mark.parametrize("codec", ["none", "onebit"])
def test_a_push_allocates_nothing_after_warm_up(transport, codec, build):
    """Neither the pusher nor the server allocates: of shards of 1 MB, Python itself takes less than 64 KB."""
    local = build(size=2 * 262_144, shard=262_144, codec=codec, transport=transport)
    contribution = local.gradient_buffer(1.0)

    def push():
        local.pushes.push(contribution)
        local.apply_pushes()

    for _ in range(3):
        push()
    buffers = local.server.session.stepper.values.pool.allocated
    grown = []
    tracemalloc.start()
    try:
        for _ in range(10):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            push()
            grown.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert max(grown) < 64 << 10
    assert local.server.session.stepper.values.pool.allocated == buffers == (1 if codec == "onebit" else 0)


def test_a_pull_reads_what_has_changed_and_nothing_else(build):
    local = build()
    local.push(1.0)
    assert np.all(local.pull() == 1.0) and local.pulls.runs
    local.push(1.0)
    local.pulls.start()
    local.world.wait(local.pulls.step, "weights", 20)
    assert not local.pulls.active and not local.pulls.step()
    assert np.all(local.pulls.latest == 2.0)
    assert np.all(local.pull() == 2.0) and local.pulls.runs == []


def test_a_pull_allocates_nothing_after_warm_up(build):
    local = build(size=2 * 262_144, shard=262_144)
    local.push(1.0)
    local.pull()
    tracemalloc.start()
    try:
        local.push(1.0)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert local.pull()[0] == 2
        assert tracemalloc.get_traced_memory()[1] - before < 64 << 10
    finally:
        tracemalloc.stop()
