"""The world of one generation: its members, their roles, and the communicators between them."""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mpi4py import MPI

from adam_mpi.base.errors import RankFailure
from adam_mpi.cluster import layout, spares
from adam_mpi.cluster.fault_injection import Injector, check_faults, parse_faults
from adam_mpi.cluster.idle import Idle
from adam_mpi.cluster.layout import reassign_roles
from adam_mpi.cluster.spares import Invitation, Spares, return_errors
from adam_mpi.config import Config

# MPICH advances a one-sided transfer by one small piece per call: one call between two rests takes 0.3 s for 1 MB.
POLLS = 8
log = logging.getLogger(__name__)


def gather(comm: MPI.Comm, value: Any) -> list[Any]:
    """Return the `value` of every rank of `comm` (collective).

    Raises RankFailure when a rank is lost meanwhile and MPI returns bytes that are no value.
    """
    try:
        return comm.allgather(value)
    except MPI.Exception:
        raise
    except Exception as error:
        raise RankFailure(f"a value gathered from another rank arrived incomplete: {error}") from None


class Interrupted(Exception):
    """The job was asked to end, by Ctrl-C or by the launcher's TERM."""


class Presence(NamedTuple):
    """What each rank reports of itself when a generation begins."""

    processor: str
    node: int
    """The lowest rank of its shared-memory node."""
    generation: int
    """The generation that it leaves, -1 if there was none."""
    pid: int
    sentinel: str | None
    place: layout.Place | None
    """Its place in that generation, or what a rank that joins is known by."""


class Standing(NamedTuple):
    """What each surviving rank reports before spares are admitted."""

    spares: int
    """Spares of this rank that are ready and respond."""
    full: int
    """Number of ranks that the job should have."""
    next_member: int
    """The first member number that was never used."""
    member: int


def _survives_losses() -> bool:
    """Return whether the MPI of this process continues when a rank is lost."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"


class World:
    """The ranks of one generation as this rank sees them: communicators, hosts, layout, and its own place."""

    def __init__(
        self,
        comm: MPI.Comm,
        config: Config,
        arrange: Callable[..., layout.Layout] = layout.arrange,
        before: "World | None" = None,
        joining: layout.Place | None = None,
    ) -> None:
        """Make the world of the ranks of `comm` (collective).

        `before` is the world of the previous generation, or `joining` what a rank that joins is known by. Here and in
        `finish` alone ranks wait for each other inside MPI. All communicators are made from `comm`, so that a rank that
        finds another one dead reaches all the others by revoking `comm`.
        """
        self.config = config
        known = before.place if before else joining
        self.generation: int = before.generation if before else -1
        self.sentinel: str | None = before.sentinel if before else None
        """The socket of this host's sentinel, once there is one."""
        self.comm = return_errors(comm if known else comm.Dup())
        self.node = return_errors(self.comm.Split_type(MPI.COMM_TYPE_SHARED))
        # One communicator per purpose, so that control, data and parameters never share a queue.
        self.control = return_errors(self.comm.Dup())
        self.traffic = return_errors(self.comm.Dup())
        self.hosts, places = self._meet(known)
        """The host of each rank; every shared-memory node counts as a host."""
        self.layout = (
            reassign_roles(self.hosts, places, config.layout) if places else arrange(self.hosts, config.layout)
        )
        self.place: layout.Place = self.layout.places[self.comm.rank]
        self.replica = self._replica_communicator()
        """The communicator of this worker's replica, in the order of its strips; None on other ranks."""
        faults = parse_faults(config.inject.faults)
        if not known:
            check_faults(faults, self.layout.places)
        self.injector: Injector = before.injector if before else Injector(faults, self.place, config.run.seed)
        self.lost: tuple[layout.Place, ...] = ()
        """Ranks lost since the last generation in which all ranks started to work."""
        self.started = False
        """Whether all ranks have started to work in this generation."""
        self.broken = self.generation > 0
        """Whether a rank was lost: then MPI cannot be finalized in order."""
        self.spares: Spares = before.spares if before else Spares()
        """The spares that this rank has started."""
        self.full: int = self.comm.size
        """Number of ranks that the job should have."""
        self.evicted: list[int] = []
        """Processes on this host that were declared dead."""
        self.survivable: bool = before.survivable if before else joining is not None or _survives_losses()
        """Whether the job can continue without a lost rank: Open MPI, started by mpirun --with-ft ulfm."""
        self.highest: int = max([before.highest if before else 0, *(place.member for place in self.layout.places)])
        """The highest member number used so far."""
        self.signal: int | None = before.signal if before else None
        """The signal by which the job was asked to end."""
        self.snapshot_requests: int = before.snapshot_requests if before else 0

    @property
    def rank(self) -> int:
        """Return the rank of this process in this generation."""
        return self.comm.rank

    def _meet(self, known: layout.Place | None) -> tuple[list[str], list[layout.Place]]:
        """Return the hosts of the ranks of this world, and the places of those that had one in the generation before.

        Hosts get different names where two shared-memory nodes have the same processor name.
        """
        node = min(MPI.Group.Translate_ranks(self.node.Get_group(), None, self.comm.Get_group()))
        own = Presence(
            MPI.Get_processor_name(), node, self.generation, os.getpid(), sentinel=self.sentinel, place=known
        )
        ranks: list[Presence] = gather(self.comm, own)
        self.generation = 1 + max(rank.generation for rank in ranks)
        self.pids = [rank.pid for rank in ranks]
        if self.sentinel is None:
            self.sentinel = next((rank.sentinel for rank in ranks if rank.node == node and rank.sentinel), None)
        nodes = {name: sorted({rank.node for rank in ranks if rank.processor == name}) for name, *_ in ranks}
        hosts = [
            rank.processor
            if len(nodes[rank.processor]) == 1
            else f"{rank.processor}-{nodes[rank.processor].index(rank.node)}"
            for rank in ranks
        ]
        return hosts, [rank.place for rank in ranks if rank.place is not None]

    def _replica_communicator(self) -> MPI.Comm | None:
        """Make the communicator between the strips of this rank's replica."""
        color = MPI.UNDEFINED if self.place.replica is None else self.place.replica
        # The strip is the key: after a recovery any rank may hold any strip.
        comm = self.comm.Split(color, self.place.strip or 0)
        return None if comm == MPI.COMM_NULL else return_errors(comm)

    def catch_signals(self) -> None:
        """Note the signals Ctrl-C and TERM, which end this rank at its next check, and count USR1 (a snapshot)."""

        def note_end(number: int, frame: FrameType | None) -> None:
            self.signal = number

        def count_request(number: int, frame: FrameType | None) -> None:
            self.snapshot_requests += 1

        signal.signal(signal.SIGINT, note_end)
        signal.signal(signal.SIGTERM, note_end)
        signal.signal(signal.SIGUSR1, count_request)

    def recover(self, full: int = 0) -> "World":
        """Leave this generation with all surviving ranks and return the world of the next (collective).

        Spares join until the job has `full` ranks, or as many as it has had so far if that is more. A rank that is lost
        while the next world is made is left behind by the world after it.
        """
        comm = self.comm
        while True:
            comm.Revoke()
            comm = return_errors(comm.Shrink())
            self.injector.at("recover")
            try:
                comm, wanted = self._admit_spares(comm, full)
                world = World(comm, self.config, before=self)
                world.agree()
            except (MPI.Exception, RankFailure) as error:
                log.warning("another rank was lost during recovery, which starts over: %s", error)
                continue
            world.full = wanted if self.config.recover.replaces else comm.size
            members = [place.member for place in world.layout.places]
            world.lost = self._lost_without(members)
            dead = [place for place in self.layout.places if place.member not in members]
            world.evicted = [*self.evicted, *(self.pids[place.rank] for place in dead if place.host == self.place.host)]
            world.catch_signals()
            return world

    def renew(self) -> "World":
        """Leave this generation, in which no rank is lost, and return the world of the next (collective)."""
        world = World(self.comm.Dup(), self.config, before=self)
        world.broken = self.broken
        world.catch_signals()
        return world

    def _admit_spares(self, comm: MPI.Intracomm, full: int) -> tuple[MPI.Intracomm, int]:
        """Return `comm` with the missing ranks added from responding spares, and the full number (collective)."""
        next_member = 1 + max([self.highest, *(place.member for place in self.layout.places)])
        own = Standing(self.spares.count_responding(), max(full, self.full), next_member, self.place.member)
        ranks: list[Standing] = gather(comm, own)
        full = max(rank.full for rank in ranks)
        first_member = max(rank.next_member for rank in ranks)
        holders = spares.admitting_ranks([rank.spares for rank in ranks], full - comm.size)
        # A rank that joins may be the next coordinator, which reports the loss.
        lost = self._lost_without([rank.member for rank in ranks])
        for number, holder in enumerate(holders):
            port = ""
            if comm.rank == holder:
                port = MPI.Open_port()
                self.spares.invite(Invitation(port, first_member + number, full, holders[number + 1 :], lost))
            comm = spares.admit(comm, holder, port)
        return comm, full

    def _lost_without(self, members: Sequence[int]) -> tuple[layout.Place, ...]:
        """Return the ranks lost since all ranks last started to work, if only `members` of this generation survive."""
        earlier = () if self.started else self.lost
        return *earlier, *(place for place in self.layout.places if place.member not in members)

    def kill_evicted(self) -> None:
        """Kill processes of this host that were declared dead but are only stopped: the launcher waits for them."""
        for pid in self.evicted:
            with suppress(OSError, ValueError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getppid():
                    os.kill(pid, signal.SIGKILL)

    def agree(self) -> None:
        """Return on all ranks of the world, or raise RankFailure on all where one may be lost (collective).

        It comes before a window is made, which crashes if a member is dead.
        """
        if not self.survivable:
            return
        try:
            self.comm.Agree(1)
        except MPI.Exception as error:
            raise RankFailure(self.describe(error)) from None
        if self.comm.Is_revoked():
            raise RankFailure("another rank has left this generation")

    def check(self) -> None:
        """Drive MPI's progress; raise Interrupted if the job is asked to end and RankFailure if a rank is dead."""
        if self.signal is not None:
            raise Interrupted(signal.Signals(self.signal).name)
        try:
            for _ in range(POLLS):
                self.comm.Iprobe()
        except MPI.Exception as error:
            raise RankFailure(self.describe(error)) from None

    def describe(self, error: MPI.Exception) -> str:
        """Return which ranks of the world are dead, or the text of `error` where MPI does not know them."""
        try:
            failed = self.comm.Get_failed()
            dead = MPI.Group.Translate_ranks(failed, list(range(failed.size)), self.comm.Get_group())
        except (MPI.Exception, NotImplementedError):
            dead = []
        return "; ".join(f"{self.layout.places[rank]} is gone" for rank in dead) or error.Get_error_string()

    def wait(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Poll the world until `done` returns True; raise RankFailure, which names `what`, after `seconds`."""
        start = time.monotonic()
        idle = Idle(self.config.cluster.poll)
        while not done():
            self.check()
            idle.back_off(False)
            if time.monotonic() - start > seconds:
                raise RankFailure(f"{self.place} waited {seconds:g} s for {what}")

    def finish(self) -> None:
        """Wait until all ranks of the world have reached the end of a successful job (collective)."""
        self.wait(self.comm.Ibarrier().Test, "all ranks to finish", self.config.cluster.seconds)
