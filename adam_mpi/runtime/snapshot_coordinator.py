"""The coordinator's part of snapshots, in which all members write the state of the same clocks.

coordinator                        servers, and pushers whose codec has a residual
HoldSnapshot                  ->   begin no further clock
                              <-   SnapshotHeld: the clocks that they have begun
TakeSnapshot: one clock per   ->   apply all that is before these clocks, copy the state, continue,
pusher, the same for all           and write the copy on a thread
                              <-   SnapshotWritten
write the manifest, rename the folder: the snapshot counts
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from adam_mpi.base.errors import LostRun
from adam_mpi.base.log import print_and_log
from adam_mpi.checkpoint.disk_task import DiskTask, reason
from adam_mpi.cluster.control_messages import ControlChannel, HoldSnapshot, SnapshotHeld, SnapshotWritten, TakeSnapshot
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.runtime.snapshot_seal import POSITION, SnapshotSeal, SnapshotSettings

WARN_SECONDS = 30.0
log = logging.getLogger(__name__)


class SnapshotCoordinator:
    """Takes one snapshot at a time; `stage` is what it waits for: held, stored, sealed, or nothing."""

    def __init__(
        self, channel: ControlChannel, settings: SnapshotSettings, describe: Callable[[], dict[str, Any]]
    ) -> None:
        """Make a coordinator of snapshots; `describe` returns what a manifest says besides the position."""
        self.channel = channel
        self.settings = settings
        self.members = settings.members
        self.describe = describe
        self.number = 0
        self.stage = ""
        self.again = False
        """Whether another snapshot follows the one that is being taken."""
        self.description: dict[str, Any] = {}
        self.answers: dict[tuple[str, int], dict[str, Any]] = {}
        self.sealing: DiskTask[list[str]] | None = None
        self.taken: list[str] = []
        """The names of the snapshots of this job."""
        self.times: dict[str, float] = {}
        """Snapshot -> when all members had copied their state, in seconds since 1970."""
        self.good: list[str] = []
        """The names of snapshots that are known to be from before any divergence."""
        self.sealed = 0.0
        """When all members had copied their state for the snapshot that is being taken."""
        self.error = ""
        """Why the last snapshot could not be taken."""
        self.hung = False
        """Whether a disk hung in the last snapshot."""
        self.quiet_until = 0.0
        self.began = time.monotonic()
        self.ended = self.began
        try:
            settings.remove_unfinished()
        except OSError as error:
            log.warning(
                "%s: %s; what a lost coordinator was making or replacing stays there", settings.folder, reason(error)
            )

    @property
    def busy(self) -> bool:
        """Return whether a snapshot is being taken."""
        return bool(self.stage)

    def order(self) -> None:
        """Order a snapshot now, or another one after the one that is being taken."""
        if self.busy:
            self.again = True
            return
        self.again = False
        self.stage = "held"
        self.error = ""
        self.answers = {}
        self.number += 1
        self.description = self.describe()
        self.began = time.monotonic()
        for role, rank in self.members:
            self.channel.send(HoldSnapshot(role), rank)

    def handle(self, source: int, message: SnapshotHeld | SnapshotWritten) -> None:
        """Handle the answer of a member of the snapshot; the last one begins the next stage."""
        expected = SnapshotHeld if self.stage == "held" else SnapshotWritten if self.stage == "stored" else None
        assert type(message) is expected, f"{message} of rank {source} in stage {self.stage!r} of a snapshot"
        values = {"clocks": message.clocks} if isinstance(message, SnapshotHeld) else message.values
        self.answers[message.role, source] = values
        if len(self.answers) < len(self.members):
            return
        answers = [self.answers[member] for member in self.members]
        self.answers = {}
        if self.stage == "held":
            self._take(answers)
        else:
            self._seal(answers)

    def _take(self, answers: Sequence[dict[str, Any]]) -> None:
        """Let all members of the snapshot write the state of the same clocks."""
        self.stage = "stored"
        clocks = self._clocks(answers)
        part = str(self.settings.part(self.number))
        for role, rank in self.members:
            self.channel.send(TakeSnapshot(role, clocks, part), rank)

    def _clocks(self, answers: Sequence[dict[str, Any]]) -> list[int]:
        """Return the clock at which the snapshot cuts each pusher: the furthest that any member has begun.

        The strips of a replica are cut at one clock, as they make one step together; so are all replicas where batches
        are joint.
        """
        clocks = [max(begun) for begun in zip(*(answer["clocks"] for answer in answers), strict=True)]
        group = len(clocks) if self.settings.joint else self.settings.strips
        return [max(clocks[pusher - pusher % group :][:group]) for pusher in range(len(clocks))]

    def _seal(self, answers: Sequence[dict[str, Any]]) -> None:
        """Give the snapshot its name on a thread, so that a slow disk keeps no rank waiting."""
        self.stage = "sealed"
        self.sealed = time.time()
        self._check(answers)
        seal = SnapshotSeal(
            settings=self.settings,
            number=self.number,
            description=self.description,
            answers=answers,
            taken=self.taken,
            good=self.good,
            began=self.began,
            sealed=self.sealed,
        )
        work = seal.discard if self.error else seal.seal
        self.sealing = DiskTask("seal", work, self.settings.seconds)

    def _check(self, answers: Sequence[dict[str, Any]]) -> None:
        """Set the snapshot's `error` if a member could not write its part, or servers are not at one position."""
        self.error = next((answer["error"] for answer in answers if "error" in answer), "")
        self.hung = any(answer.get("hung") for answer in answers)
        servers = answers[: len(self.settings.servers)]
        positions = {tuple(answer.get(key) for key in POSITION) for answer in servers}
        if not self.error and len(positions) > 1:
            self.error = f"the servers are not at one position: {positions}"

    def step(self) -> None:
        """End the snapshot when it has its name or cannot have it; begin the next one if it was ordered."""
        sealing = self.sealing
        if sealing is None or not sealing.over:
            return
        self.sealing = None
        try:
            self.taken = sealing.result()
            if not self.error:
                self._note_taken(self.taken[-1])
        except LostRun:
            raise
        except Exception as error:
            log.warning("no snapshot", exc_info=error)
            self.error = f"{self.settings.part(self.number)}: {reason(error)}"
            self.hung = isinstance(error, TimeoutError)
        if self.error:
            self._warn()
        self.stage = ""
        self.ended = time.monotonic()
        if self.again:
            self.order()

    def _note_taken(self, name: str) -> None:
        """Note when the state of the snapshot `name` was copied; another of that name is replaced."""
        self.times[name] = self.sealed
        self.good = [other for other in self.good if other != name]

    def confirm(self, until: float) -> None:
        """Note that snapshots up to the time `until` are good: the loss was good afterward."""
        self.good += [name for name in self.taken if name not in self.good and self.times.get(name, until) < until]

    def _warn(self) -> None:
        """Warn of a failed snapshot on the terminal, but only in the log for each of many short epochs."""
        text = f"warning: no snapshot: {self.error}"
        if time.monotonic() > self.quiet_until:
            print_and_log(text)
            self.quiet_until = time.monotonic() + WARN_SECONDS
        else:
            log.warning(text)

    def awaits(self) -> list[Wait]:
        """Return the members that owe an answer about the snapshot.

        A member answers the order to hold at once, but writes its part only when it has all pushes that belong to it.
        """
        owing = [rank for role, rank in self.members if (role, rank) not in self.answers]
        if self.stage == "held":
            return [Wait("where it holds for a snapshot", rank, self.number) for rank in owing]
        if self.stage == "stored":
            return [Wait("its part of a snapshot", rank, self.number, patient=True) for rank in owing]
        return []

    def abandon(self) -> None:
        """Give up the snapshot that is being named: another generation has begun."""
        if self.sealing is not None:
            self.sealing.given_up = True
