"""The push client without MPI: messages that are sent again, and the residual of pushes that are taken back."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.config import load
from adam_mpi.config.sections import MOST_BATCHES
from adam_mpi.model.parameters import Tensor
from adam_mpi.sharding import memory_layout, message_formats
from adam_mpi.sharding.message_formats import MOST_PARTS
from adam_mpi.sharding.push_protocol import Choice
from adam_mpi.transport import mailbox
from adam_mpi.transport.generation import Generation
from adam_mpi.worker.gradient_buffer import BatchResult, GradientBuffer, GradientPool
from adam_mpi.worker.push_client import PushClient
from adam_mpi.worker.residual import finite_sum

TENSORS = (Tensor("dense1/weight", "dense1", (16, 64), 0, 1024),)
SIZE = 1024
SHARD = 256
PUSHER = 4
SERVERS = {0: "h", 1: "h"}
FEEDBACK = pytest.mark.parametrize("codec", ["topk", "onebit"])


class Memory:
    """A window whose servers are all on this node, so that their memory can be written directly."""

    def __init__(self):
        self.held = defaultdict(lambda: np.zeros(1 << 20, np.uint8))

    def memory_of(self, server, offset, size):
        return self.held[server][offset : offset + size]

    def sync(self):
        pass

    def get(self, into, server, offset):
        into[:] = self.held[server][offset : offset + into.nbytes].view(into.dtype)
        return SimpleNamespace(Test=lambda: True)


class Client(PushClient):
    """A pusher, and servers that acknowledge when a test calls `confirm`."""

    def __init__(self, *settings, holders=None):
        self.settings = load(None, [f"server.shard={SHARD}", "push.protocol=delta", *settings])
        super().__init__(self.open(0, holders or [0, 0, 1, 1]))

    def open(self, generation, holders):
        """Return a generation with new windows, whose shards are on the servers `holders`."""
        place = SimpleNamespace(member=PUSHER)
        injector = SimpleNamespace(at=lambda point: None)
        world = SimpleNamespace(config=self.settings, rank=2, place=place, generation=generation, injector=injector)
        plan = memory_layout.plan_layout(
            TENSORS, SERVERS, [2], self.settings, holders=[(server,) for server in holders]
        )
        self.mailboxes = Memory()
        self.published = Memory()
        choices = {"dense1": Choice("dense1", 0, None, None)}
        return Generation(
            world=world,
            memory_layout=plan,
            choices=choices,
            mailbox_window=self.mailboxes,
            weights_window=self.published,
            replication_window=None,
            channel=None,
        )

    def next_generation(self, holders):
        self.begin_generation(self.open(self.rings.world.generation + 1, holders))

    @property
    def memory_layout(self):
        return self.rings.memory_layout

    def confirm(self, server, count):
        """Publish that `server` has applied `count` messages."""
        self.published.held[server][self.memory_layout.line_offset(0) :][:8].view(np.int64)[0] = count
        self.step()

    def arrived(self):
        """Return, by shard and number of the push, whether a message in the mailboxes is finite, and its body."""
        found = defaultdict(dict)
        for server in SERVERS:
            for slot in range(self.memory_layout.slots):
                start = slot * self.memory_layout.slot_bytes
                message = self.mailboxes.held[server][start : start + self.memory_layout.slot_bytes].view(np.uint32)
                header = np.ndarray((), message_formats.HEADER, message)
                if header["position"]:
                    body = mailbox.body(message)[: int(header["words"])].copy()
                    found[int(header["shard"])][int(header["sequence"])] = int(header["finite"]), body
        return found


def gradient(seed, scale=1.0):
    """Return a gradient buffer with random values."""
    values = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32) * np.float32(scale)
    return GradientBuffer(0, values, [BatchResult(0, seed, 32, np.array([0.0, 0]), 1)])


def pushed(client, *buffers):
    """Push `buffers`; return what has arrived."""
    for buffer in buffers:
        client.push(buffer)
    client.step()
    return client.arrived()


@FEEDBACK
def test_a_push_that_one_server_acknowledged_is_sent_again_unchanged(codec):
    """The push waits for another server; encoded a second time it would be carried twice, and dropped there."""
    client = Client(f"push.codec={codec}")
    before = pushed(client, gradient(1), gradient(2))
    client.confirm(0, 2)
    assert len(client.unacknowledged) == 2
    carried = client.residual.values.copy()
    client.next_generation([1, 0, 0, 1])
    client.step()
    assert np.array_equal(client.residual.values, carried)
    after = client.arrived()
    for shard, messages in before.items():
        assert messages.keys() == after[shard].keys() == {1, 2}
        assert all(np.array_equal(body, after[shard][number][1]) for number, (_, body) in messages.items())


@FEEDBACK
def test_encoded_bodies_are_kept_until_the_whole_push_is_acknowledged(codec):
    client = Client(f"push.codec={codec}")
    buffer = gradient(1)
    pushed(client, buffer)
    client.confirm(0, 2)
    assert sorted(buffer.encoded) == [0, 1, 2, 3]
    client.confirm(1, 2)
    assert client.idle and not buffer.encoded


@FEEDBACK
def test_a_clock_that_is_taken_back_takes_its_encoding_out_of_the_residual(codec):
    client = Client(f"push.codec={codec}", "consistency.staleness=0")
    pushed(client, gradient(1))
    client.confirm(0, 2)
    client.confirm(1, 2)
    carried = client.residual.values.copy()
    pushed(client, gradient(2))
    assert not np.array_equal(client.residual.values, carried)
    assert len(client.take_back_from(1)) == 1 and (client.sent, client.clock) == (1, 1)
    assert np.array_equal(client.residual.values, carried)
    # A push that has reached all servers stays, although no acknowledgement has arrived.
    client.next_generation([0, 0, 1, 1])
    pushed(client, gradient(3))
    kept = client.residual.values.copy()
    client.take_back_from(2)
    assert np.array_equal(client.residual.values, kept) and client.completed == 2


@FEEDBACK
def test_of_a_push_that_is_given_up_the_residual_keeps_what_shards_have(codec):
    client = Client(f"push.codec={codec}", "consistency.staleness=0")
    pushed(client, gradient(1))
    first = client.residual.values.copy()
    pushed(client, gradient(2))
    second = client.residual.values.copy()
    client.take_back_missing({0: 2 * MOST_PARTS, 1: 2 * MOST_PARTS, 2: MOST_PARTS})
    half = SIZE // 2
    parts = client.residual.values
    assert np.array_equal(parts[:half], second[:half])
    assert np.array_equal(parts[half : half + SHARD], first[half : half + SHARD])
    assert not parts[half + SHARD :].any()


@FEEDBACK
def test_a_sum_that_is_not_finite_is_refused_and_stays_so(codec):
    """Each value is finite, and so is what is carried; together they are not."""
    client = Client(f"push.codec={codec}")
    huge = gradient(1)
    client.residual.values[:] = 3e38
    huge.values[:] = 3e38
    messages = pushed(client, huge)
    assert all(finite == 0 and not body.any() for shard in messages.values() for finite, body in shard.values())
    assert np.all(client.residual.values == np.float32(3e38))
    assert client.trouble is not None
    client.residual.values[:] = 0
    client.next_generation([1, 1, 0, 0])
    client.step()
    assert all(finite == 0 for shard in client.arrived().values() for finite, _ in shard.values())
    assert not client.residual.values.any()


def test_sums_are_checked_as_they_will_be_encoded():
    big = np.full(5, 3e38, np.float32)
    small = np.ones(5, np.float32)
    nan = np.array([1, np.nan, 1, 1, 1], np.float32)
    assert finite_sum(big, small) and finite_sum(big, -big)
    assert not finite_sum(big, big) and not finite_sum(small, nan) and not finite_sum(nan, small)


def test_large_values_do_not_overflow_in_the_mean_of_a_group():
    client = Client("push.codec=onebit")
    buffer = gradient(1)
    buffer.values[:] = 3e38
    pushed(client, buffer)
    means = client.arrived()[0][1][1][:2].view(np.float32)
    assert means[0] == np.float32(3e38) and np.isfinite(client.residual.values).all()


def test_the_parts_of_a_joint_batch_are_one_batch():
    client = Client()
    buffer = gradient(7)
    buffer.done = [BatchResult(0, 7, 1, np.array([0.0, 0]), 1) for _ in range(MOST_BATCHES + 16)]
    client.push(buffer)
    client.step()
    slot = client.mailboxes.held[0][: client.memory_layout.slot_bytes].view(np.uint32)
    assert np.ndarray((), message_formats.HEADER, slot)["batches"] == 1


def test_a_buffer_is_full_when_there_is_no_room_for_one_more_batch():
    buffer = gradient(1)
    buffer.done = [BatchResult(0, number, 1, np.array([0.0, 0]), 1) for number in range(MOST_BATCHES - 1)]
    assert not buffer.full(128) and buffer.full(MOST_BATCHES - 1)
    buffer.done.append(BatchResult(0, MOST_BATCHES, 1, np.array([0.0, 0]), 1))
    assert buffer.full(128)


def test_a_buffer_that_comes_back_keeps_no_encoded_bodies():
    pool = GradientPool(1, SIZE, {}, 1)
    buffer = pool.take()
    buffer.encoded[0] = None
    pool.give(buffer)
    assert not pool.take().encoded


def test_more_batches_in_a_push_than_a_message_has_room_for_are_refused():
    with pytest.raises(UserError, match=r"push.images = 128: at most 64, 64 batches of train.batch = 1; set it to 64"):
        load(None, ["push.images=128", "train.batch=1"])
    load(None, ["push.images=128", "train.batch=2"])
    load(None, ["push.images=128", "train.batch=1", "consistency.staleness=0"])
