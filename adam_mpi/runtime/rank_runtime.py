"""The runtime of a rank in one generation: it runs the roles of the rank in turn and passes them their messages."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

from adam_mpi.base.errors import GoingBack, Regroup
from adam_mpi.cluster import watchdog
from adam_mpi.cluster.control_messages import (
    BeginPhase,
    ClockNorms,
    ClosePhase,
    CompareCopies,
    ControlChannel,
    DumpStacks,
    FinishServer,
    GoBack,
    Grow,
    HoldSnapshot,
    JobOver,
    Message,
    RemoveOldStores,
    SetRateScale,
    SignOfLife,
    Spawn,
    Statistics,
    StopTraining,
    TakeSnapshot,
)
from adam_mpi.cluster.spares import Spares
from adam_mpi.cluster.watchdog import Wait, Watchdog
from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World
from adam_mpi.data.sets import DataSet
from adam_mpi.runtime.coordinator import Coordinator
from adam_mpi.runtime.going_back import RestartPoint
from adam_mpi.runtime.job import CoordinatorState
from adam_mpi.sharding.batches import BatchCuts, Progress
from adam_mpi.sharding.training_state import RankState

LATE_SECONDS = 60.0
"""How long after the end of its generation a transfer may still arrive."""


class Role(Protocol):
    """A role of a rank: data, server or worker."""

    def step(self) -> bool:
        """Do what this role of the rank can do now without waiting; return whether anything was done."""

    def handle(self, message: Message) -> None:
        """Handle a control message for this role of the rank."""

    def stats(self) -> dict[str, Any]:
        """Return the statistics of this role of the rank for the coordinator."""

    def end(self) -> None:
        """End the threads of this role of the rank, because training begins again from an earlier state."""

    def export_state(self, state: RankState) -> None:
        """Add to `state` what the role brings into the next generation."""

    def awaits(self) -> Iterable[Wait]:
        """Return what other ranks owe this role of the rank now."""

    def transfers(self) -> list[Any]:
        """Return what a role may have in transfer when a generation ends: its memory has to stay for a while."""


class WorkerRole(Role, Protocol):
    """A role with trainer threads."""

    def rest(self, seconds: float) -> bool:
        """Wait for a trainer thread of the worker role for at most `seconds`; return False at once if none is busy."""

    def compute_on(self) -> None:
        """Let the worker role's trainer threads work while this rank agrees with others on a membership."""


@dataclass(frozen=True)
class Abandoned:
    """Memory of an earlier generation, which late transfers may still touch."""

    windows: list[Window]
    transfers: list[Any]
    since: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """Return whether no transfer can arrive any more in the memory of an earlier generation."""
        return time.monotonic() - self.since > LATE_SECONDS

    def forget(self) -> None:
        """Free the memory of an earlier generation; a window itself cannot be freed without the lost ranks."""
        self.transfers.clear()
        for window in self.windows:
            window.forget()


@dataclass
class RankRuntime:
    """The roles of one rank in one generation, and what it keeps for the next one."""

    channel: ControlChannel
    roles: dict[str, Role]
    coordinator: Coordinator | None
    windows: list[Window]
    coordinator_state: CoordinatorState | None = None
    """The last state that the coordinator has sent: the next coordinator continues from it."""
    detected: float = 0.0
    """When this rank noticed the end of its generation, in seconds since 1970."""
    abandoned: list[Abandoned] = field(default_factory=list)
    captured: tuple[str, ...] = ()
    """The layers that push factors; they stay the same for the whole job."""
    cuts: BatchCuts | None = None
    """How batches that all replicas compute together are cut, where replicas are bound by clocks."""
    pushed: tuple[int, int, float] = (0, 0, 0.0)
    """The pushes sent and acknowledged of a worker that this rank no longer has, whose numbers are not used again, and
    the norm of what its codec carried."""
    data: DataSet | None = None
    """The data set that a spare has opened before it joined."""
    spares: Spares = field(default_factory=Spares)
    order: GoBack | None = None
    """The last order to go back to a snapshot that this rank has received."""
    restart: RestartPoint | None = None
    """Where training has begun again when all ranks last went back; None if they never did."""

    @classmethod
    def without_roles(cls, world: World, data: DataSet | None = None) -> "RankRuntime":
        """Return the runtime of a rank that has no role yet; `data` is the data set that a spare has opened."""
        return cls(ControlChannel(world.control), {}, None, [], data=data)

    @property
    def worker(self) -> WorkerRole | None:
        """Return the worker of this rank, if it has one."""
        return cast(WorkerRole | None, self.roles.get("worker"))

    def step(self) -> bool:
        """Make a step of each role of the rank and of the coordinator; return whether anything was done."""
        worked = any([role.step() for role in self.roles.values()])
        return (self.coordinator is not None and self.coordinator.step()) or worked

    def rest(self, seconds: float) -> None:
        """Rest all roles of the rank for `seconds`, or until a trainer thread has a result."""
        worker = self.worker
        if worker is None or not worker.rest(seconds):
            time.sleep(seconds)

    def compute_on(self) -> None:
        """Let trainer threads of the rank work while it agrees with the others on a membership."""
        worker = self.worker
        if worker is not None:
            worker.compute_on()

    def report(self, coordinator: int) -> None:
        """Send the statistics of each role of the rank to `coordinator`; free earlier memory when it is due."""
        self._forget_late()
        for role in self.roles.values():
            self.channel.send(Statistics(role.stats(), at=time.monotonic()), coordinator)

    def step_spares(self, coordinator: int) -> None:
        """Start spares that are ordered; report to rank `coordinator` if one of them has become ready or died."""
        if self.spares.poll():
            self.channel.send(self.spares.report(), coordinator)

    def awaits(self) -> list[Wait]:
        """Return what all roles of this rank wait for now."""
        for_snapshot = self.coordinator.awaits() if self.coordinator is not None else []
        return [*for_snapshot, *(wait for role in self.roles.values() for wait in role.awaits())]

    def handle_messages(self, dog: Watchdog) -> bool:
        """Pass each message that the rank received to its role; return True when the job is over."""
        for source, message in self.channel.receive():
            if isinstance(message, JobOver):
                return True
            self._handle(source, message, dog)
        return False

    def _handle(self, source: int, message: Message, dog: Watchdog) -> None:
        """Pass a message of rank `source` to the role of this rank that it is for.

        Raise Regroup if spares are to join, GoingBack if training begins again from an earlier state.
        """
        match message:
            case BeginPhase() | ClosePhase() | StopTraining():
                if isinstance(message, BeginPhase):
                    self.coordinator_state = CoordinatorState.from_json(message.state)
                if "data" in self.roles:
                    self.roles["data"].handle(message)
            case HoldSnapshot() | TakeSnapshot():
                self.roles[message.role].handle(message)
            case CompareCopies() | RemoveOldStores() | FinishServer() | ClockNorms() | SetRateScale():
                self.roles["server"].handle(message)
            case Grow():
                raise Regroup(message.full)
            case GoBack():
                self.order = message
                self.coordinator_state = CoordinatorState.from_json(message.state)
                raise GoingBack("training has diverged and goes back to an earlier state")
            case Spawn():
                self.spares.order(message.ranks)
            case DumpStacks():
                watchdog.log_stacks(message.reason)
            case SignOfLife():
                dog.handle(source, message)
            case _:
                assert self.coordinator is not None, f"{message} of rank {source} is for the coordinator"
                self.coordinator.handle(source, message)

    def export_state(self, member: int) -> RankState:
        """Return what all roles of this rank, `member`, bring into the next generation."""
        newest = self.coordinator.state() if self.coordinator is not None else self.coordinator_state
        state = RankState(
            member,
            detected=self.detected,
            coordinator=newest.to_json() if newest is not None else None,
            captured=self.captured,
            order=None if self.order is None else asdict(self.order),
            restart=self.restart,
            new=not self.roles,
        )
        state.progress = Progress(self.cuts)
        for role in self.roles.values():
            role.export_state(state)
        return state

    def abandon(self) -> list[Abandoned]:
        """Return the memory that this generation and earlier ones leave to late transfers; free the rest."""
        self._forget_late()
        for window in self.windows:
            if not window.late:
                window.forget()
        transfers = [self.channel, *(transfer for role in self.roles.values() for transfer in role.transfers())]
        return [*self.abandoned, Abandoned([window for window in self.windows if window.late], transfers)]

    def _forget_late(self) -> None:
        """Free the memory of earlier generations for which no transfer can arrive any more."""
        for earlier in self.abandoned:
            if earlier.over:
                earlier.forget()
        self.abandoned = [earlier for earlier in self.abandoned if not earlier.over]

    def free(self) -> None:
        """Free the windows at the end of a job that went well; collective."""
        for window in self.windows:
            window.free()
