"""The shelf plan: where each shard, mailbox slot and published number lies in the servers' memory. Pure.

Every rank makes the same plan from the same numbers, so a byte offset in another rank's window is never sent.

A server publishes, for others to read: | clock | a line per pusher | a version per shard | weights | average | short |
and has a mailbox, for others to write: | pusher 0: slot 0, slot 1, ... | pusher 1: ... |
(average and short, the weights in bfloat16, only where the configuration asks for them).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from adam_mpi.config import Config
from adam_mpi.errors import UserError
from adam_mpi.model.parameters import Tensor
from adam_mpi.model.partition import Partition
from adam_mpi.server.codecs import CODECS
from adam_mpi.server.mailbox import message_words
from adam_mpi.server.shards import Shard, cut, place

LINE = 64  # a cache line: what one pusher reads is not disturbed by what others do
MOST_SLOTS = 8
LEAST_SHARD = 64
# Batches in one push at the most; a message has room for their numbers.
MOST_BATCHES = 64
WIDTHS = {"weights": 4, "average": 4, "short": 2}


@dataclass(frozen=True)
class Shelves:
    shards: tuple[Shard, ...]
    holders: tuple[tuple[int, ...], ...]
    """The ranks that hold each shard, the one that serves it first."""
    servers: tuple[int, ...]
    pushers: tuple[int, ...]
    """The ranks that push, in the order of their rings."""
    slots: int
    """Slots of one pusher's ring."""
    slot_bytes: int
    regions: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    owners: tuple[int, ...] = ()
    """Of each shard: the strip of a replica that pushes it."""
    strips: int = 1
    held: dict[int, tuple[Shard, ...]] = field(init=False)

    def __post_init__(self) -> None:
        mine: dict[int, list[Shard]] = {server: [] for server in self.servers}
        for shard in self.shards:
            mine[self.holders[shard.index][0]].append(shard)
        object.__setattr__(self, "held", {server: tuple(shards) for server, shards in mine.items()})
        object.__setattr__(self, "owners", self.owners or (0,) * len(self.shards))

    @property
    def ring_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def body_words(self) -> int:
        """Words of a slot that a message's body may take."""
        return self.slot_bytes // 4 - message_words(0, MOST_BATCHES) - 1

    @property
    def mailbox_bytes(self) -> int:
        return len(self.pushers) * self.ring_bytes

    @property
    def parameters(self) -> int:
        return self.shards[-1].stop

    def feeding(self, server: int) -> tuple[int, ...]:
        """The rings that push to a server; those of a replica's strips are one after the other."""
        strips = {self.owners[shard.index] for shard in self.held[server]}
        return tuple(ring for ring in range(len(self.pushers)) if ring % self.strips in strips)

    def line_offset(self, ring: int) -> int:
        return LINE * (1 + ring)

    @property
    def version_offset(self) -> int:
        return self.line_offset(len(self.pushers))

    def size(self, server: int) -> int:
        return sum(shard.size for shard in self.held[server])

    def region_offset(self, server: int, region: str) -> int:
        offset = _lined(self.version_offset + 8 * len(self.held[server]))
        for name in self.regions[: self.regions.index(region)]:
            offset += _lined(WIDTHS[name] * self.size(server))
        return offset

    def published_bytes(self, server: int) -> int:
        last = self.regions[-1]
        return self.region_offset(server, last) + WIDTHS[last] * self.size(server)

    def runs(self, server: int, region: str, wanted: frozenset[int] | None = None) -> list[tuple[int, int, int]]:
        """(start in the flat vector, parameters, byte offset) of runs of wanted shards that one read can fetch."""
        runs: list[tuple[int, int, int]] = []
        offset, width = self.region_offset(server, region), WIDTHS[region]
        for shard in self.held[server]:
            if wanted is None or shard.index in wanted:
                start, size, first = runs[-1] if runs else (0, 0, 0)
                if start + size == shard.start and first + width * size == offset:
                    runs[-1] = (start, size + shard.size, first)
                else:
                    runs.append((shard.start, shard.size, offset))
            offset += width * shard.size
        return runs


def plan(
    tensors: Sequence[Tensor], servers: Mapping[int, str], pushers: Sequence[int], config: Config,
    partition: Partition | None = None,
) -> Shelves:  # fmt: skip
    """Shards as configured, smaller where the mailboxes have no room for two of them per pusher.

    In a partition every shard belongs to one strip, so that a replica pushes it once.
    """
    shard, room = config.server.shard, config.server.mailbox_bytes
    while 2 * len(pushers) * _slot_bytes(shard, config) > room:
        if shard == LEAST_SHARD:
            least = 2 * len(pushers) * _slot_bytes(shard, config)
            raise UserError(f"server.mailbox_bytes = {room}: too small for {len(pushers)} pushers; at least {least}")
        shard = max(LEAST_SHARD, shard // 2)
    shards = cut(tensors, shard, partition.edges if partition else ())
    owners = tuple(partition.owner(piece.start) for piece in shards) if partition else ()
    slot = _slot_bytes(max(piece.size for piece in shards), config)
    slots = min(MOST_SLOTS, room // (len(pushers) * slot))
    regions = ["weights"]
    if config.optimiser.average:
        regions.append("average")
    if config.pull.codec == "bfloat16":
        regions.append("short")
    return Shelves(
        shards, place(shards, servers), tuple(servers), tuple(pushers), slots, slot, tuple(regions), tuple(tensors),
        owners, len(partition) if partition else 1,
    )  # fmt: skip


def _slot_bytes(parameters: int, config: Config) -> int:
    body = CODECS[config.push.codec].words(parameters)
    return _lined(4 * message_words(body, MOST_BATCHES))


def _lined(size: int) -> int:
    return -(-size // LINE) * LINE


