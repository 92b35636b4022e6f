"""The shelf plan: where each shard, mailbox slot and published number lies in the servers' memory. Pure.

Every rank makes the same plan from the same numbers, so a byte offset in another rank's window is never sent.

A server publishes, for others to read:     | clock | a line per pusher | a version per shard | weights |
and has a mailbox, for others to write:     | pusher 0: slot 0, slot 1, ... | pusher 1: ... |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from adam_mpi.errors import UserError
from adam_mpi.model.parameters import Tensor
from adam_mpi.server.shards import Shard, cut, place

HEADER_BYTES = 128
LINE = 64  # a cache line: what one pusher reads is not disturbed by what others do
MOST_SLOTS = 16


@dataclass(frozen=True)
class Shelves:
    shards: tuple[Shard, ...]
    owners: tuple[int, ...]
    """The rank that serves each shard."""
    servers: tuple[int, ...]
    pushers: tuple[int, ...]
    """The ranks that push, in the order of their rings."""
    slots: int
    """Slots of one pusher's ring."""
    batches: int
    """Batch numbers a message has room for."""
    held: dict[int, tuple[Shard, ...]] = field(init=False)

    def __post_init__(self) -> None:
        held = {server: tuple(s for s in self.shards if self.owners[s.index] == server) for server in self.servers}
        object.__setattr__(self, "held", held)

    @cached_property
    def slot_bytes(self) -> int:
        return slot_bytes(max(shard.size for shard in self.shards), self.batches)

    @property
    def ring_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def mailbox_bytes(self) -> int:
        return len(self.pushers) * self.ring_bytes

    def line_offset(self, ring: int) -> int:
        return LINE * (1 + ring)

    def version_offset(self, server: int) -> int:
        return self.line_offset(len(self.pushers))

    def weights_offset(self, server: int) -> int:
        return _lined(self.version_offset(server) + 8 * len(self.held[server]))

    def published_bytes(self, server: int) -> int:
        return self.weights_offset(server) + 4 * sum(shard.size for shard in self.held[server])

    def offsets(self, server: int) -> dict[int, int]:
        """shard index -> byte offset of its weights in the server's published memory."""
        offset, result = self.weights_offset(server), {}
        for shard in self.held[server]:
            result[shard.index] = offset
            offset += 4 * shard.size
        return result

    def runs(self, server: int) -> list[tuple[int, int, int]]:
        """(start in the flat vector, parameters, byte offset) of runs that one read can fetch."""
        runs: list[tuple[int, int, int]] = []
        offsets = self.offsets(server)
        for shard in self.held[server]:
            if runs and runs[-1][0] + runs[-1][1] == shard.start:
                start, size, offset = runs.pop()
                runs.append((start, size + shard.size, offset))
            else:
                runs.append((shard.start, shard.size, offsets[shard.index]))
        return runs


def plan(
    tensors: Sequence[Tensor], servers: Sequence[int], pushers: Sequence[int],
    shard: int, mailbox_bytes: int, batches: int,
) -> Shelves:  # fmt: skip
    """Shards of at most `shard` parameters, smaller where the mailboxes have no room for two of them per pusher."""
    while 2 * len(pushers) * slot_bytes(shard, batches) > mailbox_bytes:
        shard //= 2
        if shard < 64:
            least = 2 * len(pushers) * slot_bytes(64, batches)
            raise UserError(
                f"server.mailbox_bytes = {mailbox_bytes}: too small for {len(pushers)} pushers, set at least {least}"
            )
    shards = cut(tensors, shard)
    longest = max(piece.size for piece in shards)
    slots = min(MOST_SLOTS, mailbox_bytes // (len(pushers) * slot_bytes(longest, batches)))
    return Shelves(shards, place(shards, servers), tuple(servers), tuple(pushers), slots, batches)


def slot_bytes(parameters: int, batches: int) -> int:
    return _lined(HEADER_BYTES + 4 * parameters + 8 * (batches + 1))


def _lined(size: int) -> int:
    return -(-size // LINE) * LINE
