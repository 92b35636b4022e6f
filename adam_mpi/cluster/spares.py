"""Spares: new processes that stand by until the job takes them in.

One rank starts them, one by one, and nobody else waits for that. A spare imports, loads kernels and opens the data set
on its own; then it waits to be invited. When ranks find together in a new generation, spares join in a few
milliseconds each: they connect to a port that the rank which started them opens.

Each has a `Spawn` of its own: Open MPI ends all processes of a `Spawn` when one of them dies. It ends no process
because the one that started it dies, so a spare looks for that itself.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from adam_mpi.base.errors import RankFailure
from adam_mpi.cluster.layout import Place
from adam_mpi.cluster.messages import SparesReport

REST_SECONDS, LOOK_SECONDS = 0.01, 1.0
CALL, CALL_SECONDS, CALL_REST_SECONDS = "here?", 2.0, 0.001
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Invitation:
    """What a spare is told when it is taken in."""

    port: str
    born: int
    """Its number for life."""
    full: int
    """How many ranks the job should have."""
    doors: list[int]
    """The ranks that let in others after it."""
    gone: tuple[Place, ...]
    """Those whose loss has led to it."""


@dataclass(frozen=True)
class JoinPackage:
    """What a spare is given to get ready."""

    job: Any
    captured: tuple[str, ...]
    """Layers that push factors: kernels depend on it."""


@dataclass(eq=False)
class Spare:
    """A process that this rank has started."""

    link: MPI.Intercomm
    sent: MPI.Request
    """Of its luggage: kept until it is ready, so that what is under way stays in memory."""
    ordered: float
    ready: bool = False
    here: bool = False
    """Whether it has answered the last call."""
    host: str = ""
    pid: int = 0
    """What it has said first."""

    def end(self) -> None:
        """End it, which may be stopped: the launcher would wait for it for ever."""
        if self.pid and self.host == MPI.Get_processor_name():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


class Spares:
    """The spares of one rank; most ranks have none."""

    def __init__(self) -> None:
        self.held: list[Spare] = []
        self.ordered = 0
        """Those that are still to be started."""
        self.refused = False
        """Whether the launcher had no place for the last one."""
        self.started: list[dict[str, float]] = []
        """Seconds and CPU seconds that spares have taken to get ready, of those not told yet."""
        self.luggage: JoinPackage | None = None
        self.said = (0, 0, False)

    @property
    def ready(self) -> int:
        return sum(spare.ready for spare in self.held)

    def order(self, count: int) -> None:
        """Have so many more started."""
        self.ordered, self.refused = self.ordered + count, False

    def enter(self, luggage: JoinPackage) -> None:
        """Begin a generation: orders of the one before are void, and its head knows nothing of who stands by."""
        self.luggage, self.ordered, self.refused, self.said = luggage, 0, False, (0, 0, False)

    def look(self) -> bool:
        """Start one that is ordered, hear who is ready, forget who is dead; whether there is something to tell."""
        if self.ordered:
            self.ordered -= 1
            self._start()
        self.held = [spare for spare in self.held if self._lives(spare)]
        return self.said != self._state

    @property
    def _state(self) -> tuple[int, int, bool]:
        return self.ready, len(self.held) - self.ready + self.ordered, self.refused

    def report(self) -> SparesReport:
        """Return how many spares are ready, how many are starting, and what those started since the last report took."""
        self.said = self._state
        started = self.started
        self.started = []
        ready, coming, refused = self.said
        return SparesReport(ready, coming, refused, started)

    def _start(self) -> None:
        assert self.luggage is not None, "orders come after the generation has begun"
        job, began = self.luggage.job, time.monotonic()
        # `Spawn` never comes back when the new process dies before it has started MPI.
        guard = threading.Timer(job.config.recover.seconds, _give_up)
        guard.daemon = True
        guard.start()
        try:
            # They share the cores like the others do, whatever the launcher's own habit.
            info = MPI.Info.Create({"bind_to": "none"})
            words = ["-m", "adam_mpi", "join", str(job.directory.resolve())]
            link = quiet(quiet(MPI.COMM_SELF).Spawn(sys.executable, words, 1, info))
        except MPI.Exception as error:
            log.warning("no place for one more rank: %s", error.Get_error_string())
            self.refused, self.ordered = True, 0
            return
        finally:
            guard.cancel()
        self.held.append(Spare(link, link.isend(self.luggage, 0), began))

    def _lives(self, spare: Spare) -> bool:
        """Also hears whether it is ready."""
        try:
            if not spare.link.Iprobe(0):
                return True
            word = spare.link.recv(source=0)
            if not spare.host:
                spare.host, spare.pid = word
            elif not spare.ready:
                spare.ready = True
                self.started.append({"seconds": round(time.monotonic() - spare.ordered, 3), "cpu": round(word, 3)})
        except MPI.Exception as error:
            log.warning("a spare is gone: %s", error.Get_error_string())
            return False
        return True

    def call(self) -> int:
        """How many are ready and answer at once; for one that is dead or stopped, everybody would wait in vain."""
        asked = [spare for spare in self.held if spare.ready]
        here = self._ask(asked, CALL)
        self.held = [spare for spare in self.held if spare in here or not spare.ready]
        return len(here)

    def _ask(self, asked: Sequence[Spare], word: Any) -> list[Spare]:
        """Those who answer a word at once; the others are ended."""
        limit = time.monotonic() + CALL_SECONDS
        for spare in asked:
            spare.here = False
        silent = [spare for spare in asked if self._tell(spare, word)]
        while (silent := [spare for spare in silent if not self._answers(spare)]) and time.monotonic() < limit:
            time.sleep(CALL_REST_SECONDS)
        for spare in silent:
            log.warning("a spare, process %d on %s, does not answer and is ended", spare.pid, spare.host)
            spare.end()
        return [spare for spare in asked if spare.here]

    def _tell(self, spare: Spare, word: Any) -> bool:
        try:
            spare.link.send(word, 0)
        except MPI.Exception:
            return False
        return True

    def _answers(self, spare: Spare) -> bool:
        with suppress(MPI.Exception):
            if not spare.here and spare.link.Iprobe(0):
                spare.link.recv(source=0)
                spare.here = True
        return spare.here

    def invite(self, born: int, full: int, doors: Sequence[int], gone: tuple[Place, ...]) -> str:
        """Call one that is ready; returns the port that it connects to."""
        spare = next(spare for spare in self.held if spare.ready)
        self.held.remove(spare)
        port = MPI.Open_port()
        spare.link.send(Invitation(port, born, full, list(doors), gone), 0)
        return port

    def dismiss(self) -> None:
        """Send all away, in order, so that the launcher sees them end well."""
        # Whoever is not ready yet answers by saying that it is.
        for spare in self._ask(self.held, None):
            with suppress(MPI.Exception):
                spare.link.Disconnect()
        self.held = []


def _give_up() -> None:
    """End this rank, which hangs in MPI: the others go on without it."""
    log.error("a new rank could not be started, and the launcher does not say why; this rank ends")
    logging.shutdown()
    os.kill(os.getpid(), signal.SIGKILL)


def quiet(comm: Any) -> Any:
    """Errors of this communicator are raised."""
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def doors(ready: Sequence[int], missing: int) -> list[int]:
    """The ranks that let one in each, in order: `ready` has how many stand by at each rank. Pure."""
    return [rank for rank, count in enumerate(ready) for _ in range(count)][: max(0, missing)]


def let_in(comm: MPI.Intracomm, holder: int, port: str = "") -> MPI.Intracomm:
    """Collective: the same with one rank more, who connects to the port that rank `holder` has opened."""
    merged = quiet(quiet(comm.Accept(port, root=holder)).Merge(high=False))
    if comm.rank == holder:
        MPI.Close_port(port)
    # A later failure is handled well on the duplicate of a merged communicator only.
    return quiet(merged.Dup())


def come_in(invitation: Invitation) -> MPI.Intracomm:
    """Collective with `let_in` of the others."""
    merged = quiet(quiet(quiet(MPI.COMM_SELF).Connect(invitation.port)).Merge(high=True))
    comm = quiet(merged.Dup())
    for holder in invitation.doors:
        comm = let_in(comm, holder)
    return comm


def hear(link: MPI.Intercomm, over: Callable[[], bool]) -> Any:
    """Of a spare: the next word of the rank that has started it; raises when that is gone or the job is `over`.

    Calls are answered on the way.
    """
    looked, rest = 0.0, REST_SECONDS
    while True:
        try:
            if link.Iprobe(0):
                if (word := link.recv(source=0)) != CALL:
                    return word
                link.send(CALL, 0)
                rest = CALL_REST_SECONDS
        except MPI.Exception as error:
            raise RankFailure(f"the rank that has started this one is gone: {error.Get_error_string()}") from None
        if time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            if over():
                raise RankFailure("the job is over")
            rest = REST_SECONDS
        time.sleep(rest)
