"""How a job ends: in order after success, and on all ranks after a failure."""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from mpi4py import MPI

from adam_mpi.base.errors import LostRun, LostState, RankFailure, Stall, UserError
from adam_mpi.cluster import report_once
from adam_mpi.cluster.sentinel import SentinelConnection
from adam_mpi.cluster.world import Interrupted, World
from adam_mpi.runtime.job import DONE, FAILURE, STOPPED, Job
from adam_mpi.runtime.rank_runtime import RankRuntime

REPORT_SECONDS = 10.0
"""How long the report of a failure may take in a run directory that may hang."""
CLOSE_SECONDS = 2.0
"""How long the files of the log may take to close there."""
LEAVE_SECONDS = 5.0
"""How long MPI may take to end a process whose work is done."""
log = logging.getLogger(__name__)


def exists(path: Path) -> bool:
    """Return whether `path` exists when a job ends; False for a disk that fails, as a loss is survived without it."""
    with suppress(OSError):
        return path.exists()
    return False


def is_complete(job: Job) -> bool:
    """Return whether the results of the ending job are written."""
    return any(exists(job.directory / marker) for marker in (DONE, STOPPED))


def is_over(directory: Path) -> bool:
    """Return whether the job in `directory` has ended, well or not."""
    return any(exists(directory / marker) for marker in (DONE, STOPPED, FAILURE))


def finish_job(world: World, runtime: RankRuntime, job: Job) -> None:
    """End the job after success: wait for all ranks and free the windows (collective); a late loss is no failure."""
    if world.broken and is_complete(job):
        return
    try:
        world.finish()
    except (RankFailure, MPI.Exception):
        if not (world.survivable and is_complete(job)):
            raise
        world.broken = True
    if not world.broken:
        runtime.free()


def dismiss_spares(world: World) -> None:
    """End the spares that this rank has started, in order, so that the launcher reports no failure."""
    with at_most(LEAVE_SECONDS):
        world.spares.dismiss()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End this process, whose job is done, if MPI waits for longer than `seconds` for a rank that may be lost."""
    timer = threading.Timer(seconds, os._exit, [0])
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def leave(world: World) -> NoReturn:
    """End this process without MPI, which would wait for lost ranks; end processes that were taken for dead too."""
    world.kill_evicted()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_at_start(comm: MPI.Comm, error: Exception) -> NoReturn:
    """End all ranks when one is lost or fails before there is a job; MPI's own end would wait for ever."""
    if isinstance(error, MPI.Exception | RankFailure):
        text = f"a rank was lost at the start: {error}; the job ends; start it again"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    print(f"adam_mpi: process {comm.rank}: {text}", file=sys.stderr, flush=True)
    # Only a death reaches ranks that wait for this one inside MPI.
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def revoke(world: World) -> None:
    """Reach ranks that wait inside MPI while the job ends, and not for the rank that was lost."""
    if world.survivable:
        with suppress(MPI.Exception):
            world.comm.Revoke()


def report_failure(world: World, connection: SentinelConnection, failure_file: Path, error: BaseException) -> None:
    """Report the error that ends the job; if the run directory does not answer, on the terminal at least."""
    if not report_once.finishes_within(REPORT_SECONDS, lambda: _report_error(world, connection, failure_file, error)):
        print(f"adam_mpi: {_describe_cause(world, error)}", file=sys.stderr, flush=True)
    connection.close()


def _report_error(world: World, connection: SentinelConnection, failure_file: Path, error: BaseException) -> None:
    """Log and report the `error` that ends the job on this rank, unless another rank has a better reason."""
    log.error("the job ends: %s", "".join(traceback.format_exception(error)))
    if isinstance(error, Interrupted):
        connection.close(f"interrupted by {error}")
    if isinstance(error, Interrupted | RankFailure | MPI.Exception):
        # Another rank may have died first: its sentinel knows more about that than a signal or MPI.
        report_once.wait_for_report(failure_file, report_once.PRINT_SECONDS)
    report_once.report_failure(
        failure_file, _describe_cause(world, error), exit_code=2 if isinstance(error, UserError) else 1
    )


def end_after_failure(world: World, failure_file: Path, error: BaseException) -> NoReturn:
    """End this process and all other ranks, with the exit code of the first error."""
    report_once.finishes_within(CLOSE_SECONDS, logging.shutdown)
    codes = [1]
    report_once.finishes_within(CLOSE_SECONDS, lambda: codes.append(report_once.reported_exit_code(failure_file)))
    code = codes[-1]
    if not world.survivable:
        MPI.COMM_WORLD.Abort(code)
    elif world.comm.size > 1 and not isinstance(error, RankFailure | LostState | MPI.Exception):
        # With --with-ft ulfm neither MPI's Abort nor an exit reaches the other ranks; a death does, at once.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


def _describe_cause(world: World, error: BaseException) -> str:
    """Return what people read about the `error` that ends the job; a traceback only for an error of the program."""
    if isinstance(error, LostState | LostRun | Stall):
        return str(error)
    if isinstance(error, MPI.Exception):
        return f"{world.place}: {world.describe(error)}"
    if isinstance(error, UserError | RankFailure | Interrupted):
        return f"{world.place}: {error}"
    return f"{world.place} raised\n{''.join(traceback.format_exception(error)).rstrip()}"
