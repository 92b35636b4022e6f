"""Spare processes: started in advance, they wait until the job admits them as ranks.

One rank starts them, one by one, while the other ranks continue. A spare imports, loads kernels and opens the data set
on its own; then it waits for an invitation. When ranks agree on a new membership, spares join in a few milliseconds
each: they connect to a port that the rank which has started them opens.

Each spare has a `Spawn` of its own: Open MPI ends all processes of a `Spawn` when one of them dies. It does not end a
process when the rank that started it dies, so a spare checks that itself.
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
from adam_mpi.cluster.control_messages import SparesReport
from adam_mpi.cluster.layout import Place

PING = "ping"
"""The message by which a rank asks whether a spare responds, and the answer."""
PING_SECONDS = 2.0
"""Seconds in which a spare must answer."""
PING_REST_SECONDS = 0.001
REST_SECONDS = 0.01
"""Seconds that a spare sleeps between two looks for a message, after a ping and otherwise."""
OVER_SECONDS = 1.0
"""Seconds between two checks of a spare whether the job is over."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinPackage:
    """What a spare needs to get ready."""

    job: Any
    captured: tuple[str, ...]
    """Layers that push factors, on which kernels depend."""


@dataclass(frozen=True)
class Invitation:
    """What a spare needs to join."""

    port: str
    """The port to connect to."""
    member: int
    """Its member number."""
    full: int
    """Number of ranks that the job should have."""
    holders: list[int]
    """The ranks that admit further spares after it."""
    lost: tuple[Place, ...]
    """The ranks whose loss led to the invitation."""


@dataclass(eq=False)
class Spare:
    """A spare process that this rank has started."""

    link: MPI.Intercomm
    sent: MPI.Request
    """The send of its join package, kept because the package must stay in memory until it is sent."""
    ordered: float
    """When it was started."""
    ready: bool = False
    responds: bool = False
    """Whether it has answered the last ping."""
    host: str = ""
    pid: int = 0

    def kill(self) -> None:
        """Kill the spare process if it is on this host: a stopped one would keep the launcher waiting forever."""
        if self.pid and self.host == MPI.Get_processor_name():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


class Spares:
    """The spares that one rank has started; most ranks have none."""

    def __init__(self) -> None:
        self.held: list[Spare] = []
        self.ordered = 0
        """Number of spares still to be started."""
        self.refused = False
        """Whether the launcher had no slot for the last one."""
        self.started: list[dict[str, float]] = []
        """Seconds and CPU seconds that spares took to get ready, for the next report."""
        self.join_package: JoinPackage | None = None
        self.reported = (0, 0, False)

    @property
    def ready(self) -> int:
        """Return the number of spares that are ready to join."""
        return sum(spare.ready for spare in self.held)

    @property
    def _state(self) -> tuple[int, int, bool]:
        """Return how many spares are ready, how many are starting, and whether the launcher refused one."""
        return self.ready, len(self.held) - self.ready + self.ordered, self.refused

    def begin_generation(self, join_package: JoinPackage) -> None:
        """Drop the previous coordinator's orders for spares; the new one gets a first report and orders again."""
        self.join_package = join_package
        self.ordered = 0
        self.refused = False
        self.reported = (0, 0, False)

    def order(self, count: int) -> None:
        """Order `count` more spare processes to be started."""
        self.ordered += count
        self.refused = False

    def poll(self) -> bool:
        """Start an ordered spare, note which spares are ready and drop dead ones; return whether there is news."""
        if self.ordered:
            self.ordered -= 1
            self._start()
        self.held = [spare for spare in self.held if self._receive(spare)]
        return self.reported != self._state

    def report(self) -> SparesReport:
        """Return how many spares are ready and starting, and how long those ready since the last report took."""
        self.reported = self._state
        started = self.started
        self.started = []
        ready, coming, refused = self.reported
        return SparesReport(ready, coming, refused, started)

    def _start(self) -> None:
        """Start a spare process by `MPI_Comm_spawn`."""
        assert self.join_package is not None, "orders come after the generation has begun"
        job = self.join_package.job
        began = time.monotonic()
        # `Spawn` never returns when the new process dies before it has started MPI.
        guard = threading.Timer(job.config.recover.seconds, _kill_self)
        guard.daemon = True
        guard.start()
        try:
            # Spares share the cores like the other ranks, whatever the launcher's default binding.
            info = MPI.Info.Create({"bind_to": "none"})
            arguments = ["-m", "adam_mpi", "join", str(job.directory.resolve())]
            link = return_errors(return_errors(MPI.COMM_SELF).Spawn(sys.executable, arguments, 1, info))
        except MPI.Exception as error:
            log.warning("the launcher has no slot for another rank; no more are ordered: %s", error.Get_error_string())
            self.refused = True
            self.ordered = 0
            return
        finally:
            guard.cancel()
        self.held.append(Spare(link, link.isend(self.join_package, 0), began))

    def _receive(self, spare: Spare) -> bool:
        """Receive what `spare` reports: first where it runs, then that it is ready; return whether it lives."""
        try:
            if not spare.link.Iprobe(0):
                return True
            message = spare.link.recv(source=0)
        except MPI.Exception as error:
            log.warning("a spare is gone: %s", error.Get_error_string())
            return False
        if not spare.host:
            spare.host, spare.pid = message
        elif not spare.ready:
            spare.ready = True
            self.started.append({"seconds": round(time.monotonic() - spare.ordered, 3), "cpu": round(message, 3)})
        return True

    def count_responding(self) -> int:
        """Return how many ready spares answer a ping; the others are dropped, or all ranks would wait for them."""
        asked = [spare for spare in self.held if spare.ready]
        responding = self._request(asked, PING)
        self.held = [spare for spare in self.held if spare in responding or not spare.ready]
        return len(responding)

    def _request(self, asked: Sequence[Spare], message: Any) -> list[Spare]:
        """Send `message` to the spares in `asked` and return those that answer in time; the others are killed."""
        limit = time.monotonic() + PING_SECONDS
        for spare in asked:
            spare.responds = False
        silent = [spare for spare in asked if self._send(spare, message)]
        while (silent := [spare for spare in silent if not self._answers(spare)]) and time.monotonic() < limit:
            time.sleep(PING_REST_SECONDS)
        for spare in silent:
            log.warning("a spare, process %d on %s, does not answer and is killed", spare.pid, spare.host)
            spare.kill()
        return [spare for spare in asked if spare.responds]

    def _send(self, spare: Spare, message: Any) -> bool:
        """Send `message` to `spare`; return whether that was possible."""
        try:
            spare.link.send(message, 0)
        except MPI.Exception:
            return False
        return True

    def _answers(self, spare: Spare) -> bool:
        """Return whether `spare` has answered."""
        with suppress(MPI.Exception):
            if not spare.responds and spare.link.Iprobe(0):
                spare.link.recv(source=0)
                spare.responds = True
        return spare.responds

    def invite(self, invitation: Invitation) -> None:
        """Send `invitation` to a spare that is ready."""
        spare = next(spare for spare in self.held if spare.ready)
        self.held.remove(spare)
        spare.link.send(invitation, 0)

    def dismiss(self) -> None:
        """Have all spares end in order, so that the launcher sees them succeed."""
        # A spare that is not ready yet answers by the message that it is.
        for spare in self._request(self.held, None):
            with suppress(MPI.Exception):
                spare.link.Disconnect()
        self.held = []


def _kill_self() -> None:
    """Kill this rank, which hangs in MPI while spares join: the other ranks continue without it."""
    log.error("the launcher did not start a new rank in time; this rank hangs in MPI and is killed")
    logging.shutdown()
    os.kill(os.getpid(), signal.SIGKILL)


def return_errors(comm: Any) -> Any:
    """Have errors of the communicator `comm` raised as exceptions, and return it; spares need that too.

    It is untyped because mpi4py declares what splits and merges a communicator as `Comm` only.
    """
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def admitting_ranks(ready: Sequence[int], missing: int) -> list[int]:
    """Return, in order, the rank that admits each of up to `missing` spares; rank n has `ready[n]` of them."""
    return [rank for rank, count in enumerate(ready) for _ in range(count)][: max(0, missing)]


def admit(comm: MPI.Intracomm, holder: int, port: str = "") -> MPI.Intracomm:
    """Return `comm` with one spare more, which connects to the `port` that rank `holder` has opened (collective)."""
    merged = return_errors(return_errors(comm.Accept(port, root=holder)).Merge(high=False))
    if comm.rank == holder:
        MPI.Close_port(port)
    # A later failure is handled well only on a duplicate of a merged communicator.
    return return_errors(merged.Dup())


def join_job(invitation: Invitation) -> MPI.Intracomm:
    """Return the communicator of the job that this spare joins (collective with `admit` of the other ranks)."""
    link = return_errors(return_errors(MPI.COMM_SELF).Connect(invitation.port))
    merged = return_errors(link.Merge(high=True))
    comm = return_errors(merged.Dup())
    for holder in invitation.holders:
        comm = admit(comm, holder)
    return comm


def receive(link: MPI.Intercomm, over: Callable[[], bool]) -> Any:
    """Return the next message that a spare gets over `link` from the rank that started it; answer pings.

    Raises RankFailure when that rank is gone or `over` returns that the job has ended.
    """
    checked = 0.0
    rest = REST_SECONDS
    while True:
        try:
            if link.Iprobe(0):
                message = link.recv(source=0)
                if message != PING:
                    return message
                link.send(PING, 0)
                rest = PING_REST_SECONDS
        except MPI.Exception as error:
            raise RankFailure(f"the rank that has started this one is gone: {error.Get_error_string()}") from None
        if time.monotonic() - checked > OVER_SECONDS:
            checked = time.monotonic()
            if over():
                raise RankFailure("the job is over")
            rest = REST_SECONDS
        time.sleep(rest)
