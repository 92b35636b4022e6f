"""What error feedback carries into later pushes, and a pusher's part of a snapshot: the residual between two clocks.

Ordered to hold, a pusher reports how many pushes it has begun, and packs nothing of later ones. When the coordinator
sends the clocks of the snapshot, it packs what is before its clock; the residual is then what belongs to the snapshot:
it is copied, and later pushes are released.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numba import njit

from adam_mpi.base.pools import BufferPool
from adam_mpi.checkpoint import snapshot
from adam_mpi.checkpoint.disk_task import disk_seconds
from adam_mpi.checkpoint.snapshot_barrier import SnapshotBarrier
from adam_mpi.cluster.control_messages import HoldSnapshot, Message, SnapshotHeld, SnapshotWritten, TakeSnapshot
from adam_mpi.sharding.codecs import Codec
from adam_mpi.sharding.memory_layout import WorkerShards
from adam_mpi.sharding.shards import Spans
from adam_mpi.sharding.training_state import Position
from adam_mpi.worker.gradient_buffer import Encoded
from adam_mpi.worker.push_messages import PushRings


class Residual:
    """Keep what the codec has left out of the pushes of one worker; empty where the codec has no error feedback."""

    def __init__(self, worker_shards: WorkerShards, codec: Codec, carried: Spans | None = None) -> None:
        """Begin with `carried`, which an earlier job's codec had left out, or with zeros."""
        self.codec = codec
        self.buffers = BufferPool()
        self.values = np.zeros(worker_shards.size if codec.feedback else 0, np.float32)
        self.lay_out(worker_shards)
        if carried is not None:
            for shard in self.shards:
                self.parts[shard.index][:] = carried[shard.start : shard.stop]

    def lay_out(self, worker_shards: WorkerShards) -> None:
        """Cut the residual into the shards that this worker pushes in a generation."""
        self.shards = [shard for pushed in worker_shards.pushed.values() for shard in pushed]
        self.parts = {shard.index: self.values[worker_shards.part(shard)] for shard in self.shards}

    def encode(self, shard: int, values: np.ndarray, keep: bool) -> Encoded:
        """Encode `values` for `shard` together with what earlier pushes left out; `keep` a copy of the old residual.

        Where the sum is not finite the message is one that servers refuse, and the residual has nothing of it.
        """
        residual = self.parts[shard]
        size = self.codec.words(values.size)
        buffers = [self.buffers.take(size)]
        words = buffers[0][:size].view(np.uint32)
        before = None
        if keep:
            buffers.append(self.buffers.take(residual.size))
            before = buffers[1][: residual.size]
            before[:] = residual
        if not finite_sum(values, residual):
            words[:] = 0
            return Encoded(words, False, before, tuple(buffers))
        return Encoded(words[: self.codec.encode(values, residual, words)], True, before, tuple(buffers))

    def forget_encodings(self, encoded: dict[int, Encoded]) -> None:
        """Forget how the parts of a push were encoded, and reuse their memory."""
        for sent in encoded.values():
            for buffer in sent.buffers:
                self.buffers.give_back(buffer)
        encoded.clear()

    def norm(self, scale: float) -> float | None:
        """Return the length of the residual times `scale`; None where the codec carries nothing."""
        return float(np.linalg.norm(self.values)) * scale if self.codec.feedback else None

    def take_back(self, encoded: Mapping[int, Encoded]) -> None:
        """Restore the residual to what it was before the parts of a push were `encoded`: no server has them."""
        for shard, sent in encoded.items():
            assert sent.before is not None, "the residual before this push was not kept"
            self.parts[shard][:] = sent.before


class ResidualSnapshot:
    """Make a pusher's part of the snapshots of one generation; one that is not complete when it ends is not made."""

    def __init__(self, residual: Residual, rings: PushRings) -> None:
        self.residual = residual
        self.rings = rings
        self.barrier = SnapshotBarrier(1, disk_seconds(rings.world.config))

    def handle(self, message: Message, begun: int) -> None:
        """Follow an order of the coordinator; `begun` is the clock of the next push."""
        match message:
            case HoldSnapshot():
                self._send(SnapshotHeld("worker", self.hold(begun)))
            case TakeSnapshot():
                self.at(message.clocks, Path(message.folder))
            case _:
                raise TypeError(f"a worker does not handle {message}")

    def hold(self, begun: int) -> list[int]:
        """Hold later pushes back; return the clock `begun` in the place of this pusher, and 0 for each other one."""
        self.barrier.begun = [begun]
        clock = self.barrier.hold()[0]
        return [clock if ring == self.rings.ring else 0 for ring in range(self.rings.pushers)]

    def at(self, clocks: Sequence[int], folder: Path) -> None:
        """Write the residual to `folder` when all pushes before this pusher's clock of `clocks` are packed."""
        self.barrier.set_limits([clocks[self.rings.ring]], folder)
        self._release()

    def holds(self, clock: int) -> bool:
        """Return whether a push of `clock` must wait until the residual is copied."""
        return not self.barrier.allows(0, clock)

    def step(self, begun: int) -> None:
        """Copy the residual once everything before the snapshot is packed; report the copies that are written.

        `begun` is the clock of the next push.
        """
        if self.barrier.reached([begun]) and not any(sender.waiting for sender in self.rings.senders):
            shards = self.residual.shards
            versions = np.zeros(len(shards), np.int64)
            name = snapshot.residual_name(self.rings.ring)
            self.barrier.copy_state(name, shards, {"residual": self.residual.parts}, versions, Position(0))
            self._release()
        while (report := self.barrier.written()) is not None:
            self._send(SnapshotWritten("worker", report))

    def _release(self) -> None:
        """Let the senders pack what is before the snapshot, or everything when none is being made."""
        for sender in self.rings.senders:
            while sender.held and not self.holds(sender.held[0].buffer.clock):
                sender.waiting.append(sender.held.popleft())

    def _send(self, message: Message) -> None:
        self.rings.generation.channel.send(message, self.rings.world.layout.coordinator)


@njit(nogil=True, cache=True)
def finite_sum(values: np.ndarray, residual: np.ndarray) -> bool:
    """Return whether no sum of a value and what is carried for it is a NaN or an infinity."""
    beyond = 0
    for i in range(values.size):
        # A NaN is not below anything either.
        beyond += not abs(values[i] + residual[i]) < np.inf
    return beyond == 0
