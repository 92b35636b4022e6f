"""The world of one generation: its members, their roles, and the communicators between them."""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from mpi4py import MPI

from adam_mpi.base.errors import RankFailure
from adam_mpi.cluster import layout, spares
from adam_mpi.cluster.fault_injection import Injector, check, parse
from adam_mpi.cluster.role_assignment import go_on
from adam_mpi.cluster.spares import Spares
from adam_mpi.config import Config

# MPICH moves a one-sided transfer on by one small piece per call: one call between two rests takes 0.3 s for 1 MB.
POLLS = 8
log = logging.getLogger(__name__)


def gather(comm: MPI.Comm, word: Any) -> list[Any]:
    """Collective: everybody's word. When a rank is lost meanwhile, MPI may hand over what is no word at all."""
    try:
        return comm.allgather(word)
    except MPI.Exception:
        raise
    except Exception as error:
        raise RankFailure(f"a word of another rank did not arrive whole: {error}") from None


class Interrupted(Exception):
    """Somebody asked the job to end (Ctrl-C, or the launcher's TERM)."""


class World:
    def __init__(
        self,
        comm: MPI.Comm,
        config: Config,
        arrange: Callable[..., layout.Layout] = layout.arrange,
        before: "World | None" = None,
        born: layout.Place | None = None,
    ) -> None:
        """Collective over `comm`: the one place, with `finish`, where ranks wait for each other in MPI itself.

        `before` is the world of the generation that has ended, or `born` what a rank that joins is known by.
        Everything is made out of `comm` alone, so that a rank that finds another one dead in here reaches all the
        others by revoking it.
        """
        self.config = config
        known = before.place if before else born
        self.generation: int = before.generation if before else -1
        self.sentinel: str | None = before.sentinel if before else None
        """Where the sentinel of this host listens, once there is one."""
        self.comm = self._quiet(comm if known else comm.Dup())
        self.node = self._quiet(self.comm.Split_type(MPI.COMM_TYPE_SHARED))
        # One communicator per purpose, so that control, data and parameters never meet in a queue.
        self.control, self.traffic = self._quiet(self.comm.Dup()), self._quiet(self.comm.Dup())
        self.hosts, kept = self._meet(known)
        self.layout = go_on(self.hosts, kept, config.layout) if kept else arrange(self.hosts, config.layout)
        self.place: layout.Place = self.layout.places[self.comm.rank]
        self.replica = self._members()
        faults = parse(config.inject.faults)
        if not known:
            check(faults, self.layout.places)
        self.injector: Injector = before.injector if before else Injector(faults, self.place, config.run.seed)
        self.gone: tuple[layout.Place, ...] = ()
        """Who was lost since the last generation in which everybody began to work."""
        self.begun = False
        self.broken = self.generation > 0
        """Whether a rank was lost: MPI cannot be ended in order any more."""
        self.spares: Spares = before.spares if before else Spares()
        """Those who stand by, of the ones that this rank has started."""
        self.full: int = self.comm.size
        """How many ranks the job should have."""
        self.evicted: list[int] = []
        """Processes on this host that were taken for dead."""
        self.highest: int = max([before.highest if before else 0, *(place.member for place in self.layout.places)])
        """Numbers for life that were given so far."""
        self.signal: int | None = before.signal if before else None
        self.asked: int = before.asked if before else 0
        """How often somebody has asked for a snapshot."""

    @property
    def rank(self) -> int:
        return self.comm.rank

    def _quiet(self, comm: MPI.Comm) -> Any:
        return spares.quiet(comm)

    def _members(self) -> MPI.Comm | None:
        """Of our replica, in the order of its strips; a strip may be taken over by any rank."""
        place = self.place
        comm = self.comm.Split(MPI.UNDEFINED if place.replica is None else place.replica, place.strip or 0)
        return None if comm == MPI.COMM_NULL else self._quiet(comm)

    def _meet(self, known: layout.Place | None) -> tuple[list[str], list[layout.Place]]:
        """The hosts of all ranks, and what they did in the generation before if there was one.

        Hosts have a name each, different for every shared-memory node even where two nodes give the same name.
        """
        nodes = MPI.Group.Translate_ranks(self.node.Get_group(), None, self.comm.Get_group())
        word = MPI.Get_processor_name(), min(nodes), self.generation, os.getpid(), self.sentinel, known
        told = gather(self.comm, word)
        self.generation = 1 + max(word[2] for word in told)
        self.pids = [word[3] for word in told]
        leaders = {name: sorted({lead for other, lead, *_ in told if other == name}) for name, *_ in told}
        hosts = [name if len(leaders[name]) == 1 else f"{name}-{leaders[name].index(lead)}" for name, lead, *_ in told]
        here = [path for _, lead, _, _, path, _ in told if lead == min(nodes) and path]
        self.sentinel = self.sentinel or next(iter(here), None)
        return hosts, [place for *_, place in told if place is not None]

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
        return self.generation > 0 or os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"

    def recover(self, full: int = 0) -> "World":
        """Leave this generation with all who are still there; the world of the next one, with who stands by to join.

        Those who stand by are taken in up to `full` ranks, as far as that is more than the job has had so far.
        A loop: whoever is lost while the next world is made is left behind by the one after it.
        """
        comm = self.comm
        while True:
            comm.Revoke()
            comm = self._quiet(comm.Shrink())
            self.injector.at("recover")
            try:
                comm, wanted = self._take_in(comm, full)
                world = World(comm, self.config, before=self)
                world.agree()
            except (MPI.Exception, RankFailure) as error:
                log.warning("another rank was lost meanwhile: %s", error)
                continue
            world.full = wanted if self.config.recover.replaces else comm.size
            lost = self._lost([place.member for place in world.layout.places])
            world.gone = *(() if self.begun else self.gone), *lost
            world.evicted = [*self.evicted, *(self.pids[p.rank] for p in lost if p.host == self.place.host)]
            world.catch_signals()
            return world

    def _take_in(self, comm: MPI.Intracomm, full: int) -> tuple[MPI.Intracomm, int]:
        """Collective: with as many ranks more as are missing, of those who stand by; and how many there should be."""
        next_member = 1 + max([self.highest, *(place.member for place in self.layout.places)])
        told = gather(comm, (self.spares.call(), max(full, self.full), next_member, self.place.member))
        full, born = max(word[1] for word in told), max(word[2] for word in told)
        doors = spares.doors([word[0] for word in told], full - comm.size)
        # Whoever joins may be the next head, who tells of the loss.
        gone = *(() if self.begun else self.gone), *self._lost([word[3] for word in told])
        for number, holder in enumerate(doors):
            port = ""
            if comm.rank == holder:
                port = self.spares.invite(born + number, full, doors[number + 1 :], gone)
            comm = spares.let_in(comm, holder, port)
        return comm, full

    def _lost(self, members: Sequence[int]) -> list[layout.Place]:
        """Who of this generation is not among these."""
        return [place for place in self.layout.places if place.member not in members]

    def end_evicted(self) -> None:
        """Those on this host who were taken for dead, and are only stopped, would keep the launcher waiting."""
        for pid in self.evicted:
            with suppress(OSError, ValueError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getppid():
                    os.kill(pid, signal.SIGKILL)

    def agree(self) -> None:
        """Collective, where a rank may be lost: everybody is here, or everybody raises.

        A window with a dead member crashes.
        """
        if not self.survivable:
            return
        try:
            self.comm.Agree(1)
        except MPI.Exception as error:
            raise RankFailure(self.describe(error)) from None
        if self.comm.Is_revoked():
            raise RankFailure("somebody has left this generation")

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
    """What a loop does between two rounds: nothing after work; else a short spin, then it rests for up to 2 ms.

    A late start is a small part of the wait: an eighth at the most, and after half a second rests are longer. One that
    is `patient` rests a millisecond at once: nobody stands still meanwhile, and trainer threads may want the core.
    """

    SPINS, SHARE, SHORTEST, LONGEST = 20, 1 / 8, 50e-6, 2e-3
    PATIENCE, LONGER, PATIENT = 0.5, 8e-3, 1e-3

    def __init__(self, poll: str, rest: Callable[[float], None] = time.sleep, patient: bool = False) -> None:
        self.spin, self.rest = poll == "spin", rest
        self.spins, self.shortest = (1, self.PATIENT) if patient else (self.SPINS, self.SHORTEST)
        self.rounds, self.since = 0, time.perf_counter()

    def back_off(self, worked: bool) -> None:
        if worked:
            self.rounds, self.since = 0, time.perf_counter()
        if worked or self.spin:
            return
        self.rounds += 1
        if self.rounds < self.spins:
            time.sleep(0)
            return
        waited = time.perf_counter() - self.since
        longest = self.LONGEST if waited < self.PATIENCE else self.LONGER
        self.rest(min(longest, max(self.shortest, waited * self.SHARE)))
