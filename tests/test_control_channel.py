"""The control channel between all ranks of a real MPI job of any size."""

import types

import numpy as np
import pytest
from mpi4py import MPI

from adam_mpi import config
from adam_mpi.cluster.control_messages import (
    ControlChannel,
    DumpStacks,
    SignOfLife,
    SnapshotHeld,
    SparesReport,
    encode_message,
)
from adam_mpi.cluster.world import World

pytestmark = pytest.mark.mpi
SECONDS = 30


@pytest.fixture
def world():
    world = World(MPI.COMM_WORLD, config.load())
    yield world
    world.finish()


def test_many_messages_from_every_rank_to_every_rank_keep_their_order(world):
    channel = ControlChannel(world.control)
    count = 200
    ranks = range(world.comm.size)
    for number in range(count):
        for rank in ranks:
            channel.send(SnapshotHeld("worker", [number, world.rank, rank]), rank)
    received = {rank: [] for rank in ranks}

    def all_received():
        for source, message in channel.receive():
            number, sender, receiver = message.clocks
            assert (sender, receiver) == (source, world.rank)
            received[source].append(number)
        return all(len(numbers) >= count for numbers in received.values())

    world.wait(all_received, f"{count} messages of each rank", SECONDS)
    world.wait(lambda: channel.idle, "the own messages to leave", SECONDS)
    assert all(numbers == list(range(count)) for numbers in received.values())


def test_messages_of_different_sizes_and_kinds_arrive_unchanged(world):
    channel = ControlChannel(world.control)
    messages = [DumpStacks("ü" * length) for length in (0, 70_000, 3, 300_000, 1)]
    messages[2:2] = [SparesReport(1, 2, False, [{"seconds": 0.5, "cpu": 0.25}]), SignOfLife(asks=True, number=7)]
    for message in messages:
        channel.send(message, (world.rank + 1) % world.comm.size)
    received = []

    def all_received():
        received.extend(message for _, message in channel.receive())
        return len(received) == len(messages)

    world.wait(all_received, "the messages of the rank before", SECONDS)
    assert received == messages
    world.wait(lambda: channel.idle, "the own messages to leave", SECONDS)


def test_without_messages_nothing_is_received(world):
    channel = ControlChannel(world.control)
    assert list(channel.receive()) == [] and channel.idle


def test_an_incomplete_message_does_not_delay_other_senders():
    """Rank 1 sends two messages, of which the first never arrives whole; rank 2 sends one."""
    first, second, third = (SignOfLife(asks=True, number=number) for number in (1, 2, 3))
    waiting = iter(
        [(1, encode_message(first), False), (1, encode_message(second), True), (2, encode_message(third), True)]
    )

    def probe(status):
        source, data, whole = next(waiting, (0, b"", None))
        if whole is None:
            return None
        status.source = source
        status.Set_elements(MPI.BYTE, len(data))
        return types.SimpleNamespace(Irecv=lambda body: _receive(body, data, whole))

    channel = ControlChannel(types.SimpleNamespace(Improbe=probe))
    assert list(channel.receive()) == [(2, third)]


def _receive(body, data, whole):
    body[:] = np.frombuffer(data, np.uint8)
    return types.SimpleNamespace(Test=lambda: whole)
