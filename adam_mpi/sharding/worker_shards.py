"""The shards of one worker: those it pulls, those it pushes, and their places in its parameter vector. Pure."""

from dataclasses import dataclass
from functools import cached_property

from adam_mpi.model.partition import Partition
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.shards import Shard


@dataclass(frozen=True)
class WorkerShards:
    """The shards of strip `strip` of a replica that `cut` partitions; without a partition all shards."""

    memory_layout: MemoryLayout
    cut: Partition | None = None
    strip: int = 0

    @property
    def size(self) -> int:
        """Return how many parameters the worker's vector has."""
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
        """Return the shards that the worker pulls."""
        return frozenset(shard.index for shard in self.memory_layout.shards if shard.start in self.starts)

    def part(self, shard: Shard) -> slice:
        """Return the place of `shard` in the worker's vector."""
        start = self.starts[shard.start]
        return slice(start, start + shard.size)

    @cached_property
    def pushed(self) -> dict[int, list[Shard]]:
        """Return server -> the shards of it that the worker pushes."""
        owners = self.memory_layout.owners
        return {
            server: [shard for shard in shards if owners[shard.index] == self.strip]
            for server, shards in self.memory_layout.held.items()
        }

    def pulls(self, server: int) -> bool:
        """Return whether the worker pulls shards of `server`."""
        return any(shard.index in self.pulled for shard in self.memory_layout.held[server])
