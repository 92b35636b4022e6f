"""The crew of a rank: its roles, worked in turn, and the messages that steer them."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from adam_mpi.base.errors import Regroup
from adam_mpi.cluster import watchdog
from adam_mpi.cluster.control_channel import ControlChannel
from adam_mpi.cluster.messages import (
    BeginPhase,
    ClosePhase,
    CompareCopies,
    DumpStacks,
    FinishServer,
    Grow,
    HoldSnapshot,
    JobOver,
    RemoveOldStores,
    SignOfLife,
    Spawn,
    Statistics,
    StopTraining,
    TakeSnapshot,
)
from adam_mpi.cluster.spares import Spares
from adam_mpi.cluster.watchdog import Wait, Watchdog
from adam_mpi.cluster.windows import Window
from adam_mpi.data.sets import DataSet
from adam_mpi.runtime.coordinator import Coordinator
from adam_mpi.sharding.joint_batches import Cuts, Progress
from adam_mpi.sharding.rank_state import RankState

# How long after its generation a transfer may still arrive.
LATE_SECONDS = 60.0


class Role(Protocol):
    """Something a rank does: `step` does what can be done now, never waits, and says whether it did anything."""

    def step(self) -> bool: ...

    def stats(self) -> dict[str, Any]: ...

    def export_state(self, state: RankState) -> None:
        """What the role brings into the next generation."""

    def awaits(self) -> Iterable[Wait]:
        """What other ranks owe it now."""

    def transfers(self) -> list[Any]:
        """What may be under way when a generation ends: its memory has to stay for a while."""


@dataclass(frozen=True)
class Abandoned:
    """Memory of an earlier generation, which late transfers may still touch."""

    windows: list[Window]
    transfers: list[Any]
    since: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """Whether nothing comes any more."""
        return time.monotonic() - self.since > LATE_SECONDS

    def forget(self) -> None:
        """Give the memory back; a window of MPI cannot be freed without the dead, but its memory is given back."""
        self.transfers.clear()
        for window in self.windows:
            window.forget()


@dataclass
class RankRuntime:
    """The roles of one rank in one generation; the objects of the roles go on into the next one."""

    channel: ControlChannel
    roles: dict[str, Any]
    head: Coordinator | None
    windows: list[Window]
    state: dict[str, Any] | None = None
    """Of the head, as it was last told to everybody: whoever is head next goes on from there."""
    detected: float = 0.0
    abandoned: list[Abandoned] = field(default_factory=list)
    captured: tuple[str, ...] = ()
    """The layers that push factors, for the life of the job."""
    cuts: Cuts | None = None
    """With clocks: how batches that all replicas compute together are cut."""
    pushed: tuple[int, int, float] = (0, 0, 0.0)
    """Pushes of this rank as a worker that it is no more, sent and acknowledged: their numbers are not used again; and
    what its codec carried then."""

    data: DataSet | None = None
    """Of a rank that stood by: the data set, opened ahead of need."""
    spares: Spares = field(default_factory=Spares)

    def export_state(self, member: int) -> RankState:
        """What this rank brings into the next generation."""
        head = self.head.state() if self.head is not None else self.state
        state = RankState(member, detected=self.detected, head=head, captured=self.captured)
        state.progress = Progress(self.cuts)
        for role in self.roles.values():
            role.export_state(state)
        return state

    def step(self) -> bool:
        worked = any([role.step() for role in self.roles.values()])
        return (self.head is not None and self.head.step()) or worked

    def rest(self, seconds: float) -> None:
        """So long, or until a trainer thread has something to say."""
        worker = self.roles.get("worker")
        if worker is None or not worker.rest(seconds):
            time.sleep(seconds)

    def abandon(self) -> list[Abandoned]:
        """What this generation and those before it leave behind."""
        self._forget_late()
        for window in self.windows:
            if not window.late:
                window.forget()
        transfers = [self.channel, *(left for role in self.roles.values() for left in role.transfers())]
        return [*self.abandoned, Abandoned([window for window in self.windows if window.late], transfers)]

    def _forget_late(self) -> None:
        """Let go of earlier generations from which nothing comes any more."""
        for earlier in self.abandoned:
            if earlier.over:
                earlier.forget()
        self.abandoned = [earlier for earlier in self.abandoned if not earlier.over]

    def free(self) -> None:
        """Collective: give the windows back, at the end of a job that went well."""
        for window in self.windows:
            window.free()

    def tell(self, head: int) -> None:
        """A sign of life, with the figures of each role; and now and then something to let go of."""
        self._forget_late()
        for role in self.roles.values():
            self.channel.send(Statistics(role.stats(), at=time.monotonic()), head)

    def look_after_spares(self, head: int) -> None:
        """Those that this rank has started or is to start; the head is told when there is news of them."""
        if self.spares.look():
            self.channel.send(self.spares.report(), head)

    def compute_on(self) -> None:
        """Leave trainer threads something to do while this rank finds together with the others."""
        if "worker" in self.roles:
            self.roles["worker"].compute_on()

    def awaits(self) -> list[Wait]:
        """What this rank waits for now."""
        heads = self.head.awaits() if self.head is not None else ()
        return [*heads, *(wait for role in self.roles.values() for wait in role.awaits())]

    def handle_messages(self, dog: Watchdog) -> bool:
        """Pass each received message to the role it is for; return True when the job is over."""
        for source, message in self.channel.receive():
            match message:
                case BeginPhase() | ClosePhase() | StopTraining():
                    if isinstance(message, BeginPhase):
                        self.state = message.state
                    if "data" in self.roles:
                        self.roles["data"].handle(message)
                case HoldSnapshot() | TakeSnapshot():
                    self.roles[message.role].handle(message)
                case CompareCopies() | RemoveOldStores() | FinishServer():
                    self.roles["server"].handle(message)
                case Grow():
                    raise Regroup(message.full)
                case Spawn():
                    self.spares.order(message.ranks)
                case DumpStacks():
                    watchdog.answer(message.reason)
                case SignOfLife():
                    dog.handle(source, message)
                case JobOver():
                    return True
                case _:
                    assert self.head is not None, f"{message} of rank {source} is for the coordinator"
                    self.head.handle(source, message)
        return False
