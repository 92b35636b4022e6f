"""The pushes and pulls of one client; they outlive a generation, and continue in the next one when a rank is lost."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.parameter_server.arguments import read_slices
from adam_mpi.parameter_server.handles import Gather, Handle, RangeMessage
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.ring_sender import RingSender


class Transfers:
    """A ring sender to each server, and the runs of parameters that each server holds, in one generation."""

    def __init__(self, generation: Generation, client: bool) -> None:
        """Prepare the library's transfers of this rank; a rank that is no `client` has no ring to send through."""
        memory_layout = generation.memory_layout
        servers = memory_layout.servers
        self.generation = generation
        self.starts = [shard.start for shard in memory_layout.shards]
        self.runs = {server: memory_layout.runs(server, "weights") for server in servers}
        self.ring = memory_layout.pushers.index(generation.world.rank) if client else -1
        self.ring_senders = {server: self._make_ring_sender(server) for server in servers} if client else {}

    def _make_ring_sender(self, server: int) -> RingSender[RangeMessage]:
        """Make the ring sender to `server` for pushes of the parameter server library."""
        generation = self.generation
        return RingSender(
            generation.memory_layout.rings, server, self.ring, generation.mailbox_window, generation.weights_window
        )

    def ring_sender(self, shard: Shard) -> RingSender[RangeMessage]:
        """Return the library client's ring sender to the server that applies pushes of `shard`."""
        return self.ring_senders[self.generation.memory_layout.holders[shard.index][0]]

    def send(self, message: RangeMessage) -> None:
        """Queue `message` of the parameter server library at its server's ring, and count it in its handle."""
        message.handle.pending += 1
        self.ring_sender(message.shard).waiting.append(message)

    @property
    def idle(self) -> bool:
        """Return whether no message of the library waits for a slot or for its acknowledgement."""
        return not any(sender.waiting or sender.sent for sender in self.ring_senders.values())

    @property
    def pairs_per_message(self) -> int:
        """Return the number of (index, value) pairs of a library push that fit into one slot of a ring."""
        return (self.generation.memory_layout.slot_bytes // 4 - message_formats.HEADER_WORDS) // 2

    def shards_of(self, first: int, last: int) -> Sequence[Shard]:
        """Return the shards of parameters `first` to `last - 1` of the parameter server library."""
        if first >= last:
            return ()
        shards = self.generation.memory_layout.shards
        return shards[bisect_right(self.starts, first) - 1 : bisect_left(self.starts, last)]

    def sync(self) -> None:
        """Make visible to the library's client what servers have written, and to them what this rank has written."""
        self.generation.mailbox_window.sync()
        self.generation.weights_window.sync()

    def read_range(self, handle: Handle[np.ndarray], into: np.ndarray, offset: int) -> None:
        """Start the library's read of parameters from `offset` into `into`, each from the server that holds it."""
        window = self.generation.weights_window
        for server, runs in self.runs.items():
            for start, size, place in runs:
                low = max(offset, start)
                high = min(offset + into.size, start + size)
                if low < high:
                    part = into[low - offset : high - offset]
                    handle.requests.append(window.get(part, server, place + 4 * (low - start)))

    def read_indices(self, handle: Handle[np.ndarray], into: np.ndarray, indices: np.ndarray) -> None:
        """Start the library's read of the parameters at `indices` into `into`, in their order.

        Memory of servers on this host is read at once; from other hosts whole pieces are read and picked from later.
        """
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        window = self.generation.weights_window
        for server, runs in self.runs.items():
            for start, size, place in runs:
                low, high = np.searchsorted(ordered, [start, start + size])
                if low == high:
                    continue
                picked = ordered[low:high] - start
                positions = order[low:high]
                near = window.memory_of(server, place, 4 * size)
                if near is not None:
                    Gather(near.view(np.float32), picked, into, positions).copy()
                    continue
                for piece in read_slices(picked):
                    first = int(picked[piece][0])
                    read = np.empty(int(picked[piece][-1]) + 1 - first, np.float32)
                    handle.requests.append(window.get(read, server, place + 4 * first))
                    handle.gathers.append(Gather(read, picked[piece] - first, into, positions[piece]))


Filter = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(indices, values) -> which of them to send now; the rest is carried forward into the next push."""


def significant(threshold: float) -> Filter:
    """Return a filter for pushes of the library that sends only values of at least `threshold` in size.

    Parameters
    ----------
    threshold : float
        Smallest absolute value that is sent. What is smaller is added to the next push of the same parameter.

    Returns
    -------
    callable
        A filter for `ParameterServer(filter=...)`: it takes indices and values, and returns a mask.

    Examples
    --------
    >>> import numpy as np
    >>> from adam_mpi import significant
    >>> keep = significant(0.5)
    >>> keep(np.array([3, 4]), np.array([-0.75, 0.25])).tolist()
    [True, False]
    """
    return lambda indices, values: np.abs(values) >= threshold


class Client:
    """The handles and messages of one rank that are not complete."""

    transfers: Transfers
    """Those of the current generation."""

    def __init__(self, size: int, keep: Filter | None) -> None:
        self.keep = keep
        self.carried = np.zeros(size if keep else 0, np.float32)
        """What the filter has kept back, by parameter."""
        self.waiting: list[Handle[Any]] = []
        """Handles that others must be done before."""
        self.reading: list[Handle[Any]] = []
        """Pulls that are under way."""
        self.unacknowledged: list[RangeMessage] = []
        """Messages to send again in the next generation."""
        self.sequence = 0

    @property
    def idle(self) -> bool:
        """Return whether this client of the library has no push and no pull under way."""
        return self.transfers.idle and not self.waiting and not self.reading

    def start_ready(self, handle: Handle[Any]) -> bool:
        """Start the push or pull of `handle` if it is ready and has not started; return whether it is ready."""
        if handle.ready and handle.pending < 0:
            handle.pending = 0
            handle.start(handle)
        return handle.ready

    def push_range(self, values: np.ndarray, offset: int, after: Sequence[Handle[Any]]) -> Handle[None]:
        """Return a handle of the library that pushes `values` for the parameters from `offset`."""
        stop = offset + values.size

        def start(handle: Handle[Any]) -> None:
            for shard in self.transfers.shards_of(offset, stop):
                low = max(offset, shard.start)
                part = values[low - offset : min(stop, shard.stop) - offset]
                self._send(handle, shard, part, first=low - shard.start)

        return Handle(after, start, f"push of {values.size} parameters from {offset}")

    def push_pairs(self, indices: np.ndarray, values: np.ndarray, after: Sequence[Handle[Any]]) -> Handle[None]:
        """Return a handle of the library that pushes the pairs that the filter keeps; `indices` increase."""
        if self.keep is not None:
            indices, values = self._filtered(indices, values, self.keep)

        def start(handle: Handle[Any]) -> None:
            room = self.transfers.pairs_per_message
            shards = self.transfers.shards_of(int(indices[0]), int(indices[-1]) + 1) if indices.size else ()
            for shard in shards:
                low, high = np.searchsorted(indices, [shard.start, shard.stop])
                for first in range(low, high, room):
                    part = slice(first, min(first + room, high))
                    local = (indices[part] - shard.start).astype(np.uint32)
                    self._send(handle, shard, values[part], indices=local)

        return Handle(after, start, f"push of {indices.size} indices")

    def _filtered(self, indices: np.ndarray, values: np.ndarray, keep: Filter) -> tuple[np.ndarray, np.ndarray]:
        """Add `values` to what the library's client carries; return the pairs that its filter sends now."""
        self.carried[indices] += values
        kept = np.asarray(keep(indices, self.carried[indices]), bool)
        sent = indices[kept]
        amounts = self.carried[sent]
        self.carried[sent] = 0
        return sent, amounts

    def _send(
        self, handle: Handle[Any], shard: Shard, values: np.ndarray, first: int = 0, indices: np.ndarray | None = None
    ) -> None:
        """Queue the message of the library with `values` of `shard`, and remember it until its acknowledgement."""
        self.sequence += 1
        message = RangeMessage(
            client=self,
            handle=handle,
            shard=shard,
            sequence=self.sequence,
            values=values,
            first=first,
            indices=indices,
        )
        self.transfers.send(message)

    def pull_range(
        self, offset: int, count: int, into: np.ndarray | None, after: Sequence[Handle[Any]]
    ) -> Handle[np.ndarray]:
        """Return a handle of the library that reads `count` parameters from `offset` into `into`, or a new array."""

        def start(handle: Handle[Any]) -> None:
            self.transfers.read_range(handle, self._start_read(handle, count, into), offset)

        return Handle(after, start, f"pull of {count} parameters from {offset}")

    def pull_indices(
        self, indices: np.ndarray, into: np.ndarray | None, after: Sequence[Handle[Any]]
    ) -> Handle[np.ndarray]:
        """Return a handle of the library that reads the parameters at `indices` into `into`, or a new array."""

        def start(handle: Handle[Any]) -> None:
            self.transfers.read_indices(handle, self._start_read(handle, indices.size, into), indices)

        return Handle(after, start, f"pull of {indices.size} indices")

    def _start_read(self, handle: Handle[Any], count: int, into: np.ndarray | None) -> np.ndarray:
        """Note that the pull of `handle` is under way; return the array that the library reads into."""
        values = np.empty(count, np.float32) if into is None else into
        handle.values = values
        handle.pending = 1
        handle.requests = []
        handle.gathers = []
        if handle not in self.reading:
            self.reading.append(handle)
        # Between the acknowledgements that were seen and the weights that have those pushes.
        self.transfers.generation.weights_window.sync()
        return values

    def step(self) -> None:
        """Start the library's ready pushes and pulls, send what has a slot, and complete the pulls that arrived."""
        self.waiting = [handle for handle in self.waiting if not self.start_ready(handle)]
        for sender in self.transfers.ring_senders.values():
            sender.step()
        for handle in [handle for handle in self.reading if MPI.Request.Testall(handle.requests)]:
            self.reading.remove(handle)
            for gather in handle.gathers:
                gather.copy()
            handle.pending = 0
            handle.gathers = []

    def abandon(self) -> list[object]:
        """Keep the library's messages that are not acknowledged, in push order; return the transfers under way."""
        senders = list(self.transfers.ring_senders.values())
        self.transfers.ring_senders = {}
        sent = [message for sender in senders for message in (*sender.sent, *sender.waiting)]
        self.unacknowledged = sorted([*self.unacknowledged, *sent], key=lambda message: message.sequence)
        return [*senders, *(request for handle in self.reading for request in handle.requests)]

    def resume(self) -> None:
        """Send the library's messages that were not acknowledged again, with their numbers; start pulls again."""
        for message in self.unacknowledged:
            self.transfers.ring_sender(message.shard).waiting.append(message)
        self.unacknowledged = []
        for handle in self.reading:
            handle.start(handle)
