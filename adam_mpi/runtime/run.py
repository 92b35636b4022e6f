"""The spine of a rank: agree on the job, run generation after generation until it is over, recover, end in order."""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from mpi4py import MPI

from adam_mpi.base import log as logs
from adam_mpi.base.errors import GoingBack, RankFailure, UserError
from adam_mpi.cluster import fence, report_once, sentinel
from adam_mpi.cluster.idle import Idle
from adam_mpi.cluster.sentinel import SentinelConnection
from adam_mpi.cluster.watchdog import Watchdog, dump_stack_on_signal
from adam_mpi.cluster.world import World
from adam_mpi.config import Given
from adam_mpi.monitor.timeline import Timeline
from adam_mpi.runtime import ending
from adam_mpi.runtime.agreement import agree_on_job, epochs_done, from_first_rank, saved_config
from adam_mpi.runtime.begin_generation import begin_generation
from adam_mpi.runtime.job import DONE, Job, JobRequest
from adam_mpi.runtime.rank_runtime import RankRuntime
from adam_mpi.runtime.standby import wait_to_join
from adam_mpi.runtime.supervision import connect_sentinel, join_sentinel, watch_recoveries

LOSS_SECONDS = 0.5
"""Seconds between two reports of a data rank, which has the losses that the guard of the job judges."""
T = TypeVar("T")
log = logging.getLogger(__name__)


def train_command(
    path: str | None,
    overrides: Sequence[str],
    directory: str | None,
    resume: bool,
    minutes: float,
    take_over: bool = False,
) -> int:
    """Run the command `train` on this rank; return its exit code."""
    comm = MPI.COMM_WORLD
    given = path or saved_config(directory, resume)
    try:
        if resume and _is_done(comm, given, overrides, directory):
            return 0
        run_job(comm, given, overrides, directory, resume, minutes=minutes, take_over=take_over)
    except UserError as error:
        # Every rank has the same error: one reports it. Of processes that do not know of each other, the first does.
        if comm.rank == 0 and (comm.size > 1 or not report_once.launched_rank()):
            report_once.print_line(f"adam_mpi: {error}")
        return 2
    return 0


def _is_done(comm: MPI.Comm, given: Given, overrides: Sequence[str], directory: str | None) -> bool:
    """Return whether the run in `directory` has all wanted epochs already, before it starts, and say so; collective."""

    def ask_first_rank() -> int:
        return from_first_rank(comm, lambda: epochs_done(given, overrides, directory))

    epochs = _collective(comm, ask_first_rank)
    if epochs and comm.rank == 0:
        print(f"{directory} is done: {epochs} epochs; for more: --set train.epochs={epochs + 1} or above")
        # A supervisor does not accept a marker from before it started the job.
        with suppress(OSError):
            Path(directory or "", DONE).touch()
    return epochs > 0


def run_job(
    comm: MPI.Comm,
    given: Given,
    overrides: Sequence[str] = (),
    directory: str | None = None,
    resume: bool = False,
    minutes: float = math.inf,
    take_over: bool = False,
    inside: bool = False,
) -> Path:
    """Run a training job on all ranks of `comm` and return its run directory; collective.

    Raise UserError on every rank if the job cannot start. A failure later ends all processes of the job; `inside`
    another program that is one rank only, the error is raised instead.
    """
    if MPI.COMM_WORLD.size == 1:
        report_once.check_alone(os.environ, MPI.Get_library_version())
    request = JobRequest(given, overrides, directory, resume, minutes=minutes, take_over=take_over)
    world, job = _collective(comm, lambda: agree_on_job(comm, request))
    os.environ[report_once.OWNER_FILE] = str(job.owner.path)
    logs.start_rank_log(job.directory, world.rank, str(world.place))
    dump_stack_on_signal()
    connection = connect_sentinel(world, job.failure_file)
    world.catch_signals()
    try:
        timeline = Timeline(world, job.directory) if job.config.observe.trace else None
        world, runtime = _run_generations(world, job, connection)
        _write_timeline(world, runtime, job, timeline)
    except BaseException as error:
        ending.report_failure(world, connection, job.failure_file, error)
        if inside and comm.size == 1:
            job.owner.release()
            os.environ.pop(report_once.OWNER_FILE)
            raise
        ending.end_after_failure(world, job.failure_file, error)
    connection.close()
    log.info("finished")
    if world.rank == world.layout.coordinator:
        job.owner.release()
    os.environ.pop(report_once.OWNER_FILE)
    ending.dismiss_spares(world)
    # MPI's own end would also wait for a rank that was too busy with its spares to end in order.
    if (world.broken or (world.survivable and job.config.recover.spares)) and not inside:
        ending.leave(world)
    return job.directory


def _collective(comm: MPI.Comm, work: Callable[[], T]) -> T:
    """Return what `work` returns, a collective step of the job; a rank that fails leaves no other rank waiting."""
    try:
        return work()
    except UserError:
        raise
    except Exception as error:
        if comm.size == 1:
            raise
        ending.end_at_start(comm, error)


def _write_timeline(world: World, runtime: RankRuntime, job: Job, timeline: Timeline | None) -> None:
    """Write the timeline of the job if there is one, and wait for all ranks; collective."""
    if timeline is not None:
        timeline.write(world)
    ending.finish_job(world, runtime, job)
    if timeline is not None and world.rank == 0:
        timeline.merge()


def join_command(directory: Path) -> int:
    """Run the command `join` in a process that a running job has started as a spare."""
    joined = wait_to_join(directory)
    world = joined.world
    job = joined.job
    logs.start_rank_log(job.directory, world.place.member, str(world.place))
    os.environ[report_once.OWNER_FILE] = str(job.owner.path)
    # Ranks on this host ask by a signal where this one is: unhandled it would end the process.
    dump_stack_on_signal()
    world.catch_signals()
    connection = join_sentinel(world, job.failure_file)
    try:
        runtime = RankRuntime.without_roles(world, joined.data)
        world, runtime = _run_generations(world, job, connection, runtime)
        ending.finish_job(world, runtime, job)
    except BaseException as error:
        ending.report_failure(world, connection, job.failure_file, error)
        ending.end_after_failure(world, job.failure_file, error)
    connection.close()
    log.info("finished")
    ending.dismiss_spares(world)
    ending.leave(world)


def _run_generations(
    world: World, job: Job, connection: SentinelConnection, runtime: RankRuntime | None = None
) -> tuple[World, RankRuntime]:
    """Run generation after generation until the job is over; return the world and the runtime of the last one.

    When a rank is lost the others agree on a new membership, and their roles continue with what they have.
    """
    watch = watch_recoveries(world, job, connection)
    while True:
        try:
            runtime = begin_generation(world, job, runtime)
            if watch.end():
                connection.send(sentinel.RECOVERED)
            _run_roles(world, runtime)
            return world, runtime
        except GoingBack as order:
            assert runtime is not None, "a rank with roles has received the order"
            job.owner.check()
            world = _recover(world, runtime, order, watch) if world.survivable else world.renew()
        except fence.Evicted as eviction:
            watch.out(eviction)
        except (RankFailure, MPI.Exception) as failure:
            world.broken = True
            job.owner.check()
            # A rank that dies is left behind; a rank that has reported an error ends the job.
            if runtime is None or not world.survivable or ending.exists(job.failure_file):
                ending.revoke(world)
                raise
            if ending.is_complete(job):
                return world, runtime
            world = _recover(world, runtime, failure, watch)


def _recover(world: World, runtime: RankRuntime, failure: Exception, watch: fence.MembershipWatch) -> World:
    """Recover between two generations: agree with the surviving ranks on a membership; return the next world."""
    log.warning("generation %d ends: %s", world.generation, failure)
    world.broken = True
    runtime.detected = time.time()
    watch.begin(world.generation, world.place.member)
    if not isinstance(failure, GoingBack):
        runtime.compute_on()
    # The rank that knows of joining spares says how many ranks there will be; the others follow it.
    return world.recover(getattr(failure, "full", 0))


def _run_roles(world: World, runtime: RankRuntime) -> None:
    """Run the roles of this rank until the job is over: steps, messages, the check for failures, rest."""
    coordinator = world.layout.coordinator
    interval = world.config.observe.interval / 2
    if "data" in world.place.roles:
        interval = min(interval, LOSS_SECONDS)
    watchdog = Watchdog(world, runtime.channel)
    # Strips of a replica wait for each other in every batch; asynchronous replicas wait for no other rank.
    patient = world.config.asynchronous and world.layout.partitions == 1
    idle = Idle(world.config.cluster.poll, runtime.rest, patient)
    reported = 0.0
    over = False
    while not (over and runtime.channel.idle):
        try:
            worked = runtime.step()
            over |= runtime.handle_messages(watchdog)
        except MPI.Exception as error:
            raise RankFailure(world.describe(error)) from error
        runtime.step_spares(coordinator)
        world.check()
        watchdog.check(runtime.awaits)
        if time.monotonic() - reported > interval and not over:
            reported = time.monotonic()
            runtime.report(coordinator)
        idle.back_off(worked)
