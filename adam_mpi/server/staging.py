"""Messages that have arrived and are not applied yet, by shard, and which of them can be applied now."""

from collections import defaultdict

from adam_mpi.checkpoint.snapshot_barrier import SnapshotBarrier
from adam_mpi.server.stepper import Stepper
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.transport.mailbox import ReceivedMessage


class StagedMessages:
    """The staged messages of one server during one generation."""

    def __init__(
        self,
        memory_layout: MemoryLayout,
        barrier: SnapshotBarrier,
        stepper: Stepper,
        most_folded: int | None,
    ) -> None:
        """`barrier` says which messages a snapshot must not contain.

        `most_folded`: messages that one step may have at most where it is sent to other copies; None: it is not sent.
        """
        self.memory_layout = memory_layout
        self.barrier = barrier
        self.stepper = stepper
        self.most_folded = most_folded
        self.by_shard: dict[int, list[ReceivedMessage]] = defaultdict(list)
        self.replicas = len(memory_layout.pushers) // memory_layout.strips

    def __len__(self) -> int:
        """Return how many messages are staged, each counted for every shard that it is for."""
        return sum(map(len, self.by_shard.values()))

    def add(self, message: ReceivedMessage) -> None:
        """Stage `message` for each of its shards that does not have it."""
        for shard in message.targets:
            self.by_shard[shard].append(message)

    def take_ready(self) -> dict[int, list[ReceivedMessage]]:
        """Unstage and return the messages that can be applied now, by shard: those of one step of each shard."""
        return {shard: messages for shard in list(self.by_shard) if (messages := self._take(shard))}

    def _take(self, shard: int) -> list[ReceivedMessage]:
        """Unstage and return the messages of the next step of `shard`; those that a snapshot must not contain stay."""
        staged = self.by_shard.pop(shard)
        held: list[ReceivedMessage] = []
        if self.barrier.limits is not None:
            held = [message for message in staged if not self.barrier.allows(message.ring, message.clock)]
            staged = [message for message in staged if self.barrier.allows(message.ring, message.clock)]
        if self.stepper.synchronous:
            ready, later = self._split_clock(staged)
        else:
            most = self._foldable(shard, staged)
            ready = staged[:most]
            later = staged[most:]
        if later or held:
            self.by_shard[shard] = later + held
        return ready

    def _foldable(self, shard: int, staged: list[ReceivedMessage]) -> int:
        """Return how many of the `staged` messages of `shard` one step may have, from the first on."""
        if self.most_folded is None:
            return len(staged)
        return min(self.most_folded, self.stepper.foldable(staged, self.memory_layout.shards[shard].size))

    def _split_clock(self, staged: list[ReceivedMessage]) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
        """Return the messages of the first clock by ring and part, if all have arrived, and those that stay staged."""
        clock = min((message.clock for message in staged), default=0)
        parts = [message for message in staged if message.clock == clock]
        if sum(message.part == message.parts - 1 for message in parts) < self.replicas:
            return [], staged
        later = [message for message in staged if message.clock != clock]
        return sorted(parts, key=lambda message: (message.ring, message.part)), later
