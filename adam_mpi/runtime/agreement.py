"""How all ranks agree on a job: on its configuration, its run directory, and what it resumes from."""

import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from mpi4py import MPI

from adam_mpi import config as configuration
from adam_mpi.base import files
from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import divergences, run_directory, snapshot, stores
from adam_mpi.checkpoint import owner as ownership
from adam_mpi.checkpoint import resume as resume_points
from adam_mpi.checkpoint.owner import Process
from adam_mpi.checkpoint.resume import Resume
from adam_mpi.checkpoint.run_directory import Identity
from adam_mpi.checkpoint.stores import FoundStores
from adam_mpi.cluster import fence, sentinel
from adam_mpi.cluster.world import World, gather
from adam_mpi.config import Config, Given, to_toml
from adam_mpi.data.sets import describe, describe_inputs, open_set
from adam_mpi.model import parameters
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.partition import partition
from adam_mpi.monitor import metrics
from adam_mpi.optimizer.clipping import clips_steps
from adam_mpi.planning import recipe
from adam_mpi.planning.plan import check_memory, model, partitions, plan_memory_layout
from adam_mpi.planning.plan import metrics as metrics_of
from adam_mpi.runtime import compile
from adam_mpi.runtime.job import DONE, FAILURE, STOPPED, ClaimedRun, Job, JobRequest
from adam_mpi.runtime.role_setup import count_threads, initial_weights

T = TypeVar("T")


def agree_on_job(comm: MPI.Comm, request: JobRequest) -> tuple[World, Job]:
    """Return the world of the first generation and the job; collective. Raise UserError on every rank."""
    config = from_first_rank(comm, lambda: configure(request.given, request.overrides, comm.size))
    world = World(comm, config)
    processes = gather(world.comm, ownership.this_process())
    claimed = from_first_rank(comm, lambda: claim_run(config, request, world, processes))
    try:
        if comm.rank == 0:
            # Compiling may take minutes: the claim has to be renewed meanwhile.
            claimed.owner.heartbeat()
        place = stores.folder(config, claimed.directory, claimed.identity)
        seen = stores.find_stores(world.comm, place, claimed.identity, request.resume and config.asynchronous)
        job = from_first_rank(comm, lambda: prepare_job(config, claimed, request, world, seen))
        return world, adapt_to_node(world, job)
    except UserError:
        if comm.rank == 0:
            claimed.owner.release()
        raise


def from_first_rank(comm: MPI.Comm, make: Callable[[], T]) -> T:
    """Return on every rank what `make` returns on rank 0, or raise its UserError on every rank; collective."""
    made: T | UserError | None = None
    if comm.rank == 0:
        try:
            made = make()
        except UserError as error:
            # Subclasses of it cannot all be pickled.
            made = UserError(str(error))
    received: T | UserError = comm.bcast(made)
    if isinstance(received, UserError):
        raise received
    return received


def configure(given: Given, overrides: Sequence[str], ranks: int) -> Config:
    """Return the configuration of the agreed job for `ranks` ranks, with the number of partitions decided."""
    config = configuration.load(given, overrides)
    if not config.layout.partitions:
        config.layout.partitions = partitions(config, model(config, describe(config.data)), ranks)
    return config


def claim_run(config: Config, request: JobRequest, world: World, processes: Sequence[Process]) -> ClaimedRun:
    """Refuse on rank 0 what cannot work, then make the run directory and claim it for this job.

    `processes` are those of all ranks. Raise UserError for a wrong configuration, a directory that cannot be written or
    one that another job has.
    """
    description = describe_inputs(open_set(config.data))
    shapes = model(config, description)
    _check_statistics(config, shapes)
    metrics_of(config, description)
    partition(shapes, config.layout.partitions, config.layout.scheme)
    decided = copy.deepcopy(_with_useful_copies(config, world))
    recipe.decide(decided, world.layout.replicas * (config.worker.threads or 1), crowded=False)
    check_memory(decided, description, shapes, world.layout, world.survivable)
    if config.model.weights:
        initial_weights(config, shapes, ())
    if config.observe.tensorboard:
        metrics.check_tensorboard()
    _check_evaluated_data(config)
    path = run_directory.choose_run_directory(config, request.directory, request.resume)
    owner, note = ownership.claim_run(path, processes, request.take_over)
    try:
        if note:
            print(f"adam_mpi: run directory {path}: {note}", file=sys.stderr, flush=True)
            # The previous owner may be alive: it has to notice before anything in the directory changes.
            time.sleep(ownership.NOTICE_SECONDS if request.take_over else 0.0)
        return ClaimedRun(path, run_directory.load_or_create_identity(path), owner, description, shapes)
    except BaseException as error:
        owner.release()
        if not isinstance(error, OSError):
            raise
        raise UserError(f"run directory {path}: {error.strerror}; make room, or give another with --run DIR") from None


def _check_statistics(config: Config, shapes: tuple[LayerShape, ...]) -> None:
    """Raise UserError if running statistics of the job's model would be changed by what is meant for gradients."""
    found = next((tensor.name for tensor in parameters.tensors(shapes) if tensor.statistic), None)
    if found is None:
        return
    optimizer = config.optimizer
    wrong = {
        f"consistency.staleness = {config.consistency.staleness}": config.consistency.staleness != 0,
        f'push.codec = "{config.push.codec}"': config.push.codec != "none",
        'optimizer.where = "worker"': optimizer.where == "worker",
        "optimizer.clip_norm or clip_tensor": clips_steps(config),
    }
    for setting, given in wrong.items():
        if given:
            raise UserError(
                f"{setting} does not fit the running statistic {found}, averaged in synchronous training only; "
                "set consistency.staleness = 0 without codec, clipping and worker steps, or take group or layer norm"
            )


def _check_evaluated_data(config: Config) -> None:
    """Refuse evaluation data of the job that is not finite: it is read late, and days of training would be lost."""
    data = open_set(config.data)
    for part in ("validation", *(["test"] if config.train.test else [])):
        data.check(part, lambda text: print(f"adam_mpi: {text}", file=sys.stderr, flush=True))


def _with_useful_copies(config: Config, world: World) -> Config:
    """Return `config` with one copy of each shard where a lost rank ends the job: other copies would be of no use."""
    return config if world.survivable else replace(config, server=replace(config.server, copies=1))


def prepare_job(config: Config, claimed: ClaimedRun, request: JobRequest, world: World, seen: FoundStores) -> Job:
    """Return the job, on rank 0, for all to agree on; find what it resumes from, and remove an earlier job's marks.

    `seen` has the stores of the run that the ranks have found.
    """
    until = time.time() + 60 * request.minutes
    run = PreviousRun(
        config=config,
        directory=claimed.directory,
        identity=claimed.identity,
        replicas=world.layout.replicas,
        parameters=parameters.total(claimed.shapes),
        seen=seen,
    )
    resume = run.find_resume_point() if request.resume else None
    _remove_marks(claimed.directory)
    if not request.resume:
        (claimed.directory / divergences.NAME).unlink(missing_ok=True)
    diverged = divergences.read(claimed.directory)
    if diverged.number:
        known = f"training has diverged and gone back {diverged.number} times"
        print(f"adam_mpi: {known}: optimizer.learning_rate is multiplied by {diverged.rate_scale:g}", file=sys.stderr)
    files.write_text(claimed.directory / "config.toml", to_toml(config))
    return Job(
        config=config,
        directory=claimed.directory,
        description=claimed.description,
        shapes=claimed.shapes,
        resume=resume,
        kernels=compile.choose_kernels(config, claimed.shapes, claimed.directory / "kernels.json"),
        attempt=run.new_attempt(),
        replicas=world.layout.replicas,
        until=until,
        identity=claimed.identity,
        owner=claimed.owner,
        diverged=diverged,
    )


def _remove_marks(directory: Path) -> None:
    """Remove the files by which an earlier job in the run `directory` said how it ended or was asked to end."""
    fence.clear_fences(directory / "log")
    marks = [directory / name for name in (FAILURE, DONE, STOPPED, "STOP")]
    orders = [directory / "log" / sentinel.ORDERS, *directory.glob("log/watched-*.txt")]
    for path in (*marks, *orders):
        path.unlink(missing_ok=True)


def adapt_to_node(world: World, job: Job) -> Job:
    """Return the job with what depends on the nodes: how it trains on their cores, where its stores are, and what other
    nodes have on their disks.

    Collective.
    """
    _decide_recipe(world, job.config)
    place = stores.folder(job.config, job.directory, job.identity)
    given_rate = world.config.optimizer.learning_rate
    copies = _with_useful_copies(job.config, world).server.copies
    job.config.server.copies = copies
    world.config.server.copies = copies
    rate = given_rate * job.diverged.rate_scale
    job.config.optimizer.learning_rate = rate
    world.config.optimizer.learning_rate = rate
    resume = job.resume
    if resume is not None:
        resume = resume_points.share_store(resume, world.comm, place, _held_spans(world, job))
    return replace(job, attempt=place / job.attempt.name, resume=resume)


def _decide_recipe(world: World, config: Config) -> None:
    """Decide what the recipe of the agreed job leaves open, by the trainer threads of all ranks; collective."""
    threads, crowded = count_threads(world)
    trains = "worker" in world.place.roles
    counted = world.comm.allgather((threads * trains, crowded and trains))
    recipe.decide(config, max(1, sum(count for count, _ in counted)), any(full for _, full in counted))
    for section in ("optimizer", "push"):
        setattr(world.config, section, getattr(config, section))


def _held_spans(world: World, job: Job) -> list[tuple[int, int]]:
    """Return the spans of the flat vector that this rank is to hold as a server, for what it resumes."""
    cut = partition(job.shapes, job.config.layout.partitions, job.config.layout.scheme)
    layout = plan_memory_layout(job.config, cut, world.layout, job.replicas)
    shards = (*layout.served.get(world.rank, ()), *layout.copied.get(world.rank, ()))
    return [(shard.start, shard.stop) for shard in shards]


def saved_config(directory: str | None, resume: bool) -> Path | None:
    """Return the configuration of the run that the job resumes; None if there is none."""
    saved = Path(directory or "") / "config.toml"
    return saved if resume and directory and saved.exists() else None


def epochs_done(given: Given, overrides: Sequence[str], directory: str | None) -> int:
    """Return the number of epochs of a run that has all wanted epochs with this very configuration; otherwise 0."""
    run = Path(directory or "")
    if not directory or not (run / "DONE").exists():
        return 0
    try:
        epochs = json.loads((run / "summary.json").read_text())["epochs"]
    except (OSError, ValueError, KeyError):
        return 0
    wanted = configuration.load(given, overrides)
    if epochs < wanted.train.epochs or wanted != configuration.load(run / "config.toml"):
        return 0
    return epochs


def keeps_store(config: Config) -> bool:
    """Return whether servers write stores: with clocks only snapshots are of use, as a store has no single clock."""
    return config.asynchronous and config.store.interval > 0


@dataclass(frozen=True)
class PreviousRun:
    """A run directory as rank 0 finds it."""

    config: Config
    directory: Path
    identity: Identity
    replicas: int
    parameters: int
    seen: FoundStores
    """The stores of the run that the ranks have found."""

    def find_resume_point(self) -> Resume | None:
        """Return what the agreed job resumes from, or None; print what is not complete and not used."""
        snapshot.finish_renames(self.directory / "snapshots")
        found, passed_over = resume_points.find_resume_point(self.config, self.directory, self.seen)
        for trouble in passed_over:
            print(f"adam_mpi: passed over: {trouble}", file=sys.stderr, flush=True)
        if found is None:
            return None
        note = resume_points.check_resume(found, self.config, self.replicas, self.parameters)
        if note:
            print(f"adam_mpi: {note}", file=sys.stderr, flush=True)
        if found.kind == "store":
            # A store knows which acknowledged pushes it lacks.
            return found
        cost = resume_points.describe_lost_work(found, self.directory, self.config)
        return replace(found, note=found.note + cost)

    def new_attempt(self) -> Path:
        """Return the folder of the new job's stores in this run, with a description of them in it."""
        place = stores.folder(self.config, self.directory, self.identity)
        folder = resume_points.next_attempt(place, self.seen)
        if keeps_store(self.config):
            with suppress(OSError):
                resume_points.describe_store(folder, self.config, self.replicas, self.parameters, self.identity)
        return folder
