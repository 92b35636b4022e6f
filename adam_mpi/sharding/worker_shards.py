"""What one worker holds of the parameters: shards it pulls, those it pushes, and their places in its vector. Pure."""

from dataclasses import dataclass
from functools import cached_property

from adam_mpi.model.partition import Partition
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.shards import Shard


@dataclass(frozen=True)
class WorkerShards:
    """Without a partition: all of them."""

    memory_layout: MemoryLayout
    cut: Partition | None = None
    strip: int = 0

    @property
    def size(self) -> int:
        """Parameters in the worker's vector."""
        return self.memory_layout.parameters if self.cut is None else self.cut.strips[self.strip].parameters

    @cached_property
    def starts(self) -> dict[int, int]:
        """Where each shard that is held begins: in the flat vector -> in ours."""
        if self.cut is None:
            return {shard.start: shard.start for shard in self.memory_layout.shards}
        strip = self.cut.strips[self.strip]
        return {
            shard.start: strip.local(shard.start) for shard in self.memory_layout.shards if strip.holds(shard.start)
        }

    @cached_property
    def pulled(self) -> frozenset[int]:
        return frozenset(shard.index for shard in self.memory_layout.shards if shard.start in self.starts)

    def part(self, shard: Shard) -> slice:
        """A shard in the worker's vector."""
        start = self.starts[shard.start]
        return slice(start, start + shard.size)

    @cached_property
    def pushed(self) -> dict[int, list[Shard]]:
        """The shards of each server that we push."""
        owners = self.memory_layout.owners
        return {
            server: [shard for shard in shards if owners[shard.index] == self.strip]
            for server, shards in self.memory_layout.held.items()
        }

    def pulls(self, server: int) -> bool:
        return any(shard.index in self.pulled for shard in self.memory_layout.held[server])
