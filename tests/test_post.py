"""Control messages, on every rank of a real MPI job of any size."""

import types

import numpy as np
import pytest
from mpi4py import MPI

from adam_mpi import config
from adam_mpi.cluster.control_channel import ControlChannel
from adam_mpi.cluster.world import World

pytestmark = pytest.mark.mpi
SECONDS = 30


@pytest.fixture
def world():
    world = World(MPI.COMM_WORLD, config.load())
    yield world
    world.finish()


def test_many_messages_from_everybody_to_everybody_keep_their_order(world):
    channel, count = ControlChannel(world.control), 200
    everybody = range(world.comm.size)
    for number in range(count):
        for rank in everybody:
            channel.send({"number": number, "from": world.rank, "to": rank}, rank)
    heard = {rank: [] for rank in everybody}

    def all_heard():
        for source, message in channel.receive():
            assert (message["from"], message["to"]) == (source, world.rank)
            heard[source].append(message["number"])
        return all(len(numbers) >= count for numbers in heard.values())

    world.wait(all_heard, f"{count} messages of each rank", SECONDS)
    world.wait(lambda: channel.idle, "the own messages to leave", SECONDS)
    assert all(numbers == list(range(count)) for numbers in heard.values())


def test_sizes_mix_and_words_survive(world):
    channel, to = ControlChannel(world.control), (world.rank + 1) % world.comm.size
    messages = [{"text": "ü" * length, "half": 0.5, "none": None} for length in (0, 70_000, 3, 300_000, 1)]
    for message in messages:
        channel.send(message, to)
    heard = []

    def all_heard():
        heard.extend(message for _, message in channel.receive())
        return len(heard) == len(messages)

    world.wait(all_heard, "five messages of the rank before", SECONDS)
    assert heard == messages
    world.wait(lambda: channel.idle, "the own messages to leave", SECONDS)


def test_without_messages_nothing_is_received(world):
    channel = ControlChannel(world.control)
    assert list(channel.receive()) == [] and channel.idle


def test_a_sender_who_is_stuck_keeps_nobody_else_back():
    """Two messages of rank 1, the first of which never arrives whole, then one of rank 2."""
    bodies = [(1, b'{"number": 1}', False), (1, b'{"number": 2}', True), (2, b'{"number": 3}', True)]
    waiting = iter(bodies)

    def probe(status):
        source, text, whole = next(waiting, (0, b"", None))
        if whole is None:
            return None
        status.source = source
        status.Set_elements(MPI.BYTE, len(text))
        return types.SimpleNamespace(Irecv=lambda body: _receive(body, text, whole))

    channel = ControlChannel(types.SimpleNamespace(Improbe=probe))
    assert list(channel.receive()) == [(2, {"number": 3})]


def _receive(body, text, whole):
    body[:] = np.frombuffer(text, np.uint8)
    return types.SimpleNamespace(Test=lambda: whole)
