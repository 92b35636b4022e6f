"""What a client of the parameter server sends and reads in one generation."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from adam_mpi.parameter_server.arguments import read_slices
from adam_mpi.parameter_server.handles import Gather, Handle, RangeMessage
from adam_mpi.sharding import message_format
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.ring_sender import RingSender


class Transfers:
    """A ring sender to each server, and the runs of parameters that each server holds, in one generation."""

    def __init__(self, generation: Generation, client: bool) -> None:
        """Prepare the transfers of this rank; a rank that is no `client` has no ring to send through."""
        memory_layout = generation.memory_layout
        servers = memory_layout.servers
        self.generation = generation
        self.starts = [shard.start for shard in memory_layout.shards]
        self.runs = {server: memory_layout.runs(server, "weights") for server in servers}
        self.ring = memory_layout.pushers.index(generation.world.rank) if client else -1
        self.ring_senders = {server: self._make_ring_sender(server) for server in servers} if client else {}

    def _make_ring_sender(self, server: int) -> RingSender[RangeMessage]:
        generation = self.generation
        return RingSender(
            generation.memory_layout.rings, server, self.ring, generation.mailbox_window, generation.weights_window
        )

    def ring_sender(self, shard: Shard) -> RingSender[RangeMessage]:
        """Return the ring sender to the server that applies pushes of `shard`."""
        return self.ring_senders[self.generation.memory_layout.holders[shard.index][0]]

    def send(self, message: RangeMessage) -> None:
        """Queue `message` at its server's ring, and count it in its handle."""
        message.handle.pending += 1
        self.ring_sender(message.shard).waiting.append(message)

    @property
    def idle(self) -> bool:
        """Whether no message waits for a slot or for its acknowledgement."""
        return not any(sender.waiting or sender.sent for sender in self.ring_senders.values())

    @property
    def pairs_per_message(self) -> int:
        """The number of (index, value) pairs that fit into one slot of a ring."""
        return (self.generation.memory_layout.slot_bytes // 4 - message_format.HEADER_WORDS) // 2

    def shards_of(self, first: int, last: int) -> Sequence[Shard]:
        """Return the shards of parameters `first` to `last - 1`."""
        if first >= last:
            return ()
        shards = self.generation.memory_layout.shards
        return shards[bisect_right(self.starts, first) - 1 : bisect_left(self.starts, last)]

    def sync(self) -> None:
        """Make visible what servers have written since the last call, and what this rank has written to them."""
        self.generation.mailbox_window.sync()
        self.generation.weights_window.sync()

    def read_range(self, handle: Handle[np.ndarray], into: np.ndarray, offset: int) -> None:
        """Start to read the parameters from `offset` into `into`, each from the server that holds it."""
        window = self.generation.weights_window
        for server, runs in self.runs.items():
            for start, size, place in runs:
                low = max(offset, start)
                high = min(offset + into.size, start + size)
                if low < high:
                    part = into[low - offset : high - offset]
                    handle.requests.append(window.get(part, server, place + 4 * (low - start)))

    def read_indices(self, handle: Handle[np.ndarray], into: np.ndarray, indices: np.ndarray) -> None:
        """Start to read the parameters at `indices` into `into`, in their order.

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
                near = window.direct(server, place, 4 * size)
                if near is not None:
                    Gather(near.view(np.float32), picked, into, positions).copy()
                    continue
                for piece in read_slices(picked):
                    first = int(picked[piece][0])
                    read = np.empty(int(picked[piece][-1]) + 1 - first, np.float32)
                    handle.requests.append(window.get(read, server, place + 4 * first))
                    handle.gathers.append(Gather(read, picked[piece] - first, into, positions[piece]))
