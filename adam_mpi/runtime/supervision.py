"""Supervision of ranks: by the sentinel of their host, by the coordinator, which ends silent ones, and by spares."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from adam_mpi.base.errors import LostRun, RankFailure, Stall
from adam_mpi.checkpoint.owner import Owner
from adam_mpi.cluster import fence, report_once, sentinel
from adam_mpi.cluster.control_messages import ControlChannel, Grow, Message, SparesReport, Spawn
from adam_mpi.cluster.sentinel import SentinelConnection
from adam_mpi.cluster.world import World
from adam_mpi.runtime.job import FAILURE, Job
from adam_mpi.runtime.recovery_log import RecoveryLog

STOPPED_SECONDS = 1.0
"""A coordinator that has not made a step for so long checks whether others have its place."""
EVICTION_SECONDS = 10.0
"""How long the sentinel of a silent rank may take to end it."""
DISK_SECONDS = 5.0
"""How long the coordinator waits for a run directory that may hang."""
log = logging.getLogger(__name__)


def send_to_all(channel: ControlChannel, world: World, message: Message) -> None:
    """Send the control `message` of a supervisor to every rank, this one included."""
    for place in world.layout.places:
        channel.send(message, place.rank)


def survivable_losses(world: World, lacking: int) -> str:
    """Return a sentence about the losses that the layout survives when the `lacking` copies of shards are rebuilt."""
    if not world.survivable:
        return "a lost rank ends the job; under Open MPI's mpirun --with-ft ulfm it would continue"
    servers = world.layout.survives(world.config.server.copies)
    when = f" when {lacking} copies are rebuilt" if lacking else ""
    return f"the job survives the loss of {servers} servers at once{when}, and of any worker or data rank"


class LivenessMonitor:
    """Notices ranks from which nothing has come for `cluster.seconds`, and that this rank itself was stopped."""

    def __init__(self, world: World, directory: Path, owner: Owner) -> None:
        now = time.monotonic()
        self.world = world
        self.directory = directory
        self.owner = owner
        self.last_message = {place.rank: now for place in world.layout.places if place.roles}
        """Rank -> when its last message was received."""
        self.last_step = now
        self.evicted: dict[int, float] = {}
        """Rank -> when its sentinel was ordered to end it."""

    def received(self, rank: int) -> None:
        """Note that `rank` is alive, because a message of it has been received."""
        self.last_message[rank] = time.monotonic()

    def step(self) -> None:
        """Check that this rank has its place, then that the others are alive.

        Raise Evicted or LostRun if others have the place of this rank, RankFailure for a silent rank that ends the job,
        and Stall for one that could not be ended.
        """
        self._notice_own_stop()
        self._check_silence()

    def _notice_own_stop(self) -> None:
        """Check this rank's place after it was stopped or starved, when it may have been taken for dead.

        It could receive nothing meanwhile: that time does not count against the other ranks.
        """
        now = time.monotonic()
        stopped = now - self.last_step
        self.last_step = now
        if stopped > STOPPED_SECONDS:
            self._check_place()
            checked = time.monotonic() - now
            self.last_step += checked
            self.last_message = {rank: at + stopped + checked for rank, at in self.last_message.items()}

    def _check_place(self) -> None:
        """Raise Evicted or LostRun if others have this rank's place; a disk that does not answer proves nothing."""
        found: list[Exception] = []

        def check() -> None:
            try:
                with suppress(OSError):
                    fence.check_membership(self.directory / "log", self.world.generation, self.world.place.member)
                self.owner.check()
            except (fence.Evicted, LostRun) as error:
                found.append(error)

        if not report_once.finishes_within(DISK_SECONDS, check):
            log.warning("%s does not answer; whether others have this rank's place is not known", self.directory)
        for error in found:
            raise error

    def _check_silence(self) -> None:
        """Have a silent rank ended where the others can continue without it; otherwise raise RankFailure."""
        now = time.monotonic()
        limit = self.world.config.cluster.seconds
        for rank in [rank for rank, at in self.last_message.items() if now - at > limit]:
            silent = f"{self.world.layout.places[rank]} has sent nothing for {limit:g} s"
            if not self.world.survivable:
                raise RankFailure(f"{silent}; the job ends; restart it with --resume")
            if rank not in self.evicted:
                self.evicted[rank] = now
                log.warning("%s; its sentinel is ordered to end it", silent)
                self._order_end(rank, f"has sent nothing for {limit:g} s")
            elif now - self.evicted[rank] > EVICTION_SECONDS:
                late = f"could not be ended in {EVICTION_SECONDS:g} s"
                raise Stall(f"{silent}, and {late}; the job ends; restart it with --resume")

    def _order_end(self, rank: int, reason: str) -> None:
        """Order the sentinel of `rank` to end it, by a file in the run directory.

        A thread writes the file, as the run directory may be what the rank hangs in.
        """
        arguments = (self.directory / FAILURE, self.world.hosts[rank], self.world.pids[rank], reason)
        threading.Thread(target=sentinel.order_kill, args=arguments, name="evict", daemon=True).start()


@dataclass(frozen=True)
class SpareCount:
    """How many spares of the whole job are ready to join, and how many are starting."""

    ready: int
    coming: int


class SpareKeeper:
    """Keeps the job at its wanted number of ranks: has spares started, and lets them join when ranks are missing."""

    def __init__(
        self, world: World, channel: ControlChannel, recoveries: RecoveryLog, say: Callable[[str], None]
    ) -> None:
        """Make a keeper of spares; `say` shows a line to the user."""
        self.world = world
        self.channel = channel
        self.recoveries = recoveries
        self.say = say
        self.wanted_ranks = world.full
        self.reports: dict[int, SparesReport] = {}
        """Rank -> its last report of the spares that it has started."""
        self.started: list[dict[str, float]] = []
        """Seconds and CPU seconds that each spare has taken to get ready."""
        self.refused = False
        """Whether the launcher had no slot for another process in this generation."""
        self.refusal_reported = False

    @property
    def count(self) -> SpareCount:
        """Return how many spares are ready for a loss, and how many are starting."""
        reports = self.reports.values()
        return SpareCount(sum(report.ready for report in reports), sum(report.coming for report in reports))

    def handle(self, source: int, report: SparesReport) -> None:
        """Handle the report of rank `source` about the spares that it has started."""
        self.reports[source] = report
        self.started += report.started
        self.refused |= report.refused
        if report.refused and not self.refusal_reported:
            self.refusal_reported = True
            self.say("mpirun has no slot for a new rank; the job continues without it (more slots: --host localhost:N)")

    def step(self) -> None:
        """Let spares join if ranks are missing; otherwise have missing spares started, but not during a recovery."""
        count = self.count
        missing = self.wanted_ranks - len(self.world.layout.places)
        if may_join(missing, count.ready, count.coming):
            log.info("%d spares join", min(missing, count.ready))
            send_to_all(self.channel, self.world, Grow(self.wanted_ranks))
        elif not self.refused and not self.recoveries.in_progress:
            self._order(missing + self.world.config.recover.spares - count.ready - count.coming)

    def _order(self, ranks: int) -> None:
        """Have `ranks` spares started by the rank whose absence disturbs the others least."""
        if ranks <= 0:
            return
        starter = self.world.layout.starter
        log.info("%s starts %d spares", self.world.layout.places[starter], ranks)
        report = self.reports.get(starter, SparesReport(ready=0, coming=0, refused=False, started=[]))
        self.reports[starter] = replace(report, coming=report.coming + ranks)
        self.channel.send(Spawn(ranks), starter)


def may_join(missing: int, ready: int, coming: int) -> bool:
    """Return whether spares join now: all missing ranks at once, as each change stops others, or the last ones.

    `missing` ranks are wanted, `ready` spares can join, `coming` spares are starting.
    """
    return missing > 0 and ready > 0 and (ready >= missing or not coming)


GRACE_SECONDS = 10.0
"""How much longer than the ranks themselves the sentinel waits for the end of a recovery."""


def connect_sentinel(world: World, failure_file: Path) -> SentinelConnection:
    """Return the connection of this rank to a new sentinel of its node; collective over the node."""
    path = _start_sentinel(world, failure_file, world.node.size) if world.node.rank == 0 else None
    world.sentinel = world.node.bcast(path)
    return SentinelConnection(world.sentinel, str(world.place))


def join_sentinel(world: World, failure_file: Path) -> SentinelConnection:
    """Return the connection of a rank that joins to the sentinel of its host, or to a new one if there is none."""
    if world.sentinel is not None:
        with suppress(OSError):
            return SentinelConnection(world.sentinel, str(world.place))
    world.sentinel = _start_sentinel(world, failure_file, 1)
    return SentinelConnection(world.sentinel, str(world.place))


def _start_sentinel(world: World, failure_file: Path, ranks: int) -> str:
    """Start a sentinel for `ranks` ranks of this node; return the path at which it listens."""
    # The ranks themselves give up after `recover.seconds`, if they can.
    limits = (world.config.cluster.stopped, world.config.recover.seconds + GRACE_SECONDS)
    elsewhere = world.comm.size > ranks
    return sentinel.start_sentinel(failure_file, ranks, world.survivable, *limits, elsewhere, world.place.host)


def watch_recoveries(world: World, job: Job, connection: SentinelConnection) -> fence.MembershipWatch:
    """Return the watch that ends this rank if a recovery takes longer than `recover.seconds` or excludes it."""
    seconds = job.config.recover.seconds

    def end_late() -> None:
        text = f"surviving ranks did not agree on a new membership within {seconds:g} s"
        report_once.report_failure(job.failure_file, f"{world.place}: {text}; the job ends; restart it with --resume")
        connection.close()
        os._exit(1)

    def end_evicted(eviction: fence.Evicted) -> None:
        log.error("%s", eviction)
        print(f"adam_mpi: {world.place} {eviction}", file=sys.stderr, flush=True)
        connection.close()
        logging.shutdown()
        os._exit(0)

    return fence.MembershipWatch(job.directory / "log", seconds, end_late, end_evicted)
