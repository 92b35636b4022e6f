"""The shelf plan: where each shard, mailbox slot and published number lies in the servers' memory. Pure.

Every rank makes the same plan from the same numbers, so a byte offset in another rank's window is never sent.

A server publishes, for others to read: | clock | a line per pusher and per peer | a version per shard | weights | ...
(and behind them average and short, the weights in bfloat16, where the configuration asks for them);
and has a mailbox, for others to write: | pusher 0: slot 0, slot 1, ... | pusher 1: ... |
With several copies of each shard the servers are each other's peers, with rings of records in a window of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from adam_mpi.base.errors import UserError
from adam_mpi.config import Config
from adam_mpi.config.checks import MOST_BATCHES
from adam_mpi.model.parameters import Tensor
from adam_mpi.model.partition import Partition
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.message_format import message_words
from adam_mpi.sharding.shards import Shard, cut, place

LINE = 64  # a cache line: what one pusher reads is not disturbed by what others do
MOST_SLOTS = 8
LEAST_SHARD = 64
# A record has room for the batches of all pushes that it folds.
RECORD_BATCHES = 16 * MOST_BATCHES
WIDTHS = {"weights": 4, "ema": 4, "short": 2}


@dataclass(frozen=True)
class Rings:
    """Rings that others write into this server's memory, one each, and where it publishes what it has dealt with."""

    count: int
    slots: int
    slot_bytes: int
    first_line: int

    @property
    def ring_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def bytes(self) -> int:
        return self.count * self.ring_bytes

    def line_offset(self, ring: int) -> int:
        return LINE * (1 + self.first_line + ring)


@dataclass(frozen=True)
class MemoryLayout:
    shards: tuple[Shard, ...]
    holders: tuple[tuple[int, ...], ...]
    """The ranks that hold each shard, the one that serves it first."""
    servers: tuple[int, ...]
    pushers: tuple[int, ...]
    """The ranks that push, in the order of their rings."""
    slots: int
    """StoreFile of one pusher's ring."""
    slot_bytes: int
    regions: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    owners: tuple[int, ...] = ()
    """Of each shard: the strip of a replica that pushes it."""
    strips: int = 1
    peers: Rings = Rings(0, 0, 0, 0)
    """The servers' rings of records in each other's memory; none where each shard has one copy."""
    arena: int = 0
    """Bytes behind those rings for what a server has folded: others on the same node read it there."""
    held: dict[int, tuple[Shard, ...]] = field(init=False)
    """What each server serves."""
    copied: dict[int, tuple[Shard, ...]] = field(init=False)
    """What it has copies of besides."""

    def __post_init__(self) -> None:
        served: dict[int, list[Shard]] = {server: [] for server in self.servers}
        copied: dict[int, list[Shard]] = {server: [] for server in self.servers}
        for shard in self.shards:
            first, *others = self.holders[shard.index]
            served[first].append(shard)
            for server in others:
                copied[server].append(shard)
        for name, shards in (("held", served), ("copied", copied)):
            object.__setattr__(self, name, {server: tuple(mine) for server, mine in shards.items()})
        object.__setattr__(self, "owners", self.owners or (0,) * len(self.shards))

    @property
    def rings(self) -> Rings:
        return Rings(len(self.pushers), self.slots, self.slot_bytes, 0)

    @property
    def ring_bytes(self) -> int:
        return self.rings.ring_bytes

    @property
    def body_words(self) -> int:
        """Words of a slot that a message's body may take."""
        return self.slot_bytes // 4 - message_words(0, MOST_BATCHES) - 1

    @property
    def mailbox_bytes(self) -> int:
        return self.rings.bytes

    @property
    def mirror_bytes(self) -> int:
        return self.peers.bytes + self.arena

    @property
    def parameters(self) -> int:
        return self.shards[-1].stop

    def feeding(self, server: int) -> tuple[int, ...]:
        """The rings that push to a server; those of a replica's strips are one after the other."""
        strips = {self.owners[shard.index] for shard in self.held[server]}
        return tuple(ring for ring in range(len(self.pushers)) if ring % self.strips in strips)

    def line_offset(self, ring: int) -> int:
        return self.rings.line_offset(ring)

    @property
    def version_offset(self) -> int:
        return self.line_offset(len(self.pushers) + self.peers.count)

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
    tensors: Sequence[Tensor],
    servers: Mapping[int, str],
    pushers: Sequence[int],
    config: Config,
    partition: Partition | None = None,
    shards: Sequence[Shard] = (),
    holders: Sequence[tuple[int, ...]] = (),
) -> MemoryLayout:
    """Shards as configured, placed by hashing; later generations keep their `shards`, and say who holds them."""
    room = config.server.mailbox_bytes
    shards = shards or cut_for(tensors, len(pushers), config, partition)
    owners = tuple(partition.owner(piece.start) for piece in shards) if partition else ()
    largest = max(piece.size for piece in shards)
    slot = _slot_bytes(largest, config)
    holders = holders or place(shards, servers, config.server.copies)
    copied = any(len(copies) > 1 for copies in holders)
    # By way of other copies an acknowledgement takes twice as long: twice as much is under way.
    slots = max(2, min(MOST_SLOTS * (2 if copied else 1), room // (max(1, len(pushers)) * slot)))
    regions = ["weights"]
    if config.optimizer.ema:
        regions.append("ema")
    if config.pull.codec == "bfloat16":
        regions.append("short")
    peers = Rings(0, 0, 0, 0)
    if copied:
        record = _lined(4 * message_words(largest, 1 + 2 * len(pushers) + RECORD_BATCHES))
        peers = Rings(len(servers), max(2, min(MOST_SLOTS, room // (len(servers) * record))), record, len(pushers))
    return MemoryLayout(
        tuple(shards),
        tuple(holders),
        tuple(servers),
        tuple(pushers),
        slots,
        slot,
        tuple(regions),
        tuple(tensors),
        owners,
        len(partition) if partition else 1,
        peers,
        peers.bytes,
    )


def cut_for(
    tensors: Sequence[Tensor], pushers: int, config: Config, partition: Partition | None = None
) -> tuple[Shard, ...]:
    """Smaller shards than configured where the mailboxes have no room for two of them per pusher.

    In a partition every shard belongs to one strip, so that a replica pushes it once.
    """
    shard, room = config.server.shard, config.server.mailbox_bytes
    while 2 * pushers * _slot_bytes(shard, config) > room:
        if shard == LEAST_SHARD:
            least = 2 * pushers * _slot_bytes(shard, config)
            raise UserError(f"server.mailbox_bytes = {room}: too small for {pushers} pushers; at least {least}")
        shard = max(LEAST_SHARD, shard // 2)
    return cut(tensors, shard, partition.edges if partition else ())


def _slot_bytes(parameters: int, config: Config) -> int:
    body = CODECS[config.push.codec].words(parameters)
    return _lined(4 * message_words(body, MOST_BATCHES))


def _lined(size: int) -> int:
    return -(-size // LINE) * LINE
