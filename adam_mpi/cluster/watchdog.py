"""The stall watchdog: a rank that waits for too long says for what, for whom and since when, with stacks of both sides.

What should have been answered at once and was not for `cluster.seconds` ends the job: a network that is cut between
two hosts shows in nothing else. What may take as long as some third rank needs has no such end, but the rank that it
is awaited from is asked for a sign of life meanwhile, and owes that at once.

The other side may hang with its main thread inside MPI, where it hears no message: on the same host it is asked by a
signal, which the interpreter answers from anywhere; on another host by a message, as long as it hears them.
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
from adam_mpi.cluster.control_channel import ControlChannel
from adam_mpi.cluster.messages import DumpStacks, SignOfLife
from adam_mpi.cluster.world import World

ASK = signal.SIGUSR2
LOOKS = 20
"""How often waits are looked at in the time after which one is told or ends the job."""
EVICTION_SECONDS = 2.0
"""How much sooner than those who wait for it the head has a rank ended that is not heard of, if others can go on."""
log = logging.getLogger(__name__)


class Wait(NamedTuple):
    """Something awaited from a rank. One that is fulfilled and begins anew has another `turn`."""

    what: str
    rank: int
    turn: int
    patient: bool = False
    """Whether it may take as long as some third rank takes for its work."""


def answer_signals() -> None:
    """Whoever asks by a signal finds the stack of the main thread in this rank's log.

    Not of all threads: their frames may change under the one that looks, which then crashes the rank.
    """
    for handler in logging.getLogger("adam_mpi").handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream:
            faulthandler.register(ASK, handler.stream, all_threads=False)


def stacks() -> str:
    """Where every thread of this rank is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts).rstrip()


class Watchdog:
    def __init__(self, world: World, channel: ControlChannel) -> None:
        self.world, self.channel, self.seconds = world, channel, world.config.watchdog.seconds
        self.limit = world.config.cluster.seconds
        self.since: dict[Wait, float] = {}
        self.told: set[Wait] = set()
        self.asked: dict[int, int] = {}
        """Rank -> the signs of life that it was asked for, the last of which it may owe."""
        self.heard: dict[int, int] = {}
        self.looked = time.monotonic()

    def look(self, waits: Callable[[], Iterable[Wait]]) -> None:
        """Take note of what is awaited now, a few times in `watchdog.seconds`; tell of each wait once."""
        now, period = time.monotonic(), min(self.seconds or self.limit, self.limit) / LOOKS
        passed = now - self.looked
        if passed < period:
            return
        self.looked = now
        # What arrived while this rank itself stood still could not be taken: that time counts for nobody's.
        still = passed if passed > LOOKS / 2 * period else 0.0
        found = list(waits())
        self.since = {wait: min(now, self.since.get(wait, now) + still) for wait in [*found, *self._signs(found)]}
        self.told &= self.since.keys()
        for wait, since in self.since.items():
            if self.seconds and now - since > self.seconds and wait not in self.told:
                self.told.add(wait)
                self._tell(wait, now - since)
            if now - since > self.limit + self._grace and not wait.patient:
                raise Stall(f"{self.world.place} has {self._describe(wait, now - since)}; the job ends")

    def handle(self, source: int, message: SignOfLife) -> None:
        """Give a sign of life to a rank that asks for one, or take note of one that was asked for."""
        if message.asks:
            self.channel.send(SignOfLife(asks=False, number=message.number), source)
        else:
            self.heard[source] = message.number

    @property
    def _grace(self) -> float:
        """Seconds beyond the limit in which the head may have a silent rank ended, so that the job can go on."""
        return EVICTION_SECONDS if self.world.survivable else 0.0

    def _signs(self, waits: Iterable[Wait]) -> list[Wait]:
        """Ask every rank that something is awaited from patiently for a sign of life; returns those that are owed."""
        ranks = {wait.rank for wait in waits if wait.patient and wait in self.since} - {self.world.rank}
        for rank in ranks:
            if self.asked.get(rank, 0) == self.heard.get(rank, 0):
                self.asked[rank] = self.asked.get(rank, 0) + 1
                self.channel.send(SignOfLife(asks=True, number=self.asked[rank]), rank)
        owed = [rank for rank, number in self.asked.items() if number != self.heard.get(rank, 0)]
        return [Wait("a sign of life", rank, self.asked[rank]) for rank in owed]

    def _describe(self, wait: Wait, seconds: float) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        return f"waited for {wait.what} from {self.world.layout.places[wait.rank]} since {since}, {seconds:.1f} s"

    def _tell(self, wait: Wait, seconds: float) -> None:
        text = self._describe(wait, seconds)
        log.warning("%s; stacks here:\n%s", text, stacks())
        if wait.rank != self.world.rank and self.world.hosts[wait.rank] == self.world.place.host:
            log.warning("stacks of the other side are in its log")
            _ask(self.world.pids[wait.rank])
        elif wait.rank != self.world.rank:
            self.channel.send(DumpStacks(f"{self.world.place} {text}"), wait.rank)


def _ask(pid: int) -> None:
    """By a signal to the main thread, where the C library can send one: a stopped process gives it to any thread."""
    to_thread = getattr(ctypes.CDLL(None), "tgkill", None)
    if to_thread is None:
        os.kill(pid, ASK)
    else:
        to_thread(pid, pid, ASK)


def answer(asked: str) -> None:
    """Another rank waits for this one and asks where it is."""
    log.warning("%s; stacks here:\n%s", asked, stacks())
