"""The world of one generation: its members, their roles, and the communicators between them."""

import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from mpi4py import MPI

from adam_mpi.cluster import layout
from adam_mpi.cluster.inject import Injector, parse
from adam_mpi.config import Config
from adam_mpi.errors import RankFailure

# MPICH moves a one-sided transfer on by one small piece per call: one call between two rests takes 0.3 s for 1 MB.
POLLS = 8
log = logging.getLogger(__name__)


class Interrupted(Exception):
    """Somebody asked the job to end (Ctrl-C, or the launcher's TERM)."""


class World:
    generation = 0

    def __init__(
        self, comm: MPI.Comm, config: Config, arrange: Callable[..., layout.Layout] = layout.arrange
    ) -> None:
        """Collective over `comm`: the one place, with `finish`, where ranks wait for each other in MPI itself."""
        self.config = config
        self.comm = self._quiet(comm.Dup())
        self.node = self._quiet(self.comm.Split_type(MPI.COMM_TYPE_SHARED))
        self.hosts = self._hosts()
        self.layout = arrange(self.hosts, config.layout)
        self.place = self.layout.places[self.comm.rank]
        # One communicator per purpose, so that control, data and parameters never meet in a queue.
        self.control, self.traffic = self._quiet(self.comm.Dup()), self._quiet(self.comm.Dup())
        self.roles = {role: self._members(role in self.place.roles) for role in ("data", "worker", "server")}
        self.replica = self._members(self.place.replica is not None, self.place.replica or 0)
        self.injector = Injector(parse(config.inject.faults), self.place, config.run.seed)
        self.signal: int | None = None
        self.asked = 0
        """How often somebody has asked for a snapshot."""

    @property
    def rank(self) -> int:
        return self.comm.rank

    def _quiet(self, comm: MPI.Comm) -> Any:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm

    def _members(self, belongs: bool, color: int = 0) -> MPI.Comm | None:
        comm = self.comm.Split(color if belongs else MPI.UNDEFINED, self.comm.rank)
        return None if comm == MPI.COMM_NULL else self._quiet(comm)

    def _hosts(self) -> list[str]:
        """A name per rank, different for every shared-memory node even where two nodes give the same name."""
        leader = self.node.bcast(self.comm.rank)
        nodes = self.comm.allgather((MPI.Get_processor_name(), leader))
        leaders = {name: sorted({lead for other, lead in nodes if other == name}) for name, _ in nodes}
        return [name if len(leaders[name]) == 1 else f"{name}-{leaders[name].index(lead)}" for name, lead in nodes]

    def catch_signals(self) -> None:
        """Note Ctrl-C and TERM: the next check ends this rank in order. USR1 asks for a snapshot: the head hears it."""

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)

        def ask(number: int, frame: FrameType | None) -> None:
            self.asked += 1

        signal.signal(signal.SIGUSR1, ask)

    @property
    def survivable(self) -> bool:
        """Whether the others can go on without a rank that is lost: Open MPI, started by mpirun --with-ft ulfm."""
        return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"

    def check(self) -> None:
        """Drive MPI's progress, and raise when a member is dead or the job is asked to end."""
        if self.signal is not None:
            raise Interrupted(signal.Signals(self.signal).name)
        try:
            for _ in range(POLLS):
                self.comm.Iprobe()
        except MPI.Exception as error:
            raise RankFailure(self.describe(error)) from None

    def describe(self, error: MPI.Exception) -> str:
        """Who is dead, as far as MPI can say."""
        try:
            failed = self.comm.Get_failed()
            dead = MPI.Group.Translate_ranks(failed, list(range(failed.size)), self.comm.Get_group())
        except (MPI.Exception, NotImplementedError):
            dead = []
        return "; ".join(f"{self.layout.places[rank]} is gone" for rank in dead) or error.Get_error_string()

    def wait(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Poll until done; says what it waited for when that takes too long."""
        start, idle = time.monotonic(), Idle(self.config.cluster.poll)
        while not done():
            self.check()
            idle.back_off(False)
            if time.monotonic() - start > seconds:
                raise RankFailure(f"{self.place} waited {seconds:g} s for {what}")

    def finish(self) -> None:
        """The last thing of a job that went well: everybody is here."""
        self.wait(self.comm.Ibarrier().Test, "all ranks to finish", self.config.cluster.seconds)


class Idle:
    """What a loop does between two rounds: nothing after work; else a short spin, then sleeps of up to 2 ms.

    After about half a second without work they are longer: a late start is then a small part of the wait.
    """

    SPINS, SHORTEST, LONGEST = 20, 50e-6, 2e-3
    PATIENCE, REST = 250, 8e-3

    def __init__(self, poll: str) -> None:
        self.spin = poll == "spin"
        self.rounds = 0

    def back_off(self, worked: bool) -> None:
        self.rounds = 0 if worked else self.rounds + 1
        if worked or self.spin:
            return
        if self.rounds < self.SPINS:
            time.sleep(0)
        elif self.rounds < self.PATIENCE:
            time.sleep(min(self.LONGEST, self.SHORTEST * 2 ** min(self.rounds - self.SPINS, 10)))
        else:
            time.sleep(self.REST)
