"""Kernels compiled once per node: a node's first rank of each role compiles what the role needs, others load it."""

import threading
from collections.abc import Iterable

import numpy as np

from adam_mpi.base.checksum import checksum
from adam_mpi.cluster.world import World
from adam_mpi.model.network import Network, warm
from adam_mpi.server import apply_kernels
from adam_mpi.sharding import message_format
from adam_mpi.transport import mailbox, shared_memcpy
from adam_mpi.worker import gradient_buffer, thread_weights

SECONDS = 600.0


def compile_once(world: World, net: Network | None) -> None:
    """Collective over the node. `net` is what a worker computes with."""
    notice = threading.Timer(2.0, print, ["compiling kernels, once per machine ..."], {"flush": True})
    notice.daemon = True
    if world.rank == 0:
        notice.start()
    first, others = _turns(world)
    for role in first:
        _warm(role, net)
    world.wait(world.node.Ibarrier().Test, "the first ranks of the node to compile", SECONDS)
    for role in others:
        _warm(role, net)
    notice.cancel()


def compile_now(roles: Iterable[str], net: Network | None) -> None:
    """What a rank needs for roles that it takes on while the job runs."""
    for role in roles:
        if role != "data":
            _warm(role, net)


def _turns(world: World) -> tuple[list[str], list[str]]:
    """The roles of this rank that have kernels: those it is the node's first rank of, and the others.

    Each strip of a replica has kernels of its own.
    """
    places = [place for place in world.layout.places if place.host == world.place.host]
    roles = [role for role in ("worker", "server") if role in world.place.roles]
    alike = {"worker": [p for p in places if p.strip == world.place.strip], "server": places}
    firsts = {role: min(place.rank for place in alike[role] if role in place.roles) for role in roles}
    return [r for r in roles if firsts[r] == world.rank], [r for r in roles if firsts[r] != world.rank]


def _warm(role: str, net: Network | None) -> None:
    values, one, numbers = np.zeros(2, np.float32), np.float32(1), np.zeros((1, 6), np.float32)
    message = np.zeros(message_format.message_words(2, 1), np.uint32)
    for way in shared_memcpy.WAYS:
        way(message, message)
    if role == "server":
        mailbox.finite(message)
        lines = np.zeros((2, 2), np.int64)
        mailbox.arrived(message, 1, message.size, np.zeros(1, np.int64), lines[:, 0], np.zeros(1, bool))
        checksum(values)
        apply_kernels.fold(values, values, np.zeros(1, np.int64), values[:1])
        none, starts = np.zeros((0, 3), np.int64), np.zeros(1, np.int64)
        apply_kernels.step(apply_kernels.ADDITIVE, values, values, values, starts, values[:1], numbers[0])
        apply_kernels.steps(apply_kernels.ADDITIVE, none, values, starts[:0], starts, values[:1], numbers)
        return
    assert net is not None, "a worker has a network"
    if net.program and net.strip:
        net.strip_context()
    elif net.program:
        net.context(values)
    else:
        warm(net.shapes)
    mailbox.seal(message, np.zeros((), message_format.HEADER), np.zeros(1, np.int64))
    mailbox.sign(message)
    ranges = np.zeros((1, 2), np.int64)
    thread_weights.settle(values, values, values, ranges, one, one)
    thread_weights.take(values, values, values, ranges)
    thread_weights.ahead(values, values, values, ranges, one)
    gradient_buffer.descend(values, values, one)
    gradient_buffer.renew(values, values, values.reshape(1, 2), np.zeros(1, np.int64), one)
