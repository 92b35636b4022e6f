"""What the roles of a rank are made from in one generation: memory layout, kernels, windows, trainer threads."""

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adam_mpi.checkpoint import model_file
from adam_mpi.checkpoint import resume as resume_points
from adam_mpi.cluster.world import World
from adam_mpi.config import Config
from adam_mpi.model import parameters
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.network import Network
from adam_mpi.model.partition import partition
from adam_mpi.planning.plan import plan_memory_layout
from adam_mpi.runtime import compile
from adam_mpi.runtime.job import Job
from adam_mpi.runtime.recovery import RecoveryPlan
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.memory_layout import WorkerShards
from adam_mpi.sharding.push_protocol import captured_layers, choose_protocols, largest_push
from adam_mpi.sharding.shards import Gathered, Spans
from adam_mpi.sharding.training_state import Position
from adam_mpi.transport.generation import Generation

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """What the roles of this rank are made from in one generation."""

    generation: Generation
    job: Job
    threads: int
    recovery: RecoveryPlan | None
    """How the job recovers from the end of the generation before; None in the first generation."""
    network: Network | None
    """What a new worker computes with."""

    @property
    def world(self) -> World:
        """Return the world of the generation that the roles are set up for."""
        return self.generation.world

    @property
    def position(self) -> Position:
        """Return where training stands, as a copy for the setup of each role."""
        if self.recovery is None:
            return initial_position(self.job)
        return Position.unpack(self.recovery.position.pack())

    @property
    def captured(self) -> tuple[str, ...]:
        """Return the layers of the setup that push factors."""
        return tuple(captured_layers(self.generation.choices))


def set_up(world: World, job: Job, plan: RecoveryPlan | None, kept: Collection[str]) -> Setup:
    """Return the setup that the roles are made from: memory layout, kernels and windows; collective.

    `kept` has the roles that this rank keeps from the generation before; the kernels of other roles are loaded.
    """
    config = job.config
    cut = partition(job.shapes, config.layout.partitions, config.layout.scheme)
    memory_layout = plan_memory_layout(config, cut, world.layout, job.replicas, plan.holders if plan else ())
    captured = plan.captured if plan else None
    choices = choose_protocols(memory_layout, config, largest_push(config), len(set(world.hosts)), captured)
    threads = trainer_threads(world)
    new = [role for role in world.place.roles if role not in kept]
    network = None
    if "worker" in new:
        strip = cut.strips[world.place.strip or 0] if len(cut) > 1 else None
        network = compile.make_network(job, strip, captured_layers(choices))
    if plan is None:
        compile.compile_once(world, network)
    else:
        compile.compile_now(new, network)
    generation = Generation.open(world, memory_layout, choices)
    return Setup(generation=generation, job=job, threads=threads, recovery=plan, network=network)


def available_cores() -> frozenset[int]:
    """Return the cores that this process may use for trainer threads."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def trainer_threads(world: World) -> int:
    """Return the number of trainer threads of this rank; warn when it has fewer cores."""
    cores = available_cores()
    threads, _ = count_threads(world)
    if "worker" in world.place.roles and threads > len(cores):
        log.warning(
            "%d trainer threads on %d cores: start mpirun with --bind-to none, or bind a rank to %d cores, "
            "or set worker.threads = %d",
            threads,
            len(cores),
            threads,
            len(cores),
        )
    return threads


def count_threads(world: World) -> tuple[int, bool]:
    """Return the trainer threads of this rank, and whether those of its node are more than the cores that they share.

    Collective over the node in the first generation.
    """
    cores = available_cores()
    # A rank that becomes a worker in a later generation does not ask the others.
    masks = world.node.allgather(cores) if world.generation == 0 else [cores]
    # Ranks that are bound to cores of their own use them all; ranks that may run anywhere share them.
    shared = len(set(masks)) == 1
    workers = max(1, world.layout.count_on_host(world.place.host, "worker")) if shared else 1
    threads = world.config.worker.threads or max(1, len(cores) // workers)
    return threads, threads * workers > len(cores)


def initial_state(job: Job, spans: Sequence[tuple[int, int]]) -> Gathered:
    """Return the initial state of a server with `spans` of the flat vector: the resumed one, or new weights."""
    if job.resume is not None:
        return resume_points.read_state(job.resume, parameters.total(job.shapes), spans)
    if job.config.inject.conserve:
        return {"weights": Spans(spans)}
    return {"weights": initial_weights(job.config, job.shapes, spans)}


def initial_weights(config: Config, shapes: tuple[LayerShape, ...], spans: Sequence[tuple[int, int]]) -> Spans:
    """Return the `spans` of the weights of `model.weights`, or of weights drawn with the seed of the run."""
    weights = Spans(spans)
    if config.model.weights:
        pieces = model_file.model_pieces(Path(config.model.weights), parameters.tensors(shapes), spans=spans)
    else:
        pieces = parameters.drawn(shapes, config.run.seed)
    for start, values in pieces:
        weights.put(start, values.reshape(-1))
    return weights


def initial_residual(world: World, job: Job, shards: WorkerShards) -> Spans | None:
    """Return the resumed residual of our replica's codec for pushes of `shards`; None without a snapshot."""
    if job.resume is None or not CODECS[job.config.push.codec].feedback:
        return None
    spans = [(shard.start, shard.stop) for pushed in shards.pushed.values() for shard in pushed]
    return resume_points.read_residual(job.resume, world.place.replica or 0, world.layout.replicas, spans)


def initial_position(job: Job) -> Position:
    """Return the position where training starts, with room for the batches of an epoch."""
    # Uneven shares make a few batches more than even ones: at most one for each replica.
    room = -(-job.description.train // job.config.train.batch) + job.replicas
    position = Position(room)
    if job.resume is not None:
        known = job.resume.position
        position.epoch = known.epoch
        position.images = known.images
        position.clock = known.clock
        position.lasted = known.lasted
        count = min(room, known.batches.size)
        position.batches[:count] = known.batches[:count]
    return position


def attempt_folder(job: Job, generation: int) -> Path:
    """Return the folder of the stores of `generation`, and make it: servers hold other shards in each generation."""
    folder = job.attempt.with_name(f"{int(job.attempt.name) + generation:04d}")
    # A folder that cannot be made is reported when the store is written.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
