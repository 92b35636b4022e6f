"""Kernels: chosen once per run, and compiled once per node by the node's first rank of each role."""

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from adam_mpi.base import files
from adam_mpi.base.errors import UserError
from adam_mpi.base.files import file_checksum
from adam_mpi.cluster.world import World
from adam_mpi.config import Config
from adam_mpi.model.engine import tuner
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.network import Network, warm
from adam_mpi.model.partition import Strip
from adam_mpi.optimizer import kernels, rules
from adam_mpi.planning.plan import network
from adam_mpi.runtime.job import Job
from adam_mpi.sharding import message_formats
from adam_mpi.transport import mailbox, shared_memcpy
from adam_mpi.worker import batch_filter, gradient_buffer, thread_weights

SECONDS = 600.0
"""How long ranks wait for the one that compiles."""


def choose_kernels(config: Config, shapes: tuple[LayerShape, ...], path: Path) -> dict | None:
    """Return the algorithms of the convolution kernels that `path` has; without the file choose and write them.

    They are measured by the tuner or follow from arithmetic; None for an engine without a choice.
    """
    if path.exists():
        return _read_choices(path, shapes)
    if config.kernels.engine != "generated":
        return None
    choices = tuner.tune(shapes) if config.kernels.tune else tuner.fixed(shapes)
    files.write_json(path, choices)
    return choices


def _read_choices(path: Path, shapes: tuple[LayerShape, ...]) -> dict:
    """Return the kernel choices in `path`; raise UserError for what the tuner cannot have written."""
    try:
        choices = json.loads(path.read_text())
        wrong = tuner.check(choices, shapes)
    except (OSError, ValueError) as error:
        wrong = str(error)
    if wrong:
        raise UserError(f"{path}: {wrong}; remove the file to have kernels chosen again")
    return choices


def make_network(job: Job, strip: Strip | None, captured: Sequence[str]) -> Network:
    """Return the network to compile of the whole model, or of `strip`; layers of `captured` push factors.

    The choices of the run are for whole layers: those of a strip follow from arithmetic.
    """
    if strip is None:
        return network(job.config, job.description, job.shapes, captured, job.kernels)
    return network(job.config, job.description, strip.shapes, captured, strip=strip)


def compile_once(world: World, net: Network | None) -> None:
    """Compile the kernels of this rank's roles, `net` for a worker; collective over the node."""
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
    """Load the kernels of `roles`, which this rank takes on while the job runs; `net` is for a worker."""
    for role in roles:
        if role != "data":
            _warm(role, net)


def _turns(world: World) -> tuple[list[str], list[str]]:
    """Return the roles whose kernels this rank compiles as the node's first rank of the role, and its other roles.

    Each strip of a replica has kernels of its own.
    """
    places = [place for place in world.layout.places if place.host == world.place.host]
    roles: list[str] = [role for role in ("worker", "server") if role in world.place.roles]
    same_kernels = {"worker": [place for place in places if place.strip == world.place.strip], "server": places}
    firsts = {role: min(place.rank for place in same_kernels[role] if role in place.roles) for role in roles}
    first = [role for role in roles if firsts[role] == world.rank]
    others = [role for role in roles if firsts[role] != world.rank]
    return first, others


def _warm(role: str, net: Network | None) -> None:
    """Compile the kernels of `role`, or load them from the cache, by calling each of them with little data."""
    message = np.zeros(message_formats.message_words(2, 1), np.uint32)
    for copy in shared_memcpy.WAYS:
        copy(message, message)
    if role == "server":
        _warm_server(message)
    else:
        assert net is not None, "a worker has a network"
        _warm_worker(message, net)


def _warm_server(message: np.ndarray) -> None:
    """Compile or load the kernels of a server by calling each of them with little data."""
    values = np.zeros(2, np.float32)
    lines = np.zeros((2, 2), np.int64)
    no_steps = np.zeros((0, 4), np.int64)
    starts = np.zeros(1, np.int64)
    mailbox.finite(message)
    mailbox.arrived(message, 1, message.size, np.zeros(1, np.int64), lines[:, 0], np.zeros(1, bool))
    file_checksum(values)
    kernels.fold(values, values, starts, values[:1])
    no_rows = np.zeros((0, rules.WIDTH), np.float32)
    kernels.steps(0, no_steps, values, starts[:0], starts[:0], values[:0], starts[:0], no_rows)


def _warm_worker(message: np.ndarray, net: Network) -> None:
    """Compile or load the kernels of a worker on `net` by calling each of them with little data."""
    values = np.zeros(2, np.float32)
    one = np.float32(1)
    ranges = np.zeros((1, 2), np.int64)
    if net.program and net.strip:
        net.strip_context()
    elif net.generated:
        net.context(values)
    else:
        warm(net.shapes)
    mailbox.seal(message, np.zeros((), message_formats.HEADER), np.zeros(1, np.int64))
    mailbox.write_checksum(message)
    thread_weights.apply_fused(values, values, values, ranges, one, one)
    thread_weights.take(values, values, values, ranges)
    thread_weights.step_copy(values, values, values, ranges, one)
    thread_weights.add_gradient(values, values, True)
    batch_filter.squared_norm(values, ranges)
    batch_filter.multiply(values, ranges, one)
    batch_filter.add_velocity(values, values, ranges, one, one)
    gradient_buffer.add_scaled(values, values, one)
    gradient_buffer.renew(values, values, values.reshape(1, 2), np.zeros(1, np.int64), one)
