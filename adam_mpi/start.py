"""The start of a job: what all ranks agree on, kernels compiled once per node, windows, and the roles of this rank."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi import compiling
from adam_mpi.cluster import sentinel
from adam_mpi.cluster.post import Post
from adam_mpi.cluster.windows import WINDOWS
from adam_mpi.cluster.world import World
from adam_mpi.config import Config, to_toml
from adam_mpi.crew import Crew
from adam_mpi.data.serving import DataServer
from adam_mpi.data.sets import Description, describe, open_set
from adam_mpi.errors import UserError
from adam_mpi.head import Head
from adam_mpi.model import parameters
from adam_mpi.model.engine.tuner import tune
from adam_mpi.model.layers import LayerShape
from adam_mpi.observe import rundir
from adam_mpi.plan import check_partitions, model, network, plan_shelves
from adam_mpi.server import store
from adam_mpi.server.protocol import captured_layers, choose, largest_push
from adam_mpi.server.published import Published
from adam_mpi.server.serving import Server
from adam_mpi.worker.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What all ranks agree on before they start: made by rank 0, the same everywhere."""

    config: Config
    directory: Path
    description: Description
    shapes: tuple[LayerShape, ...]
    snapshot: tuple[Path, int] | None
    kernels: dict | None
    """How convolutions are computed, where arithmetic does not decide: the same on every rank, and after a resume."""


def prepare(config: Config, directory: str | None, resume: bool) -> Job:
    """Everything that can be wrong with what was given shows here, on rank 0, before any work."""
    description = describe(config.data)
    shapes = model(config, description)
    check_partitions(config.layout.partitions, shapes)
    if config.layout.partitions > 1:
        raise UserError(f"layout.partitions = {config.layout.partitions}: training in strips is not there yet; set 1")
    path = rundir.choose(config, directory, resume)
    for stale in (path / "log" / "failure.txt", path / "DONE"):
        stale.unlink(missing_ok=True)
    (path / "config.toml").write_text(to_toml(config))
    snapshot = rundir.newest_snapshot(path) if resume else None
    return Job(config, path, description, shapes, snapshot, _kernels(config, shapes, path / "kernels.json"))


def _kernels(config: Config, shapes: tuple[LayerShape, ...], path: Path) -> dict | None:
    """The choices of the run so far; else those of the tuner, where it is wanted."""
    if path.exists():
        return json.loads(path.read_text())
    if config.kernels.engine != "generated" or not config.kernels.tune:
        return None
    choices = tune(shapes)
    rundir.write_json(path, choices)
    return choices


def connect_sentinel(world: World, failure_file: Path) -> sentinel.Wire:
    path = sentinel.start(failure_file, world.node.size) if world.node.rank == 0 else None
    return sentinel.Wire(world.node.bcast(path), str(world.place))


def crew(world: World, job: Job) -> Crew:
    """Collective: windows for everybody, then the roles that this rank has."""
    world.injector.announce()
    world.injector.at("start")
    threads = _threads(world)
    log.info("cores %d, trainer threads %d", len(_cores()), threads)
    plan = plan_shelves(job.config, job.shapes, world.layout)
    choices = choose(plan, job.config, largest_push(job.config), len(set(world.hosts)))
    roles, post, rank = world.place.roles, Post(world.control), world.rank
    captured = captured_layers(choices)
    net = network(job.config, job.description, job.shapes, captured, job.kernels) if "worker" in roles else None
    compiling.compile_once(world, net)
    kind, serves = WINDOWS[job.config.cluster.transport], "server" in roles
    mail = kind.to_write(world.comm, world.node, plan.mailbox_bytes if serves else 0)
    window = kind.to_read(world.comm, world.node, plan.published_bytes(rank) if serves else 0)
    made: dict[str, Any] = {}
    head, epochs_done = None, job.snapshot[1] if job.snapshot else 0
    if "data" in roles:
        made["data"] = DataServer(world, open_set(job.config.data), post)
        if rank == world.layout.head:
            head = Head(world, made["data"], post, job.directory, job.shapes, epochs_done)
    if serves:
        published = Published(plan, rank, window.memory)
        directory = job.directory / "snapshots"
        made["server"] = Server(
            world, plan, published, mail, window, post, directory, job.description.train, epochs_done
        )
        made["server"].start(_first_state(job))
    # Workers read weights at once: they must be in place everywhere.
    world.wait(world.comm.Ibarrier().Test, "all ranks to start", compiling.SECONDS)
    if net is not None:
        made["worker"] = Worker(world, net, plan, choices, mail, window, post, threads)
    return Crew(post, made, head, [mail, window])


def _first_state(job: Job) -> dict[str, np.ndarray]:
    """What the servers begin with: the snapshot, or new weights."""
    if job.snapshot is not None:
        return store.read(job.snapshot[0], parameters.total(job.shapes))
    return {"weights": parameters.initial(job.shapes, job.config.run.seed)}


def _cores() -> frozenset[int]:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _threads(world: World) -> int:
    """Trainer threads of this rank; warns when they are more than its cores."""
    cores = _cores()
    masks = world.node.allgather(cores)
    workers = max(1, world.layout.on_host(world.place.host, "worker"))
    # Ranks bound to cores of their own use those; ranks that may run anywhere share.
    shared = len(cores) // workers if len(set(masks)) == 1 else len(cores)
    threads = world.config.worker.threads or max(1, shared)
    if "worker" in world.place.roles and threads > len(cores):
        log.warning(
            "%d trainer threads on %d cores: start mpirun with --bind-to none, or bind a rank to %d cores, "
            "or set worker.threads = %d", threads, len(cores), threads, len(cores),
        )  # fmt: skip
    return threads
