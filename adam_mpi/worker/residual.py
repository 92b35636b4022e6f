"""What error feedback carries into later pushes, and a pusher's part of a snapshot: the residual between two clocks.

Told to hold, a pusher says how many pushes it has begun, and packs nothing of later ones. When the cut is known it
packs what is before it; the residual is then what belongs to the snapshot: it is copied, and pushes go on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from adam_mpi.base.buffer_pool import BufferPool
from adam_mpi.checkpoint import snapshot
from adam_mpi.checkpoint.snapshot_barrier import SnapshotBarrier
from adam_mpi.sharding.codecs import Codec
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.spans import Spans
from adam_mpi.sharding.worker_shards import WorkerShards
from adam_mpi.transport.ring_sender import RingSender
from adam_mpi.worker.gradient_buffer import Encoded


class Residual:
    def __init__(self, holding: WorkerShards, codec: Codec, carried: Spans | None = None) -> None:
        self.codec, self.buffers = codec, BufferPool()
        self.values = np.zeros(holding.size if codec.feedback else 0, np.float32)
        self._share_out(holding)
        if carried is not None:
            for shard in self.shards:
                self.parts[shard.index][:] = carried[shard.start : shard.stop]

    def enter(self, holding: WorkerShards, ring: int, lanes: Sequence[RingSender[Any]], seconds: float) -> None:
        """Begin a generation; a snapshot that was under way in the last one is not made."""
        self.ring, self.lanes, self.rings = ring, lanes, len(holding.memory_layout.pushers)
        self._share_out(holding)
        self.cut = SnapshotBarrier(1, seconds)

    def _share_out(self, holding: WorkerShards) -> None:
        self.shards = [shard for pushed in holding.pushed.values() for shard in pushed]
        self.parts = {shard.index: self.values[holding.part(shard)] for shard in self.shards}

    def encode(self, shard: int, values: np.ndarray, keep: bool) -> Encoded:
        """Encode values for a shard together with what earlier pushes left out; `keep` the residual as it was before.

        Where that is not finite the message is one that servers refuse, and the residual has nothing of it.
        """
        residual, size = self.parts[shard], self.codec.words(values.size)
        buffers = [self.buffers.take(size), *([self.buffers.take(residual.size)] if keep else ())]
        words, before = buffers[0][:size].view(np.uint32), None
        if keep:
            before = buffers[1][: residual.size]
            before[:] = residual
        if not finite_sum(values, residual):
            words[:] = 0
            return Encoded(words, False, before, tuple(buffers))
        return Encoded(words[: self.codec.encode(values, residual, words)], True, before, tuple(buffers))

    def release(self, encoded: dict[int, Encoded]) -> None:
        """Forget how the parts of a push were encoded; their memory is used again."""
        for sent in encoded.values():
            for buffer in sent.buffers:
                self.buffers.give(buffer)
        encoded.clear()

    def norm(self, unit: float) -> float | None:
        """How much is carried, as the length of the vector times `unit`; None where the codec carries nothing."""
        return float(np.linalg.norm(self.values)) * unit if self.codec.feedback else None

    def take_back(self, encoded: Mapping[int, Encoded]) -> None:
        """Make the residual what it was before these parts of a push were encoded: no server has them."""
        for shard, sent in encoded.items():
            assert sent.before is not None, "a step back was not provided for"
            self.parts[shard][:] = sent.before

    def hold(self, begun: int) -> list[int]:
        """Returns how far we are, as a clock per pusher."""
        self.cut.begun = [begun]
        return [self.cut.hold()[0] if ring == self.ring else 0 for ring in range(self.rings)]

    def at(self, clocks: Sequence[int], folder: Path) -> None:
        self.cut.at([clocks[self.ring]], folder)
        self._release()

    def holds(self, clock: int) -> bool:
        return not self.cut.allows(0, clock)

    def step(self, begun: int) -> None:
        """Copy the residual once everything before the cut has been packed."""
        if not self.cut.reached([begun]) or any(lane.waiting for lane in self.lanes):
            return
        versions = np.zeros(len(self.shards), np.int64)
        self.cut.take(snapshot.residual_name(self.ring), self.shards, {"residual": self.parts}, versions, Position(0))
        self._release()

    def _release(self) -> None:
        """Let go what is before the cut, or everything when there is none."""
        for lane in self.lanes:
            while lane.held and not self.holds(lane.held[0].contribution.clock):
                lane.waiting.append(lane.held.popleft())


@njit(nogil=True, cache=True)
def finite_sum(values: np.ndarray, residual: np.ndarray) -> bool:
    """Whether no sum of a value and what is carried for it is a NaN or an infinity."""
    beyond = 0
    for i in range(values.size):
        # A NaN is not below anything either.
        beyond += not abs(values[i] + residual[i]) < np.inf
    return beyond == 0
