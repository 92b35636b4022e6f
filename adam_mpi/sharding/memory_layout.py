"""The memory layout of servers: where each shard, slot and published number lies, and the shards of a worker. Pure.

Every rank computes the same layout from the same numbers, so a byte offset in another rank's window is never sent.

weights window, which others read:       | clock | a line per pusher and per peer | a version per shard | weights | ...
                                         (then ema, and short, the weights in bfloat16, where configured)
mailbox window, which others write:      | pusher 0: slot 0, slot 1, ... | pusher 1: ... |
replication window, which peers write:   | peer 0: slot 0, slot 1, ... | peer 1: ... | arena of folded gradients |
                                         (where shards have several copies: the servers are each other's peers)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from adam_mpi.base.errors import UserError
from adam_mpi.config import Config
from adam_mpi.config.sections import MOST_BATCHES
from adam_mpi.model.parameters import Tensor
from adam_mpi.model.partition import Partition
from adam_mpi.optimizer.groups import GroupSpan, frozen_edges, group_spans, parts_of
from adam_mpi.optimizer.rules import rule_of
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.message_formats import message_words
from adam_mpi.sharding.rings import Rings, lined
from adam_mpi.sharding.shards import Shard, cut, place

MOST_SLOTS = 8
LEAST_SHARD = 64

# A record has room for the batches of all pushes that it folds.
RECORD_BATCHES = 16 * MOST_BATCHES
WIDTHS = {"weights": 4, "ema": 4, "short": 2}


@dataclass(frozen=True)
class MemoryLayout:
    """The shards, the servers that hold them, and the places of everything in the servers' windows."""

    shards: tuple[Shard, ...]
    holders: tuple[tuple[int, ...], ...]
    """The servers that hold each shard, the one that serves it first."""
    servers: tuple[int, ...]
    pushers: tuple[int, ...]
    """The ranks that push, in the order of their rings."""
    slots: int
    """Slots of one pusher's ring."""
    slot_bytes: int
    regions: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    states: tuple[str, ...] = ()
    """The state vectors that the optimizer keeps beside the weights."""
    groups: tuple[GroupSpan, ...] = ()
    """The groups of parameters of `optimizer.groups`, in the order of the flat vector."""
    strip_of_shard: tuple[int, ...] = ()
    """The strip of a replica that pushes each shard."""
    strips: int = 1
    peers: Rings = Rings(0, 0, 0, 0)
    """Rings of records in the replication window; none where each shard has one copy."""
    arena: int = 0
    """Bytes behind those rings for folded gradients: other servers on the same node read them there."""
    served: dict[int, tuple[Shard, ...]] = field(init=False)
    """The shards that each server serves."""
    copied: dict[int, tuple[Shard, ...]] = field(init=False)
    """The shards that each server has copies of and does not serve."""

    def __post_init__(self) -> None:
        served: dict[int, list[Shard]] = {server: [] for server in self.servers}
        copied: dict[int, list[Shard]] = {server: [] for server in self.servers}
        for shard in self.shards:
            first, *others = self.holders[shard.index]
            served[first].append(shard)
            for server in others:
                copied[server].append(shard)
        for name, shards in (("served", served), ("copied", copied)):
            object.__setattr__(self, name, {server: tuple(mine) for server, mine in shards.items()})
        object.__setattr__(self, "strip_of_shard", self.strip_of_shard or (0,) * len(self.shards))

    @property
    def rings(self) -> Rings:
        """Return the rings of pushers in a mailbox of this memory layout."""
        return Rings(len(self.pushers), self.slots, self.slot_bytes, 0)

    @property
    def ring_bytes(self) -> int:
        """Return the bytes of one pusher's ring in the memory layout."""
        return self.rings.ring_bytes

    @property
    def body_words(self) -> int:
        """Return how many words the body of a message may have in a slot of this memory layout."""
        return self.slot_bytes // 4 - message_words(0, MOST_BATCHES) - 1

    @property
    def mailbox_bytes(self) -> int:
        """Return the bytes of a server's mailbox in the memory layout."""
        return self.rings.bytes

    @property
    def replication_bytes(self) -> int:
        """Return the bytes of a server in the replication window of the memory layout."""
        return self.peers.bytes + self.arena

    @property
    def parameters(self) -> int:
        """Return how many parameters the flat vector of the memory layout has."""
        return self.shards[-1].stop

    @cached_property
    def frozen(self) -> frozenset[int]:
        """Return the shards of the memory layout whose parameters are all frozen: only headers are pushed of them."""
        return frozenset(
            shard.index
            for shard in self.shards
            if self.groups and all(group.frozen for _, group in parts_of(self.groups, shard.start, shard.stop))
        )

    def feeding(self, server: int) -> tuple[int, ...]:
        """Return the rings that push to `server`; those of a replica's strips are one after the other."""
        strips = {self.strip_of_shard[shard.index] for shard in self.served[server]}
        return tuple(ring for ring in range(len(self.pushers)) if ring % self.strips in strips)

    def line_offset(self, ring: int) -> int:
        """Return the byte offset of the line of the pusher of `ring` in the weights window."""
        return self.rings.line_offset(ring)

    @property
    def version_offset(self) -> int:
        """Return the byte offset of the versions in the weights window."""
        return self.line_offset(len(self.pushers) + self.peers.count)

    def size(self, server: int) -> int:
        """Return how many parameters `server` serves in this memory layout."""
        return sum(shard.size for shard in self.served[server])

    def region_offset(self, server: int, region: str) -> int:
        """Return the byte offset of `region` of `server` in the weights window."""
        offset = lined(self.version_offset + 8 * len(self.served[server]))
        for name in self.regions[: self.regions.index(region)]:
            offset += lined(WIDTHS[name] * self.size(server))
        return offset

    def published_bytes(self, server: int) -> int:
        """Return the bytes of `server` in the weights window."""
        last = self.regions[-1]
        return self.region_offset(server, last) + WIDTHS[last] * self.size(server)

    def runs(self, server: int, region: str, wanted: frozenset[int] | None = None) -> list[tuple[int, int, int]]:
        """Return (start in the flat vector, parameters, byte offset) of runs of shards that one read fetches."""
        runs: list[tuple[int, int, int]] = []
        offset = self.region_offset(server, region)
        width = WIDTHS[region]
        for shard in self.served[server]:
            if wanted is None or shard.index in wanted:
                start, size, first = runs[-1] if runs else (0, 0, 0)
                if start + size == shard.start and first + width * size == offset:
                    runs[-1] = (start, size + shard.size, first)
                else:
                    runs.append((shard.start, shard.size, offset))
            offset += width * shard.size
        return runs


def plan_layout(
    tensors: Sequence[Tensor],
    servers: Mapping[int, str],
    pushers: Sequence[int],
    config: Config,
    partition: Partition | None = None,
    shards: Sequence[Shard] = (),
    holders: Sequence[tuple[int, ...]] = (),
) -> MemoryLayout:
    """Return the memory layout for `servers` (rank -> host) and `pushers`; shards are placed by hashing.

    Later generations give the `shards` there are, and their `holders`.
    """
    room = config.server.mailbox_bytes
    shards = shards or cut_for(tensors, len(pushers), config, partition)
    largest = max(shard.size for shard in shards)
    slot_bytes = _slot_bytes(largest, config)
    holders = holders or place(shards, servers, config.server.copies)
    copied = any(len(copies) > 1 for copies in holders)
    # With other copies an acknowledgement takes twice as long: twice as many messages are under way.
    most_slots = MOST_SLOTS * (2 if copied else 1)
    peers = _peer_rings(largest, len(servers), len(pushers), room) if copied else Rings(0, 0, 0, 0)
    return MemoryLayout(
        shards=tuple(shards),
        holders=tuple(holders),
        servers=tuple(servers),
        pushers=tuple(pushers),
        slots=max(2, min(most_slots, room // (max(1, len(pushers)) * slot_bytes))),
        slot_bytes=slot_bytes,
        regions=_regions(config),
        tensors=tuple(tensors),
        states=rule_of(config.optimizer).states,
        groups=tuple(group_spans(tensors, config.optimizer.groups)),
        strip_of_shard=tuple(partition.owner(shard.start) for shard in shards) if partition else (),
        strips=len(partition) if partition else 1,
        peers=peers,
        arena=peers.bytes,
    )


def _regions(config: Config) -> tuple[str, ...]:
    """Return the regions of the weights window that a server publishes."""
    regions = ["weights"]
    if config.optimizer.ema:
        regions.append("ema")
    if config.pull.codec == "bfloat16":
        regions.append("short")
    return tuple(regions)


def _peer_rings(largest: int, servers: int, pushers: int, room: int) -> Rings:
    """Return the replication rings between `servers` servers, for shards of up to `largest` parameters."""
    record = lined(4 * message_words(largest, 1 + 2 * pushers + RECORD_BATCHES))
    return Rings(servers, max(2, min(MOST_SLOTS, room // (servers * record))), record, pushers)


def cut_for(
    tensors: Sequence[Tensor], pushers: int, config: Config, partition: Partition | None = None
) -> tuple[Shard, ...]:
    """Return the shards of a memory layout, smaller than configured where mailboxes lack room for two per pusher.

    In a partition every shard belongs to one strip, so that a replica pushes it once. Frozen parameters have shards of
    their own. Raises UserError if mailboxes
    have no room for the smallest shards.
    """
    shard = config.server.shard
    room = config.server.mailbox_bytes
    while 2 * pushers * _slot_bytes(shard, config) > room:
        if shard == LEAST_SHARD:
            least = 2 * pushers * _slot_bytes(shard, config)
            raise UserError(f"server.mailbox_bytes = {room}: too small for {pushers} pushers; at least {least}")
        shard = max(LEAST_SHARD, shard // 2)
    edges = {*frozen_edges(group_spans(tensors, config.optimizer.groups)), *(partition.edges if partition else ())}
    return cut(tensors, shard, sorted(edges))


def _slot_bytes(parameters: int, config: Config) -> int:
    """Return the bytes of a mailbox slot for messages of up to `parameters` parameters."""
    body = CODECS[config.push.codec].words(parameters)
    return lined(4 * message_words(body, MOST_BATCHES))


@dataclass(frozen=True)
class WorkerShards:
    """The shards of strip `strip` of a replica that `cut` partitions; without a partition all shards."""

    memory_layout: MemoryLayout
    cut: Partition | None = None
    strip: int = 0

    @property
    def size(self) -> int:
        """Return how many parameters the vector of the worker's shards has."""
        return self.memory_layout.parameters if self.cut is None else self.cut.strips[self.strip].parameters

    @cached_property
    def starts(self) -> dict[int, int]:
        """Return where each shard of the worker begins: in the flat vector -> in its own vector."""
        if self.cut is None:
            return {shard.start: shard.start for shard in self.memory_layout.shards}
        strip = self.cut.strips[self.strip]
        return {
            shard.start: strip.local(shard.start) for shard in self.memory_layout.shards if strip.holds(shard.start)
        }

    @cached_property
    def pulled(self) -> frozenset[int]:
        """Return the shards in the memory layout that the worker pulls."""
        return frozenset(shard.index for shard in self.memory_layout.shards if shard.start in self.starts)

    def part(self, shard: Shard) -> slice:
        """Return the place of `shard` in the vector of the worker's shards."""
        start = self.starts[shard.start]
        return slice(start, start + shard.size)

    @cached_property
    def pushed(self) -> dict[int, list[Shard]]:
        """Return server -> the shards of it that the worker pushes."""
        owners = self.memory_layout.strip_of_shard
        return {
            server: [shard for shard in shards if owners[shard.index] == self.strip]
            for server, shards in self.memory_layout.served.items()
        }

    def pulls(self, server: int) -> bool:
        """Return whether the worker pulls shards that `server` holds in the memory layout."""
        return any(shard.index in self.pulled for shard in self.memory_layout.served[server])
