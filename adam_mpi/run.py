"""The spine: agree on the job, start the world, run my roles step by step until the job is over, end in order."""

import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mpi4py import MPI

from adam_mpi import start
from adam_mpi.cluster import sentinel
from adam_mpi.cluster.world import Idle, Interrupted, World
from adam_mpi.config import Given
from adam_mpi.crew import Crew
from adam_mpi.durable import stores
from adam_mpi.errors import RankFailure, UserError
from adam_mpi.observe import log as logs
from adam_mpi.observe import rundir
from adam_mpi.observe.timeline import Timeline
from adam_mpi.observe.watchdog import Watchdog, answer_signals

log = logging.getLogger(__name__)


def train(path: str | None, overrides: Sequence[str], directory: str | None, resume: bool, minutes: float) -> int:
    """The command: one rank's way through a training job; returns its exit code."""
    comm = MPI.COMM_WORLD
    try:
        run(comm, path or _saved(directory, resume), overrides, directory, resume, minutes)
    except UserError as error:
        # Every rank has the same error; one tells it.
        if comm.rank == 0:
            print(f"adam_mpi: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def run(
    comm: MPI.Comm, given: Given, overrides: Sequence[str] = (), directory: str | None = None, resume: bool = False,
    minutes: float = math.inf, inside: bool = False,
) -> Path:  # fmt: skip
    """Collective: a training job; returns its run directory. What is wrong with what was given is raised everywhere.

    A job that fails later ends all its processes; `inside` another program that is one rank only, the error is raised.
    """
    config = _agree(comm, lambda: start.configure(given, overrides, comm.size))
    world = World(comm, config)
    place = stores.folder(config, rundir.where(config, directory))
    seen = stores.survey(world.comm, place, resume and config.asynchronous)
    job = _agree(comm, lambda: start.prepare(config, directory, resume, world.layout.replicas, minutes, seen))
    job = start.settle_here(world, job)
    failure_file = job.directory / "log" / "failure.txt"
    logs.start(job.directory, world.rank, str(world.place))
    answer_signals()
    wire = start.connect_sentinel(world, failure_file)
    world.catch_signals()
    try:
        timeline = Timeline(world, job.directory) if config.observe.trace else None
        crew = start.crew(world, job)
        _serve(world, crew)
        if timeline is not None:
            timeline.write(world)
        world.finish()
        crew.free()
        if timeline is not None and world.rank == 0:
            timeline.merge()
    except BaseException as error:
        _tell(world, wire, failure_file, error)
        if inside and comm.size == 1:
            raise
        _end(world, failure_file, error)
    wire.bye()
    log.info("finished")
    return job.directory


def _saved(directory: str | None, resume: bool) -> Path | None:
    """A run goes on with the configuration it has, unless another is given."""
    saved = Path(directory or "") / "config.toml"
    return saved if resume and directory and saved.exists() else None


def _serve(world: World, crew: Crew) -> None:
    """The loop of a rank: a step of each role, messages, the failure check; rest when there is nothing to do."""
    idle, told = Idle(world.config.cluster.poll), 0.0
    over, watchdog = False, Watchdog(world, crew.post)
    while not (over and crew.post.idle):
        try:
            worked = crew.step()
            over |= crew.hear()
        except MPI.Exception as error:
            raise RankFailure(world.describe(error)) from error
        world.check()
        watchdog.look(crew.awaits)
        if time.monotonic() - told > world.config.observe.interval / 2 and not over:
            told = time.monotonic()
            crew.tell(world.layout.head)
        idle.back_off(worked)


def _agree(comm: MPI.Comm, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank; or its error, on every rank."""
    made: Any = None
    if comm.rank == 0:
        try:
            made = make()
        except UserError as error:
            made = error
    made = comm.bcast(made)
    if isinstance(made, UserError):
        raise made
    return made


def _tell(world: World, wire: sentinel.Wire, failure_file: Path, error: BaseException) -> None:
    """Name the error that ends the job."""
    log.error("the job ends: %s", "".join(traceback.format_exception(error)))
    if isinstance(error, Interrupted):
        wire.bye(f"interrupted by {error}")
    if isinstance(error, Interrupted | RankFailure):
        # Another rank may have died first: the sentinel says more about that than a signal or MPI.
        sentinel.told(failure_file, seconds=1.0)
    sentinel.report(failure_file, _cause(world, error), exit_code=2 if isinstance(error, UserError) else 1)
    wire.bye()


def _end(world: World, failure_file: Path, error: BaseException) -> NoReturn:
    """Take the other ranks along; the first error says with which code."""
    logging.shutdown()
    code = sentinel.exit_code(failure_file)
    if not world.survivable:
        MPI.COMM_WORLD.Abort(code)
    elif world.comm.size > 1 and not isinstance(error, RankFailure):
        # With --with-ft ulfm MPI's own Abort reaches nobody, and an exit is not heard of; a death is, at once.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


def _cause(world: World, error: BaseException) -> str:
    if isinstance(error, UserError | RankFailure | Interrupted):
        return f"{world.place}: {error}"
    return f"{world.place} raised\n{''.join(traceback.format_exception(error)).rstrip()}"
