"""What the roles of a rank have in common, so that the runtime can run any of them in turn."""

from collections.abc import Iterable
from typing import Any, Protocol

from adam_mpi.cluster.messages import Message
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.sharding.rank_state import RankState


class Role(Protocol):
    """A role of a rank: data, server or worker."""

    def step(self) -> bool:
        """Do what can be done now without waiting; return whether anything was done."""

    def handle(self, message: Message) -> None:
        """Handle a control message for this role."""

    def stats(self) -> dict[str, Any]:
        """Return the statistics of this role for the coordinator."""

    def export_state(self, state: RankState) -> None:
        """Add to `state` what the role brings into the next generation."""

    def awaits(self) -> Iterable[Wait]:
        """Return what other ranks owe this role now."""

    def transfers(self) -> list[Any]:
        """Return what may be in transfer when a generation ends: its memory has to stay for a while."""


class WorkerRole(Role, Protocol):
    """A role with trainer threads."""

    def rest(self, seconds: float) -> bool:
        """Wait for a trainer thread for at most `seconds`; return False, at once, if none is busy."""

    def compute_on(self) -> None:
        """Leave the trainer threads work while this rank agrees with the others on a membership."""
