"""The spine: agree on the job, start the world, run my roles step by step until the job is over, end in order."""

import json
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from mpi4py import MPI

from adam_mpi import config as configuration
from adam_mpi.base import log as logs
from adam_mpi.base.errors import LostRun, LostState, RankFailure, Stall, UserError
from adam_mpi.checkpoint import owner as ownership
from adam_mpi.checkpoint import stores
from adam_mpi.cluster import fence, launcher, layout, sentinel, spares
from adam_mpi.cluster.control_channel import ControlChannel
from adam_mpi.cluster.role_assignment import NEW
from adam_mpi.cluster.watchdog import Watchdog, answer_signals
from adam_mpi.cluster.world import Idle, Interrupted, World, gather
from adam_mpi.config import Given
from adam_mpi.data.sets import DataSet
from adam_mpi.monitor.timeline import Timeline
from adam_mpi.runtime import generation
from adam_mpi.runtime.job import Job
from adam_mpi.runtime.rank_runtime import RankRuntime

TELL_SECONDS, CLOSE_SECONDS = 10.0, 2.0
"""What the last words may take, and the files of the log, in a run directory that may hang."""
ENDS = "DONE", "STOPPED", "log/failure.txt"
LEAVE_SECONDS = 5.0
log = logging.getLogger(__name__)


def train(
    path: str | None,
    overrides: Sequence[str],
    directory: str | None,
    resume: bool,
    minutes: float,
    take_over: bool = False,
) -> int:
    """The command: one rank's way through a training job; returns its exit code."""
    comm, given = MPI.COMM_WORLD, path or _saved(directory, resume)
    try:
        done = _together(comm, lambda: _agree(comm, lambda: _done(given, overrides, directory))) if resume else 0
        if done:
            if comm.rank == 0:
                print(f"{directory} is done: {done} epochs; for more: --set train.epochs={done + 1} or above")
                # A supervisor believes no marker that was there before.
                with suppress(OSError):
                    Path(directory or "", "DONE").touch()
            return 0
        run(comm, given, overrides, directory, resume, minutes, take_over)
    except UserError as error:
        # Every rank has the same error; one tells it. Of processes that do not know of each other, the first.
        if comm.rank == 0 and (comm.size > 1 or not launcher.rank()):
            launcher.tell(f"adam_mpi: {error}")
        return 2
    return 0


def run(
    comm: MPI.Comm,
    given: Given,
    overrides: Sequence[str] = (),
    directory: str | None = None,
    resume: bool = False,
    minutes: float = math.inf,
    take_over: bool = False,
    inside: bool = False,
) -> Path:
    """Collective: a training job; returns its run directory. What is wrong with what was given is raised everywhere.

    A job that fails later ends all its processes; `inside` another program that is one rank only, the error is raised.
    """
    if MPI.COMM_WORLD.size == 1:
        launcher.check_alone(os.environ, MPI.Get_library_version())
    world, job = _together(comm, lambda: _begin(comm, given, overrides, directory, resume, minutes, take_over))
    os.environ[sentinel.OWNER_FILE] = str(job.owner.path)
    config, failure_file = job.config, job.directory / "log" / "failure.txt"
    logs.start(job.directory, world.rank, str(world.place))
    answer_signals()
    wire = generation.connect_sentinel(world, failure_file)
    world.catch_signals()
    try:
        timeline = Timeline(world, job.directory) if config.observe.trace else None
        world, crew = _work(world, job, wire)
        if timeline is not None:
            timeline.write(world)
        _finish(world, crew, job)
        if timeline is not None and world.rank == 0:
            timeline.merge()
    except BaseException as error:
        _tell(world, wire, failure_file, error)
        if inside and comm.size == 1:
            job.owner.release()
            os.environ.pop(sentinel.OWNER_FILE)
            raise
        _end(world, failure_file, error)
    wire.bye()
    log.info("finished")
    if world.rank == world.layout.head:
        job.owner.release()
    os.environ.pop(sentinel.OWNER_FILE)
    _dismiss(world)
    # MPI's own end would also wait for a rank that was too busy with its spares to end in order.
    if (world.broken or (world.survivable and config.recover.spares)) and not inside:
        _leave(world)
    return job.directory


def _begin(
    comm: MPI.Comm,
    given: Given,
    overrides: Sequence[str],
    directory: str | None,
    resume: bool,
    minutes: float,
    take_over: bool,
) -> tuple[World, Job]:
    """Collective: what everybody has to know before there is a log to tell anything."""
    config = _agree(comm, lambda: generation.configure(given, overrides, comm.size))
    world = World(comm, config)
    processes = gather(world.comm, ownership.process())
    entry = _agree(comm, lambda: generation.enter(config, directory, resume, world, processes, take_over))
    try:
        if comm.rank == 0:
            # Compiling may take minutes.
            entry.owner.beat()
        place = stores.folder(config, entry.directory, entry.identity)
        seen = stores.survey(world.comm, place, entry.identity, resume and config.asynchronous)
        job = _agree(comm, lambda: generation.prepare(config, entry, resume, world, minutes, seen))
        return world, generation.settle_here(world, job)
    except UserError:
        if comm.rank == 0:
            entry.owner.release()
        raise


def _together(comm: MPI.Comm, work: Callable[[], Any]) -> Any:
    """Something collective before there is a job: who fails in it leaves nobody waiting."""
    try:
        return work()
    except UserError:
        raise
    except Exception as error:
        if comm.size == 1:
            raise
        _end_at_start(comm, error)


def _end_at_start(comm: MPI.Comm, error: Exception) -> NoReturn:
    """A rank was lost, or fails, while the job is put together; MPI's own end would wait for ever."""
    lost = isinstance(error, MPI.Exception | RankFailure)
    what = f"a rank was lost at the start: {error}" if lost else "".join(traceback.format_exception(error)).rstrip()
    print(f"adam_mpi: process {comm.rank}: {what}", file=sys.stderr, flush=True)
    # Only a death reaches those who wait for us inside MPI.
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def join(directory: Path) -> int:
    """The way of a rank that is started while the job runs: it gets ready, stands by, and joins when it is wanted."""
    link = spares.quiet(MPI.Comm.Get_parent())
    try:
        world, job, data = _stand_by(link, directory)
    except Exception as error:
        # Whoever it needs is gone, and the others know; anything else is a fault of ours.
        if not isinstance(error, RankFailure | MPI.Exception):
            traceback.print_exc()
            sys.stderr.flush()
        # Nobody would hear of an exit.
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    logs.start(job.directory, world.place.member, str(world.place))
    os.environ[sentinel.OWNER_FILE] = str(job.owner.path)
    # Others on this host may ask where we are: without an answer their signal would end us.
    answer_signals()
    world.catch_signals()
    failure_file = job.directory / "log" / "failure.txt"
    wire = generation.join_sentinel(world, failure_file)
    try:
        world, crew = _work(world, job, wire, RankRuntime(ControlChannel(world.control), {}, None, [], data=data))
        _finish(world, crew, job)
    except BaseException as error:
        _tell(world, wire, failure_file, error)
        _end(world, failure_file, error)
    wire.bye()
    log.info("finished")
    _dismiss(world)
    _leave(world)


def _stand_by(link: MPI.Intercomm, directory: Path) -> tuple[World, Job, DataSet]:
    """All that can be done alone is done before others wait: imports are, kernels and the data set follow here."""

    def over() -> bool:
        return any(_is_there(directory / marker) for marker in ENDS)

    link.send((MPI.Get_processor_name(), os.getpid()), 0)
    luggage = spares.hear(link, over)
    data = generation.get_ready(luggage.job, luggage.captured)
    link.send(time.process_time(), 0)
    invitation = spares.hear(link, over)
    if invitation is None:
        link.send(None, 0)
        _go_away(link)
    comm = spares.come_in(invitation)
    world = World(comm, luggage.job.config, born=layout.Place(NEW, "", (), born=invitation.born))
    world.agree()
    world.full, world.gone = invitation.full, invitation.gone
    return world, luggage.job, data


def _go_away(link: MPI.Intercomm) -> NoReturn:
    """The job ends and has not needed this rank."""
    with _at_most(LEAVE_SECONDS):
        link.Disconnect()
        MPI.Finalize()
    os._exit(0)


def _dismiss(world: World) -> None:
    """Send those away who stand by; in order, so that the launcher takes nothing amiss."""
    with _at_most(LEAVE_SECONDS):
        world.spares.dismiss()


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End this process, all of whose work is done, where MPI waits longer than this for somebody who may be gone."""
    timer = threading.Timer(seconds, os._exit, [0])
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def _work(
    world: World, job: Job, wire: sentinel.SentinelConnection, crew: RankRuntime | None = None
) -> tuple[World, RankRuntime]:
    """Generation after generation until the job is over: roles go on with what they have when a rank is lost."""
    watch = _watch(world, job, wire)
    while True:
        try:
            crew = generation.crew(world, job, crew)
            if watch.end():
                wire.say(sentinel.WENT_ON)
            _serve(world, crew)
            return world, crew
        except fence.Evicted as eviction:
            watch.out(eviction)
        except (RankFailure, MPI.Exception) as failure:
            world.broken = True
            job.owner.check()
            # A rank that dies is left behind; one that has told an error ends the job.
            if crew is None or not world.survivable or _is_there(job.directory / "log" / "failure.txt"):
                _reach_others(world)
                raise
            if _over(job):
                return world, crew
            log.warning("generation %d ends: %s", world.generation, failure)
            crew.detected = time.time()
            watch.begin(world.generation, world.place.member)
            crew.compute_on()
            # Whoever knows that more ranks are to join says how many; everybody else goes along.
            world = world.recover(getattr(failure, "full", 0))


def _reach_others(world: World) -> None:
    """Some of them may wait inside MPI, and not for whoever was lost."""
    if world.survivable:
        with suppress(MPI.Exception):
            world.comm.Revoke()


def _watch(world: World, job: Job, wire: sentinel.SentinelConnection) -> fence.Watch:
    folder, seconds = job.directory / "log", job.config.recover.seconds

    def late() -> None:
        text = f"{world.place}: the ranks that are left did not find together in {seconds:g} s; the job ends"
        sentinel.report(folder / "failure.txt", text)
        wire.bye()
        os._exit(1)

    def out(eviction: fence.Evicted) -> None:
        log.error("%s", eviction)
        print(f"adam_mpi: {world.place} {eviction}", file=sys.stderr, flush=True)
        wire.bye()
        logging.shutdown()
        os._exit(0)

    return fence.Watch(folder, seconds, late, out)


def _over(job: Job) -> bool:
    return any(_is_there(job.directory / marker) for marker in ENDS[:2])


def _is_there(path: Path) -> bool:
    """Whether a file is seen; a disk that fails shows none, and a loss is survived without it."""
    with suppress(OSError):
        return path.exists()
    return False


def _finish(world: World, crew: RankRuntime, job: Job) -> None:
    """Everybody is here; who is lost now is missed by nobody."""
    if world.broken and _over(job):
        return
    try:
        world.finish()
    except (RankFailure, MPI.Exception):
        if not (world.survivable and _over(job)):
            raise
        world.broken = True
    if not world.broken:
        crew.free()


def _leave(world: World) -> NoReturn:
    """The end after a failure: MPI's own would wait for the dead, and the launcher for who was taken for dead."""
    world.end_evicted()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _saved(directory: str | None, resume: bool) -> Path | None:
    """A run goes on with the configuration it has, unless another is given."""
    saved = Path(directory or "") / "config.toml"
    return saved if resume and directory and saved.exists() else None


def _done(given: Given, overrides: Sequence[str], directory: str | None) -> int:
    """The epochs of a run that has all that are wanted, with just this configuration; else 0."""
    run = Path(directory or "")
    if not directory or not (run / "DONE").exists():
        return 0
    try:
        epochs = json.loads((run / "summary.json").read_text())["epochs"]
    except (OSError, ValueError, KeyError):
        return 0
    wanted = configuration.load(given, overrides)
    return epochs if epochs >= wanted.train.epochs and wanted == configuration.load(run / "config.toml") else 0


def _serve(world: World, crew: RankRuntime) -> None:
    """The loop of a rank: a step of each role, messages, the failure check; rest when there is nothing to do."""
    # Strips of a replica wait for each other in every batch; replicas that push and pull at will for nobody.
    patient = world.config.asynchronous and world.layout.partitions == 1
    idle, told = Idle(world.config.cluster.poll, crew.rest, patient), 0.0
    over, watchdog = False, Watchdog(world, crew.channel)
    while not (over and crew.channel.idle):
        try:
            worked = crew.step()
            over |= crew.handle_messages(watchdog)
        except MPI.Exception as error:
            raise RankFailure(world.describe(error)) from error
        crew.look_after_spares(world.layout.head)
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
            # Some kinds of it do not travel.
            made = UserError(str(error))
    made = comm.bcast(made)
    if isinstance(made, UserError):
        raise made
    return made


def _tell(world: World, wire: sentinel.SentinelConnection, failure_file: Path, error: BaseException) -> None:
    """Name the error that ends the job; where the run directory does not answer, on the terminal at least."""
    if not sentinel.within(TELL_SECONDS, lambda: _tell_all(world, wire, failure_file, error)):
        print(f"adam_mpi: {_cause(world, error)}", file=sys.stderr, flush=True)
    wire.bye()


def _tell_all(world: World, wire: sentinel.SentinelConnection, failure_file: Path, error: BaseException) -> None:
    log.error("the job ends: %s", "".join(traceback.format_exception(error)))
    if isinstance(error, Interrupted):
        wire.bye(f"interrupted by {error}")
    if isinstance(error, Interrupted | RankFailure | MPI.Exception):
        # Another rank may have died first: the sentinel says more about that than a signal or MPI.
        sentinel.told(failure_file, sentinel.TELL_SECONDS)
    sentinel.report(failure_file, _cause(world, error), exit_code=2 if isinstance(error, UserError) else 1)


def _end(world: World, failure_file: Path, error: BaseException) -> NoReturn:
    """Take the other ranks along; the first error says with which code."""
    sentinel.within(CLOSE_SECONDS, logging.shutdown)
    codes = [1]
    sentinel.within(CLOSE_SECONDS, lambda: codes.append(sentinel.exit_code(failure_file)))
    code = codes[-1]
    if not world.survivable:
        MPI.COMM_WORLD.Abort(code)
    elif world.comm.size > 1 and not isinstance(error, RankFailure | LostState | MPI.Exception):
        # With --with-ft ulfm MPI's own Abort reaches nobody, and an exit is not heard of; a death is, at once.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


def _cause(world: World, error: BaseException) -> str:
    if isinstance(error, LostState | LostRun | Stall):
        return str(error)
    if isinstance(error, MPI.Exception):
        return f"{world.place}: {world.describe(error)}"
    if isinstance(error, UserError | RankFailure | Interrupted):
        return f"{world.place}: {error}"
    return f"{world.place} raised\n{''.join(traceback.format_exception(error)).rstrip()}"
