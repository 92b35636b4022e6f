"""The start of a job: what all ranks agree on, kernels compiled once per node, windows, and the roles of this rank."""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from adam_mpi import config as configuration
from adam_mpi.base import files
from adam_mpi.base.errors import LostState, UserError
from adam_mpi.base.log import say
from adam_mpi.checkpoint import identity, model_file, run_directory, snapshot, stores
from adam_mpi.checkpoint import owner as ownership
from adam_mpi.checkpoint import resume as newest
from adam_mpi.checkpoint.identity import Identity
from adam_mpi.checkpoint.owner import Owner, Process
from adam_mpi.checkpoint.resume import Resume
from adam_mpi.checkpoint.stores import Seen
from adam_mpi.cluster import fence, sentinel
from adam_mpi.cluster.messages import Statistics
from adam_mpi.cluster.spares import JoinPackage
from adam_mpi.cluster.world import World, gather
from adam_mpi.config import Config, Given, to_toml
from adam_mpi.data.served_phase import Resumed, ServedData
from adam_mpi.data.server import DataServer
from adam_mpi.data.sets import DataSet, Description, describe, open_set
from adam_mpi.model import parameters
from adam_mpi.model.engine import tuner
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.network import Network
from adam_mpi.model.partition import Strip, partition
from adam_mpi.monitor import metrics
from adam_mpi.planning.plan import check_memory, model, network, partitions, plan_memory_layout
from adam_mpi.runtime import compile
from adam_mpi.runtime.coordinator import Coordinator
from adam_mpi.runtime.job import Job
from adam_mpi.runtime.rank_runtime import RankRuntime
from adam_mpi.runtime.recovery import RecoveryPlan, plan_recovery
from adam_mpi.server.server import Server
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.joint_batches import Cuts, first_cuts
from adam_mpi.sharding.memory_layout import cut_for
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.push_protocol import captured_layers, choose, largest_push
from adam_mpi.sharding.spans import Spans
from adam_mpi.sharding.worker_shards import WorkerShards
from adam_mpi.transport.conservation import Conservation
from adam_mpi.transport.generation import Generation
from adam_mpi.worker.strip_worker import StripWorker
from adam_mpi.worker.worker import Worker

SWITCH_SECONDS, GRACE_SECONDS = 0.0005, 10.0
log = logging.getLogger(__name__)


def configure(given: Given, overrides: Sequence[str], ranks: int) -> Config:
    """The configuration, with what it leaves to the program decided for so many ranks."""
    config = configuration.load(given, overrides)
    if not config.layout.partitions:
        config.layout.partitions = partitions(config, model(config, describe(config.data)), ranks)
    return config


@dataclass(frozen=True)
class Entry:
    """What all ranks know before anything of a run is read: where it is, which it is, and that this job has it."""

    directory: Path
    identity: Identity
    owner: Owner
    description: Description
    shapes: tuple[LayerShape, ...]


def enter(
    config: Config, directory: str | None, resume: bool, world: World, processes: Sequence[Process], take_over: bool
) -> Entry:
    """Refuse on rank 0, before any work, what cannot work; then make the run directory, and take it for this job."""
    description = describe(config.data)
    shapes = model(config, description)
    partition(shapes, config.layout.partitions, config.layout.scheme)
    check_memory(_with_copies(config, world), description, shapes, world.layout, world.survivable)
    if config.model.weights:
        _first_weights(config, shapes, ())
    if config.observe.tensorboard:
        metrics.check()
    _check_numbers(config)
    path = run_directory.choose(config, directory, resume)
    owner, note = ownership.take(path, processes, take_over)
    try:
        if note:
            print(f"adam_mpi: run directory {path}: {note}", file=sys.stderr, flush=True)
            # Who had it so far may live; it is to find out before anything changes.
            time.sleep(ownership.NOTICE_SECONDS if take_over else 0.0)
        return Entry(path, identity.of(path), owner, description, shapes)
    except BaseException as error:
        owner.release()
        if not isinstance(error, OSError):
            raise
        raise UserError(f"run directory {path}: {error.strerror}; make room, or give another with --run DIR") from None


def prepare(config: Config, entry: Entry, resume: bool, world: World, minutes: float, seen: Seen) -> Job:
    """What all ranks agree on, made by rank 0; what a run of before has left is looked through, or cleared away.

    `minutes`: how long the job may take; `seen`: the stores of the run.
    """
    until, description, shapes = time.time() + 60 * minutes, entry.description, entry.shapes
    path, replicas = entry.directory, world.layout.replicas
    found = _find(config, entry, replicas, seen) if resume else None
    fence.clear(path / "log")
    marks = (path / "log" / "failure.txt", path / "DONE", path / "STOPPED", path / "STOP")
    for stale in (*marks, path / "log" / sentinel.ORDERS, *path.glob("log/watched-*.txt")):
        stale.unlink(missing_ok=True)
    files.write_text(path / "config.toml", to_toml(config))
    kernels = _kernels(config, shapes, path / "kernels.json")
    life = _new_life(config, entry, replicas, seen)
    return Job(config, path, description, shapes, found, kernels, life, replicas, until, entry.identity, entry.owner)


def _check_numbers(config: Config) -> None:
    """What is evaluated is read late: a NaN in it must not show after days of training."""
    held = open_set(config.data)
    for part in ("validation", *(["test"] if config.train.test else [])):
        held.check(part, lambda text: print(f"adam_mpi: {text}", file=sys.stderr, flush=True))


def _find(config: Config, entry: Entry, replicas: int, seen: Seen) -> Resume | None:
    """What to go on from; what is not whole is named."""
    path = entry.directory
    snapshot.restore(path / "snapshots")
    found, passed_over = newest.find(config, path, seen)
    for trouble in passed_over:
        print(f"adam_mpi: passed over: {trouble}", file=sys.stderr, flush=True)
    if found is None:
        return None
    if note := newest.check(found, config, replicas, parameters.total(entry.shapes)):
        print(f"adam_mpi: {note}", file=sys.stderr, flush=True)
    # A store knows by itself what was acknowledged and is not in it.
    return found if found.kind == "store" else replace(found, note=found.note + newest.cost(found, path, config))


def _new_life(config: Config, entry: Entry, replicas: int, seen: Seen) -> Path:
    """The folder of this job's stores, with what is to be known about them."""
    life = newest.next_life(stores.folder(config, entry.directory, entry.identity), seen)
    if keeps_store(config):
        with suppress(OSError):
            newest.describe_store(life, config, replicas, parameters.total(entry.shapes), entry.identity)
    return life


def _with_copies(config: Config, world: World) -> Config:
    """Where a lost rank ends the job, other copies of its shards would only cost."""
    return config if world.survivable else replace(config, server=replace(config.server, copies=1))


def settle_here(world: World, job: Job) -> Job:
    """Collective: what of the job depends on the node: where its stores are, and what lies on the disks of others."""
    place, resume = stores.folder(job.config, job.directory, job.identity), job.resume
    job.config.server.copies = world.config.server.copies = _with_copies(job.config, world).server.copies
    if resume is not None:
        resume = newest.share(resume, world.comm, place, _held(world, job))
    return replace(job, life=place / job.life.name, resume=resume)


def _held(world: World, job: Job) -> list[tuple[int, int]]:
    """What this rank holds of the flat vector as a server."""
    cut = partition(job.shapes, job.config.layout.partitions, job.config.layout.scheme)
    plan = plan_memory_layout(job.config, cut, world.layout, job.replicas)
    shards = (*plan.held.get(world.rank, ()), *plan.copied.get(world.rank, ()))
    return [(shard.start, shard.stop) for shard in shards]


def keeps_store(config: Config) -> bool:
    """With clocks only a snapshot is of use: the store is of no one clock."""
    return config.asynchronous and config.store.interval > 0


def _kernels(config: Config, shapes: tuple[LayerShape, ...], path: Path) -> dict | None:
    """The choices of the run so far; else those of the tuner, where it is wanted, or of arithmetic."""
    if path.exists():
        return _kept_kernels(path, shapes)
    if config.kernels.engine != "generated":
        return None
    choices = tuner.tune(shapes) if config.kernels.tune else tuner.fixed(shapes)
    files.write_json(path, choices)
    return choices


def _kept_kernels(path: Path, shapes: tuple[LayerShape, ...]) -> dict:
    """They become source, and may come from anybody: what the tuner could not have written is refused."""
    try:
        kept = json.loads(path.read_text())
        wrong = tuner.check(kept, shapes)
    except (OSError, ValueError) as error:
        wrong = str(error)
    if wrong:
        raise UserError(f"{path}: {wrong}; remove the file to have kernels chosen anew")
    return kept


def connect_sentinel(world: World, failure_file: Path) -> sentinel.SentinelConnection:
    """Collective over a node at the start of a job: its ranks connect to a new sentinel."""
    path = _start_sentinel(world, failure_file, world.node.size) if world.node.rank == 0 else None
    world.sentinel = world.node.bcast(path)
    return sentinel.SentinelConnection(world.sentinel, str(world.place))


def join_sentinel(world: World, failure_file: Path) -> sentinel.SentinelConnection:
    """Of a rank that joins a running job: connect to the sentinel of its host, or to a new one where there is none."""
    if world.sentinel is not None:
        with suppress(OSError):
            return sentinel.SentinelConnection(world.sentinel, str(world.place))
    world.sentinel = _start_sentinel(world, failure_file, 1)
    return sentinel.SentinelConnection(world.sentinel, str(world.place))


def _start_sentinel(world: World, failure_file: Path, ranks: int) -> str:
    # The ranks themselves give up after `recover.seconds`, if they can.
    limits = world.config.cluster.stopped, world.config.recover.seconds + GRACE_SECONDS
    elsewhere = world.comm.size > ranks
    return sentinel.start(failure_file, ranks, world.survivable, *limits, elsewhere, world.place.host)


@dataclass(frozen=True)
class Setup:
    """What the roles of this rank are made from in one generation."""

    generation: Generation
    job: Job
    threads: int
    settled: RecoveryPlan | None
    """How the job recovers from the end of the generation before; None in the first generation."""

    @property
    def world(self) -> World:
        return self.generation.world

    @property
    def position(self) -> Position:
        """A copy for each role."""
        if self.settled is None:
            return _position(self.job)
        return Position.unpack(self.settled.position.pack())


def crew(world: World, job: Job, kept: RankRuntime | None = None) -> RankRuntime:
    """Collective: windows for everybody, then the roles of this rank, new or `kept` from the generation before."""
    if kept is None:
        world.injector.announce()
        world.injector.at("start")
    made: dict[str, Any] = {}
    old, abandoned = (kept.roles, kept.abandon()) if kept else ({}, [])
    pusher = old.get("worker")
    settled = None if kept is None else _settle(world, job, kept)
    if kept is not None and settled is not None:
        _stay_owner(world, job)
        # Before anything is changed by it: another loss may come on the way.
        kept.cuts = settled.cuts
    pushed = _retire(world, kept, settled) if kept is not None and settled is not None else (0, 0, 0.0)
    ground, net = _ground(world, job, settled, kept)
    roles, head = world.place.roles, None
    if settled is not None and world.rank == world.layout.head:
        members = [place.member for place in world.layout.places]
        try:
            fence.claim(job.directory / "log", world.generation, members)
        except OSError as error:
            say(f"warning: {job.directory}: {error.strerror}; generation {world.generation} goes on without its file")
        if keeps_store(job.config):
            with suppress(OSError):
                total = parameters.total(job.shapes)
                now = life(job, world.generation)
                newest.describe_store(now, job.config, job.replicas, total, job.identity)
    if "data" in roles:
        made["data"] = _data(ground, old.get("data"), kept.data if kept else None)
        if world.rank == world.layout.head:
            head = Coordinator(ground.generation, made["data"], job, settled, kept.head if kept else None)
    if "server" in roles:
        made["server"] = _server(ground, old.get("server"))
    # Workers read weights at once: they must be in place everywhere.
    world.wait(world.comm.Ibarrier().Test, "all ranks to start", compile.SECONDS)
    if world.layout.partitions > 1:
        # The strips of each replica make a window of theirs.
        world.agree()
    if "worker" in roles:
        made["worker"] = _worker(ground, net, old.get("worker"), pushed)
    world.begun = True
    windows = ground.generation.windows
    if isinstance(worker := made.get("worker"), StripWorker):
        windows.append(worker.link.window)
    factors = tuple(captured_layers(ground.generation.choices))
    crew = RankRuntime(
        ground.generation.channel, made, head, windows, settled.head if settled else None, captured=factors
    )
    crew.abandoned, crew.pushed, crew.cuts = abandoned, pushed, _cuts(ground)
    crew.spares = world.spares
    crew.spares.enter(JoinPackage(job, factors))
    if pusher is not None and "worker" not in made:
        # Its last word: it pushes no more.
        crew.channel.send(Statistics(pusher.stats()), world.layout.head)
    return crew


def _stay_owner(world: World, job: Job) -> None:
    """Collective: nobody begins a generation in a directory that another job has; the head tells who the job is now."""
    processes = gather(world.comm, ownership.process())
    job.owner.check()
    if world.rank == world.layout.head:
        job.owner.enter(processes)


def _cuts(ground: Setup) -> Cuts | None:
    """With clocks: how batches that all replicas compute together are cut."""
    layout, position = ground.world.layout, ground.position
    if ground.settled is not None or ground.job.config.asynchronous:
        return ground.settled.cuts if ground.settled is not None else None
    replicas = {layout.places[rank].member: layout.places[rank].replica or 0 for rank in layout.workers}
    return first_cuts(position.batches, position.epoch, replicas)


def get_ready(job: Job, captured: Sequence[str]) -> DataSet:
    """What a rank that stands by can do before it has a role: load the kernels of all, and open the data set."""
    cut = partition(job.shapes, job.config.layout.partitions, job.config.layout.scheme)
    for strip in cut.strips if len(cut) > 1 else (None,):
        compile.compile_now(["worker", "server"], _network(job, strip, captured))
    return open_set(job.config.data)


def _network(job: Job, strip: Strip | None, captured: Sequence[str]) -> Network:
    """Of the whole model or of a strip; choices of the run are for whole layers, a strip's are made by arithmetic."""
    shapes, kernels = (strip.shapes, None) if strip else (job.shapes, job.kernels)
    return network(job.config, job.description, shapes, captured, kernels, strip)


def _retire(world: World, kept: RankRuntime, settled: RecoveryPlan) -> tuple[int, int, float]:
    """A worker that has another strip from now on, or none, is not kept; the numbers of its pushes are."""
    worker = kept.roles.get("worker")
    if isinstance(worker, StripWorker):
        worker.taken = settled.taken.get(world.place.member, {})
    if isinstance(worker, StripWorker) and worker.strip.number != world.place.strip:
        worker.retire(settled.clock)
        del kept.roles["worker"]
        return worker.pushes.sent, worker.pushes.settled, worker.left_behind
    return kept.pushed


def _settle(world: World, job: Job, kept: RankRuntime) -> RecoveryPlan:
    states = gather(world.comm, kept.export_state(world.place.member))
    cut = partition(job.shapes, job.config.layout.partitions, job.config.layout.scheme)
    gone = "; ".join(f"{place} died" for place in world.gone)
    shards = cut_for(parameters.tensors(job.shapes), job.replicas * world.layout.partitions, job.config, cut)
    try:
        return plan_recovery(states, world.layout, shards, job.config.server.copies, job.config.consistency.staleness)
    except LostState as loss:
        raise LostState(f"{gone}; {loss}; the job ends: --resume goes on from what is stored") from None


def _ground(
    world: World, job: Job, settled: RecoveryPlan | None, kept: RankRuntime | None
) -> tuple[Setup, Network | None]:
    """Collective: plan, kernels where they are new, windows."""
    roles, config = world.place.roles, job.config
    cut = partition(job.shapes, config.layout.partitions, config.layout.scheme)
    plan = plan_memory_layout(config, cut, world.layout, job.replicas, settled.holders if settled else ())
    captured = settled.captured if settled else None
    choices = choose(plan, config, largest_push(config), len(set(world.hosts)), captured)
    threads = _threads(world)
    net, new = None, [role for role in roles if kept is None or role not in kept.roles]
    if "worker" in new:
        strip = cut.strips[world.place.strip or 0] if len(cut) > 1 else None
        net = _network(job, strip, captured_layers(choices))
    compile.compile_once(world, net) if kept is None else compile.compile_now(new, net)
    return Setup(Generation.open(world, plan, choices), job, threads, settled), net


def _data(ground: Setup, kept: DataServer | None, opened: DataSet | None) -> DataServer:
    """Return a data server for this generation; what `kept` serves throughout the job is taken over."""
    job, settled = ground.job, ground.settled
    served = kept.served if kept else ServedData(opened or open_set(job.config.data), job.config, job.replicas)
    resumed = Resumed(ground.position)
    if settled is not None:
        resumed = Resumed(ground.position, frozenset(settled.out), settled.mean, settled.left)
    return DataServer(ground.world, ground.generation.channel, served, resumed)


def _server(ground: Setup, kept: Server | None) -> Server:
    world, settled, job = ground.world, ground.settled, ground.job
    plan = ground.generation.memory_layout
    if kept is None:
        kept = Server(ground.generation, job.description.train, ground.position)
        # A thread that writes wants the interpreter often and briefly; it should not wait 5 ms each time.
        sys.setswitchinterval(SWITCH_SECONDS)
    if settled is None:
        kept.start(_first_state(job, [(h.shard.start, h.shard.stop) for h in kept.holdings.values()]))
    else:
        kept.discard([shard for rank, shard in settled.stale if rank == world.rank])
        kept.go_back(ground.position, settled.version, max(settled.clocks.values()))
        kept.enter(ground.generation, settled.clocks, settled.lacking, settled.acknowledged)
        # A snapshot takes in all that is sent again: shards may have it already.
        kept.cut.begun = [settled.begun[member] for member in kept.push_queue.members]
    if keeps_store(job.config) and plan.held[world.rank]:
        folder = life(job, world.generation)
        forget = partial(stores.forget, folder, job.identity, job.owner)
        kept.write_behind(folder / snapshot.file_name(world.place.member), forget)
    return kept


def _worker(ground: Setup, net: Network | None, kept: Worker | None, pushed: tuple[int, int, float]) -> Worker:
    """`pushed`: this rank's pushes as another worker before; see RankRuntime."""
    settled, world = ground.settled, ground.world
    if kept is not None:
        assert settled is not None
        strips = world.layout.partitions > 1
        kept.cut_by(settled.cuts)
        kept.enter(ground.generation, settled.clocks[world.place.member] if strips else settled.clock)
        return kept
    assert net is not None, "compiled above"
    log.info("cores %d, trainer threads %d", len(_cores()), ground.threads)
    scheme = ground.job.config.layout.scheme
    cut = (
        partition(ground.job.shapes, ground.generation.memory_layout.strips, scheme) if net.strip is not None else None
    )
    holding = WorkerShards(ground.generation.memory_layout, cut, world.place.strip or 0)
    carried = _carried(world, ground.job, holding) if settled is None else None
    if cut is not None:
        worker: Worker = StripWorker(ground.generation, net, ground.threads, carried, cut)
    else:
        worker = Worker(ground.generation, net, ground.threads, carried)
    if settled is not None:
        worker.pushes.sent, worker.pushes.settled, worker.left_behind = pushed
        worker.pushes.clock = settled.clocks[world.place.member]
    worker.cut_by(_cuts(ground))
    if ground.job.config.inject.conserve:
        directory, batch = ground.job.directory, ground.job.config.train.batch
        worker.conservation = worker.pushes.conservation = Conservation(directory, world.place.member, batch)
        residual = worker.pushes.residual
        if residual.values.size:
            worker.conservation.unsettle(residual.shards, residual.parts)
    return worker


def life(job: Job, generation: int) -> Path:
    """Where the stores of a generation go: servers hold other shards in the next."""
    folder = job.life.with_name(f"{int(job.life.name) + generation:04d}")
    # What is wrong with it shows when the store is written.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _first_state(job: Job, spans: Sequence[tuple[int, int]]) -> dict[str, Spans]:
    """What a server with these spans of the flat vector begins with: the snapshot, or new weights."""
    if job.resume is not None:
        return newest.state(job.resume, parameters.total(job.shapes), spans)
    if job.config.inject.conserve:
        return {"weights": Spans(spans)}
    return {"weights": _first_weights(job.config, job.shapes, spans)}


def _first_weights(config: Config, shapes: tuple[LayerShape, ...], spans: Sequence[tuple[int, int]]) -> Spans:
    weights = Spans(spans)
    if config.model.weights:
        pieces = model_file.pieces(Path(config.model.weights), parameters.tensors(shapes), spans=spans)
    else:
        pieces = parameters.drawn(shapes, config.run.seed)
    for start, values in pieces:
        weights.put(start, values.reshape(-1))
    return weights


def _carried(world: World, job: Job, holding: WorkerShards) -> Spans | None:
    """What the codec of our replica's pushes had left out of what we push when the snapshot was taken."""
    if job.resume is None or not CODECS[job.config.push.codec].feedback:
        return None
    spans = [(shard.start, shard.stop) for shards in holding.pushed.values() for shard in shards]
    return newest.residual(job.resume, world.place.replica or 0, world.layout.replicas, spans)


def _position(job: Job) -> Position:
    """Where training stands, with room for the batches of an epoch; uneven shares make a few more than even ones."""
    room = -(-job.description.train // job.config.train.batch) + job.replicas
    position = Position(room)
    if job.resume is not None:
        known = job.resume.position
        position.epoch, position.images, position.clock = known.epoch, known.images, known.clock
        count = min(room, known.batches.size)
        position.batches[:count] = known.batches[:count]
    return position


def _cores() -> frozenset[int]:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _threads(world: World) -> int:
    """Trainer threads of this rank; warns when they are more than its cores."""
    cores = _cores()
    # A rank that becomes a worker later asks nobody.
    masks = world.node.allgather(cores) if world.generation == 0 else [cores]
    workers = max(1, world.layout.on_host(world.place.host, "worker"))
    # Ranks bound to cores of their own use those; ranks that may run anywhere share.
    shared = len(cores) // workers if len(set(masks)) == 1 else len(cores)
    threads = world.config.worker.threads or max(1, shared)
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
