"""Pushes and pulls of the library under way: a handle is what the caller has of one, letters are what it sends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from adam_mpi.sharding import message_format
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.ring_sender import RingSender

if TYPE_CHECKING:
    from adam_mpi.parameter_server.server import ParameterServer


@dataclass(frozen=True)
class Landing:
    """Where parameters go that were read in one piece, and are not wanted as they lie."""

    read: np.ndarray
    picked: np.ndarray
    into: np.ndarray
    where: np.ndarray

    def land(self) -> None:
        self.into[self.where] = self.read[self.picked]


@dataclass(eq=False)
class Handle:
    """A push or pull under way."""

    after: Sequence["Handle"]
    start: Callable[["Handle"], None]
    what: str
    """For people: a push or pull of which parameters."""
    pending: int = -1
    """Transfers that are not complete; -1 before they have started."""
    values: np.ndarray | None = None
    """What a pull has read."""
    refused: str = ""
    """What of a push was not applied, and why; empty where all of it was, or is under way."""
    requests: list[MPI.Request] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.pending == 0

    @property
    def ready(self) -> bool:
        return all(handle.done for handle in self.after)


@dataclass(frozen=True)
class RangeMessage:
    """Values of consecutive parameters of one shard, or (index, value) pairs of it."""

    server: "ParameterServer"
    handle: Handle
    shard: Shard
    sequence: int
    values: np.ndarray
    first: int = 0
    indices: np.ndarray | None = None

    @property
    def lane(self) -> RingSender["RangeMessage"]:
        return self.server.lanes[self.server.memory_layout.holders[self.shard.index][0]]

    def write(self, body: np.ndarray) -> np.ndarray:
        header, size, world = np.zeros((), message_format.HEADER), self.values.size, self.server.world
        if self.indices is None:
            header["kind"], header["words"], header["first"] = message_format.DELTA, size, self.first
            header["finite"] = self.lane.copy(body, self.values.view(np.uint32))
        else:
            header["kind"], header["words"] = message_format.SPARSE, 2 * size
            body[:size] = self.indices
            header["finite"] = self.lane.copy(body[size:], self.values.view(np.uint32))
        if not header["finite"]:
            self._note_refusal()
        header["generation"], header["pusher"] = world.generation, world.place.member
        header["sequence"], header["values"], header["shard"] = self.sequence, size, self.shard.index
        # Every push is a gradient of its own, as a batch of one image is.
        header["images"], header["parts"], header["last"] = 1, 1, 1
        return header

    def _note_refusal(self) -> None:
        """A server applies no NaN and no infinity, nor what comes with it in the same message."""
        places = self.first + np.arange(self.values.size) if self.indices is None else self.indices
        where = self.shard.start + int(places[~np.isfinite(self.values)][0])
        span = f"{self.shard.start + int(places[0])} to {self.shard.start + int(places[-1])}"
        self.handle.refused = f"{self.handle.what}: NaN or infinity at parameter {where}; nothing of {span} was applied"

    def batches(self) -> np.ndarray:
        return np.empty(0, np.int64)

    def settled(self) -> None:
        self.handle.pending -= 1
