"""Pushes and pulls that are under way: the handle that a caller gets, and the messages that are sent for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from mpi4py import MPI

from adam_mpi.sharding import message_formats
from adam_mpi.sharding.shards import Shard

if TYPE_CHECKING:
    from adam_mpi.parameter_server.client import Client


@dataclass(frozen=True)
class Gather:
    """Parameters to pick out of a piece that was read as a whole, and where they go."""

    source: np.ndarray
    picked: np.ndarray
    into: np.ndarray
    positions: np.ndarray

    def copy(self) -> None:
        """Copy the values that a pull picks from `source` to their positions in `into`."""
        self.into[self.positions] = self.source[self.picked]


V = TypeVar("V")
"""What waiting for a handle returns: an array for a pull, None for a push."""


@dataclass(eq=False)
class Handle(Generic[V]):
    """A push or a pull that is under way; `ParameterServer.push` and `pull` return one.

    Attributes
    ----------
    what : str
        Description for messages, such as ``"push of 10 parameters from 0"``.
    values : numpy.ndarray or None
        The array that a pull reads into; complete when `done` is true. None for a push.
    refused : str
        Reason why a part of a push was not applied; empty where nothing was refused so far.
    after : sequence of Handle
        Handles that must be done before this one starts.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from adam_mpi import ParameterServer
    >>> with ParameterServer(MPI.COMM_SELF, size=3) as server:
    ...     handle = server.push(np.ones(3, np.float32))
    ...     while not handle.done:
    ...         worked = server.step()
    >>> handle.what, handle.refused
    ('push of 3 parameters from 0', '')
    """

    after: Sequence["Handle[Any]"]
    start: Callable[["Handle[Any]"], None] = field(repr=False)
    what: str
    pending: int = field(default=-1, repr=False)
    """Transfers that are not complete; -1 before they have started."""
    values: np.ndarray | None = None
    refused: str = ""
    requests: list[MPI.Request] = field(default_factory=list, repr=False)
    gathers: list[Gather] = field(default_factory=list, repr=False)

    @property
    def done(self) -> bool:
        """Return whether the push of the handle is applied on all copies, or the pull has all its values."""
        return self.pending == 0

    @property
    def ready(self) -> bool:
        """Return whether the push or pull of the handle may start: all handles in `after` are done."""
        return all(handle.done for handle in self.after)


@dataclass(frozen=True)
class RangeMessage:
    """Values of consecutive parameters of one shard, or (index, value) pairs of it."""

    client: "Client"
    handle: Handle[None]
    shard: Shard
    sequence: int
    values: np.ndarray
    first: int = 0
    indices: np.ndarray | None = None

    def write(self, body: np.ndarray) -> np.ndarray:
        """Write the values of a push of the parameter server library into `body`; return the header of its message."""
        sender = self.client.transfers.ring_sender(self.shard)
        world = self.client.transfers.generation.world
        size = self.values.size
        header = np.zeros((), message_formats.HEADER)
        if self.indices is None:
            header["kind"] = message_formats.DELTA
            header["words"] = size
            header["first"] = self.first
            header["finite"] = sender.copy(body, self.values.view(np.uint32))
        else:
            header["kind"] = message_formats.SPARSE
            header["words"] = 2 * size
            body[:size] = self.indices
            header["finite"] = sender.copy(body[size:], self.values.view(np.uint32))
        if not header["finite"]:
            self._note_refusal()
        header["generation"] = world.generation
        header["pusher"] = world.place.member
        header["sequence"] = self.sequence
        header["values"] = size
        header["shard"] = self.shard.index
        # Every push is a gradient of its own, as a batch of one image is.
        header["images"] = 1
        header["parts"] = 1
        header["last"] = 1
        return header

    def _note_refusal(self) -> None:
        """Record in the push's handle that a server will refuse this message: a value is a NaN or an infinity."""
        places = self.first + np.arange(self.values.size) if self.indices is None else self.indices
        where = self.shard.start + int(places[~np.isfinite(self.values)][0])
        span = f"{self.shard.start + int(places[0])} to {self.shard.start + int(places[-1])}"
        self.handle.refused = f"{self.handle.what}: NaN or infinity at parameter {where}; nothing of {span} was applied"

    def batches(self) -> np.ndarray:
        """Return the batches of a message of the parameter server library: none, as it knows no data ranks."""
        return np.empty(0, np.int64)

    def acknowledge(self) -> None:
        """Count a message of the parameter server library as acknowledged."""
        self.handle.pending -= 1
