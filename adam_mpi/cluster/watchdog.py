"""The stall watchdog: a rank that waits too long logs for what, for which rank and since when, with both stacks.

A request that should be answered at once and is not for `cluster.seconds` ends the job: a network partition between two
hosts shows in nothing else. A wait that may take as long as a third rank's work has no such limit, but the rank it
depends on is asked for a sign of life meanwhile, which it must answer at once.

The other rank may hang with its main thread inside MPI, where it receives no message: on the same host it is asked for
its stack by a signal, which the interpreter answers from anywhere; on another host by a message.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

from adam_mpi.base.errors import Stall
from adam_mpi.cluster.control_messages import ControlChannel, DumpStacks, SignOfLife
from adam_mpi.cluster.world import World

ASK = signal.SIGUSR2
CHECKS = 20
"""Number of checks of the waits in the time after which one is logged or ends the job."""
EVICTION_SECONDS = 2.0
"""Where the job can continue without a silent rank, seconds that ranks which wait for it leave the coordinator to have
it killed."""
log = logging.getLogger(__name__)


class Wait(NamedTuple):
    """Something awaited from a rank. A wait that was fulfilled and starts again has another `turn`."""

    what: str
    rank: int
    turn: int
    patient: bool = False
    """Whether it may take as long as a third rank's work."""


def dump_stack_on_signal() -> None:
    """Have the signal `ASK` write the stack of the main thread to this rank's log.

    The stacks of other threads may change while they are read in a signal handler, which then crashes the rank.
    """
    for handler in logging.getLogger("adam_mpi").handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream:
            faulthandler.register(ASK, handler.stream, all_threads=False)


def stacks() -> str:
    """Return the stack of every thread of this rank, for the report of the stall watchdog."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts).rstrip()


class Watchdog:
    """The waits of one rank, since when they last, and which of them were logged."""

    def __init__(self, world: World, channel: ControlChannel) -> None:
        self.world = world
        self.channel = channel
        self.seconds = world.config.watchdog.seconds
        self.limit = world.config.cluster.seconds
        self.since: dict[Wait, float] = {}
        self.reported: set[Wait] = set()
        self.asked: dict[int, int] = {}
        """Rank -> number of the last sign of life that it was asked for."""
        self.answered: dict[int, int] = {}
        """Rank -> number of the last sign of life that it gave."""
        self.checked = time.monotonic()

    def check(self, waits: Callable[[], Iterable[Wait]]) -> None:
        """Note what this rank waits for according to `waits`, a few times in `watchdog.seconds`; log a long wait once.

        Raises Stall for a wait that has exceeded `cluster.seconds`.
        """
        now = time.monotonic()
        period = min(self.seconds or self.limit, self.limit) / CHECKS
        passed = now - self.checked
        if passed < period:
            return
        self.checked = now
        # What arrived while this rank itself was stopped could not be received: that time does not count as waiting.
        still = passed if passed > CHECKS / 2 * period else 0.0
        found = list(waits())
        self.since = {wait: min(now, self.since.get(wait, now) + still) for wait in [*found, *self._signs(found)]}
        self.reported &= self.since.keys()
        for wait, since in self.since.items():
            if self.seconds and now - since > self.seconds and wait not in self.reported:
                self.reported.add(wait)
                self._report(wait, now - since)
            if now - since > self.limit + self._grace and not wait.patient:
                raise Stall(f"{self.world.place} has {self._describe(wait, now - since)}; the job ends")

    def handle(self, source: int, message: SignOfLife) -> None:
        """Give a sign of life to the rank `source` that waits for this one, or note the sign that it gives."""
        if message.asks:
            self.channel.send(SignOfLife(asks=False, number=message.number), source)
        else:
            self.answered[source] = message.number

    @property
    def _grace(self) -> float:
        """Return the seconds beyond the watchdog's limit in which the coordinator may have a silent rank killed."""
        return EVICTION_SECONDS if self.world.survivable else 0.0

    def _signs(self, waits: Iterable[Wait]) -> list[Wait]:
        """Ask every rank of a patient wait for a sign of life; return the waits for those not given yet."""
        ranks = {wait.rank for wait in waits if wait.patient and wait in self.since} - {self.world.rank}
        for rank in ranks:
            if self.asked.get(rank, 0) == self.answered.get(rank, 0):
                self.asked[rank] = self.asked.get(rank, 0) + 1
                self.channel.send(SignOfLife(asks=True, number=self.asked[rank]), rank)
        owed = [rank for rank, number in self.asked.items() if number != self.answered.get(rank, 0)]
        return [Wait("a sign of life", rank, self.asked[rank]) for rank in owed]

    def _describe(self, wait: Wait, seconds: float) -> str:
        """Return a wait of the stall watchdog as text: for what, for which ranks and since when."""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        return f"waited for {wait.what} from {self.world.layout.places[wait.rank]} since {since}, {seconds:.1f} s"

    def _report(self, wait: Wait, seconds: float) -> None:
        """Log a wait that has lasted for `seconds`, with the stacks here, and have the other rank log its stack."""
        text = self._describe(wait, seconds)
        log.warning("%s; stacks here:\n%s", text, stacks())
        if wait.rank != self.world.rank and self.world.hosts[wait.rank] == self.world.place.host:
            log.warning("the stack of the other rank is in its log")
            _signal(self.world.pids[wait.rank])
        elif wait.rank != self.world.rank:
            self.channel.send(DumpStacks(f"{self.world.place} {text}"), wait.rank)


def _signal(pid: int) -> None:
    """Send the stack signal `ASK` to the main thread of `pid`: a process signal may reach any of its threads."""
    to_thread = getattr(ctypes.CDLL(None), "tgkill", None)
    if to_thread is None:
        os.kill(pid, ASK)
    else:
        to_thread(pid, pid, ASK)


def log_stacks(reason: str) -> None:
    """Log the stacks of this rank for another rank that waits for it; `reason` says which and for what."""
    log.warning("%s; stacks here:\n%s", reason, stacks())
