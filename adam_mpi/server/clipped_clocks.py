"""Clipping in synchronous training: the gradients of a clock wait on the servers until the norm of all is known.

Each server sums the messages of a clock for each of its shards as soon as they are there, which frees their slots: a
ring need not have room for a whole push. When it has all its shards it sends the squared norm of each tensor, as far as
it has it, and whether everything is finite, to all other servers. With those of all servers each steps its shards, on
gradients that are scaled alike whatever the layout. A clock with a NaN or an infinity anywhere takes no step at all.

Nothing of this outlives a generation. The last message of a push is acknowledged when all shards of the push are
complete, so that a push whose gradient was only held is sent again as a whole; recovery makes all shards return to the
last clock that is complete everywhere.
"""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from adam_mpi.cluster.control_messages import ClockNorms
from adam_mpi.config import Config
from adam_mpi.optimizer.clipping import clip_factors, squared_norm
from adam_mpi.server.folded_gradient import FoldedGradient
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.mailbox import ReceivedMessage

log = logging.getLogger(__name__)


class ClippedClocks:
    """The gradients that one server holds in one generation, and what others have sent of the same clocks."""

    def __init__(
        self, config: Config, memory_layout: MemoryLayout, rank: int, send: Callable[[ClockNorms, int], None]
    ) -> None:
        """`send` sends a message to another server."""
        self.config = config
        self.rank = rank
        self.send = send
        self.tensors = len(memory_layout.tensors)
        self.servers = [server for server in memory_layout.servers if memory_layout.served[server]]
        """The servers that have shards, and so a part in every norm."""
        shards = memory_layout.served[rank]
        self.parts = {shard.index: tensor_parts(memory_layout, shard) for shard in shards}
        """Shard -> the number of each tensor in it, and where the tensor lies in the shard."""
        self.held: dict[int, FoldedGradient] = {}
        """Shard -> its gradient of the current clock."""
        self.clock = -1
        """The clock of the gradients in `held`."""
        self.norms: dict[int, dict[int, ClockNorms]] = defaultdict(dict)
        """Clock -> server -> what it has sent."""
        self.open: Counter[tuple[int, int]] = Counter()
        """(ring, number of a push) -> its messages that are not complete."""
        self.last: dict[tuple[int, int], ReceivedMessage] = {}
        """(ring, number of a push) -> its last message, complete before others are."""

    def open_message(self, message: ReceivedMessage) -> None:
        """Note that `message` has arrived."""
        self.open[message.ring, message.sequence] += 1

    def finished(self, message: ReceivedMessage) -> list[ReceivedMessage]:
        """Return the messages that may be acknowledged now that `message` is complete: the last after all others."""
        push = message.ring, message.sequence
        self.open[push] -= 1
        if message.last:
            self.last[push] = message
        found = [] if message.last else [message]
        if not self.open[push]:
            del self.open[push]
            found += [self.last.pop(push)] if push in self.last else []
        return found

    def hold(self, clock: int, folds: Sequence[FoldedGradient]) -> None:
        """Keep the summed gradients of shards at `clock`; with those of all shards, send their norms."""
        self.clock = clock
        for fold in folds:
            self.held.update({shard.index: fold for shard in fold.band})
        if len(self.held) == len(self.parts):
            message = self._norms()
            self.norms[clock][self.rank] = message
            for server in self.servers:
                if server != self.rank:
                    self.send(message, server)

    def receive(self, message: ClockNorms) -> None:
        """Note what another server has sent."""
        self.norms[message.clock][message.server] = message

    @property
    def awaited(self) -> list[int]:
        """Return the servers whose norms are missing."""
        known = self.norms.get(self.clock, {})
        return [server for server in self.servers if server not in known] if self.rank in known else []

    def take(self) -> list[FoldedGradient]:
        """Return the gradients that are held, clipped, once the norms of all servers are known; until then none."""
        known = self.norms.get(self.clock, {})
        if not self.held or len(known) < len(self.servers):
            return []
        self._clip([known[server] for server in self.servers])
        folds = list(dict.fromkeys(self.held.values()))
        self.held = {}
        del self.norms[self.clock]
        return folds

    def _norms(self) -> ClockNorms:
        """Return the squared norms of the tensors in the gradients that are held."""
        squares = np.zeros(self.tensors)
        for shard in sorted(self.held):
            values = self.held[shard].values(shard)
            for tensor, part in self.parts[shard] if values.size else ():
                squares[tensor] += squared_norm(values[part])
        messages = (message for fold in self.held.values() for message in fold.messages)
        finite = all(message.finite for message in messages) and bool(np.isfinite(squares).all())
        return ClockNorms(self.rank, self.clock, squares.tolist() if finite else [], finite)

    def _clip(self, norms: Sequence[ClockNorms]) -> None:
        """Scale the gradients that are held as the `norms` of all servers demand; drop them if any is not finite."""
        if not all(found.finite for found in norms):
            log.error("clock %d has a gradient with a NaN or an infinity: no server takes its step", self.clock)
            for fold in self.held.values():
                fold.skipped = True
            return
        optimizer = self.config.optimizer
        squares = [math.fsum(column) for column in zip(*(found.squares for found in norms), strict=True)]
        factors = clip_factors(squares, optimizer.clip_norm, optimizer.clip_tensor)
        for shard, fold in self.held.items():
            values = fold.values(shard)
            for tensor, part in self.parts[shard] if values.size else ():
                if factors[tensor] < 1:
                    values[part] *= np.float32(factors[tensor])


def tensor_parts(memory_layout: MemoryLayout, shard: Shard) -> list[tuple[int, slice]]:
    """Return the number of each tensor that `shard` has a part of, and where that part lies in the shard."""
    parts = []
    for number, tensor in enumerate(memory_layout.tensors):
        first = max(shard.start, tensor.offset)
        stop = min(shard.stop, tensor.offset + tensor.size)
        if first < stop:
            parts.append((number, slice(first - shard.start, stop - shard.start)))
    return parts
