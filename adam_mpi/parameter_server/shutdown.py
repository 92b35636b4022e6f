"""The end of a program that has parameter servers open: whoever fails takes the others along, by name.

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
from adam_mpi.cluster.messages import RankRaised, encode
from adam_mpi.cluster.world import World

TELL_SECONDS = 5.0
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Open(Protocol):
    """Something that others wait for until it is closed."""

    world: World


@dataclass
class Watch:
    """Over this process."""

    open: list[Open] = field(default_factory=list)
    code: int = 0
    """With which it ends."""
    broken: bool = False
    """Whether a rank was lost, so that MPI cannot be ended in order."""
    begun: bool = False


_watch = Watch()


def opened(server: Open) -> None:
    """Keep watch over the program from now on, until `closed`."""
    if not _watch.begun:
        _watch.begun = True
        atexit.register(_at_exit)
        sys.excepthook = partial(_uncaught, sys.excepthook)
    _watch.open.append(server)


def closed(server: Open) -> None:
    """Whoever fails from now on is not missed."""
    if server in _watch.open:
        _watch.open.remove(server)
    _watch.broken |= server.world.broken


def _uncaught(before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """In place of the hook `before`, which is for programs that nobody waits for."""
    _watch.code = 1
    if _watch.open:
        end(_watch.open[-1].world, error.with_traceback(trace))
    else:
        before(kind, error, trace)


def _at_exit() -> None:
    """Before MPI's own end, which would wait for ranks that are dead or do not come."""
    if _watch.open:
        world = _watch.open[-1].world
        _end(world, f"{world.place} left without close(); the job ends", tell=True)
    if _watch.broken:
        _leave(_watch.code)


def end(world: World, error: BaseException) -> None:
    """Say what ends the job, and end it everywhere; alone, only say it."""
    if isinstance(error, JobEnded):
        # Whoever has raised has said it.
        _end(world, "", tell=False)
    elif isinstance(error, LostState | RankFailure | MPI.Exception):
        # The others know.
        _end(world, f"{world.place}: {error}", tell=False)
    else:
        trace = "".join(traceback.format_exception(error)).rstrip()
        _end(world, f"{world.place} raised; the job ends\n{trace}", tell=True)


def _end(world: World, text: str, tell: bool) -> None:
    if text:
        print(f"adam_mpi: {text}", file=sys.stderr, flush=True)
    if MPI.Is_finalized() or world.comm.size == 1:
        return
    if not world.survivable:
        MPI.COMM_WORLD.Abort(1)
    if tell:
        with suppress(MPI.Exception):
            _tell(world, text.partition("\n")[0])
        # With --with-ft ulfm an exit is not heard of; a death reaches those who wait for us inside MPI.
        os.kill(os.getpid(), signal.SIGKILL)
    # But mpirun takes a death for nothing out of the ordinary: those who were told give it a code.
    _leave(1)


def _tell(world: World, text: str) -> None:
    """Tell everybody, and wait for a while until they have taken it in."""
    body = np.frombuffer(encode(RankRaised(text)), np.uint8)
    under_way = [world.control.Issend(body, rank) for rank in range(world.comm.size) if rank != world.rank]
    limit = time.monotonic() + TELL_SECONDS
    while under_way and time.monotonic() < limit:
        under_way = [request for request in under_way if not request.Test()]
        time.sleep(1e-3)


def _leave(code: int) -> NoReturn:
    """Without MPI's own end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def watched(world: World, seconds: float) -> Iterator[None]:
    """Something that waits inside MPI for every rank that is left: it ends the process if that takes too long."""

    def late() -> None:
        advice = "every client must call step or wait at least that often"
        print(
            f"adam_mpi: {world.place}: the ranks that are left did not find together in {seconds:g} s ({advice}); "
            "the job ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
