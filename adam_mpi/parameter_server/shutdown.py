"""End a program that has parameter servers open: a rank that fails ends the job on all ranks, with its reason.

Other ranks wait for a client that has raised, and would do so for ever. While a server is open, an exception that
nobody catches, and an exit without `close`, therefore end the whole job.
"""

import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Timer
from types import TracebackType
from typing import NoReturn, Protocol

import numpy as np
from mpi4py import MPI

from adam_mpi.base.errors import JobEnded, LostState, RankFailure
from adam_mpi.cluster.control_messages import RankRaised, encode_message
from adam_mpi.cluster.world import World

SEND_SECONDS = 5.0
"""How long a rank that fails waits until the others have received the reason."""
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Open(Protocol):
    """An object that other ranks wait for until it is closed."""

    world: World


@dataclass
class ExitWatch:
    """What the hooks of this process need to know at its end."""

    open: list[Open] = field(default_factory=list)
    code: int = 0
    """The exit code of the process."""
    broken: bool = False
    """Whether a rank was lost, so that MPI_Finalize would wait for the dead."""
    installed: bool = False


_watch = ExitWatch()


def register(server: Open) -> None:
    """End the job if this process fails or exits before `unregister(server)` of its parameter server."""
    if not _watch.installed:
        _watch.installed = True
        atexit.register(_at_exit)
        sys.excepthook = partial(_uncaught, sys.excepthook)
    _watch.open.append(server)


def unregister(server: Open) -> None:
    """Let this process fail or exit without ending the job: no rank waits for parameter `server` any more."""
    if server in _watch.open:
        _watch.open.remove(server)
    _watch.broken |= server.world.broken


def _uncaught(before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the job if a parameter server is open; else call `before`, the hook that this one replaces."""
    _watch.code = 1
    if _watch.open:
        end_job(_watch.open[-1].world, error.with_traceback(trace))
    else:
        before(kind, error, trace)


def _at_exit() -> None:
    """End the job if a parameter server is open; skip MPI_Finalize where it would wait for dead or missing ranks."""
    if _watch.open:
        world = _watch.open[-1].world
        _end_process(world, f"{world.place} left without close(); the job ends", notify=True)
    if _watch.broken:
        _exit_now(_watch.code)


def end_job(world: World, error: BaseException) -> None:
    """Print what ends a job with a parameter server, and end it on all ranks; a rank that is alone only prints."""
    if isinstance(error, JobEnded):
        # The rank that raised has printed it.
        _end_process(world, "", notify=False)
    elif isinstance(error, LostState | RankFailure | MPI.Exception):
        # The others know.
        _end_process(world, f"{world.place}: {error}", notify=False)
    else:
        trace = "".join(traceback.format_exception(error)).rstrip()
        _end_process(world, f"{world.place} raised; the job ends\n{trace}", notify=True)


def _end_process(world: World, text: str, notify: bool) -> None:
    """Print `text` and end this process of a parameter server; `notify` the other ranks of the reason first."""
    if text:
        print(f"adam_mpi: {text}", file=sys.stderr, flush=True)
    if MPI.Is_finalized() or world.comm.size == 1:
        return
    if not world.survivable:
        MPI.COMM_WORLD.Abort(1)
    if notify:
        with suppress(MPI.Exception):
            _send_to_all(world, text.partition("\n")[0])
        # With --with-ft ulfm an exit is not noticed; a death reaches the ranks that wait for this one inside MPI.
        os.kill(os.getpid(), signal.SIGKILL)
    # But mpirun takes a death for nothing out of the ordinary: the ranks that were notified give it a code.
    _exit_now(1)


def _send_to_all(world: World, text: str) -> None:
    """Send the reason `text` of the end to all other ranks, and wait up to SEND_SECONDS for their receipt."""
    body = np.frombuffer(encode_message(RankRaised(text)), np.uint8)
    under_way = [world.control.Issend(body, rank) for rank in range(world.comm.size) if rank != world.rank]
    limit = time.monotonic() + SEND_SECONDS
    while under_way and time.monotonic() < limit:
        under_way = [request for request in under_way if not request.Test()]
        time.sleep(1e-3)


def _exit_now(code: int) -> NoReturn:
    """End this process of a parameter server without MPI_Finalize."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def deadline(world: World, seconds: float) -> Iterator[None]:
    """End the process if a block that waits inside MPI for survivors of a loss takes longer than `seconds`."""

    def expire() -> None:
        print(
            f"adam_mpi: {world.place}: the surviving ranks did not agree on a membership within {seconds:g} s (every "
            "client must call step or wait at least that often); the job ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
