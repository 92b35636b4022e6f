"""The queue of pushes of a server: reads messages in order, refuses bad ones, and frees slots without gaps."""

import logging
from collections import Counter, defaultdict

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint.snapshot_barrier import SnapshotBarrier
from adam_mpi.cluster.world import World
from adam_mpi.server.stepper import Stepper
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.codecs import BY_NUMBER, NUMBERS
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.push_protocol import matrices, plans
from adam_mpi.transport.mailbox import ReceivedMessage, RingReceiver
from adam_mpi.transport.published_weights import PublishedWeights

SENT_AGAIN = "it was applied before"
NO_BATCHES = np.empty(0, np.int64)
log = logging.getLogger(__name__)


class RingPositions:
    """Positions of messages in their rings, published ring by ring and without gaps."""

    def __init__(self, published: np.ndarray) -> None:
        """`published` has, for each ring, the position up to which there are no gaps."""
        self.published = published
        self.ahead: dict[int, set[int]] = defaultdict(set)
        """Ring -> positions that are not published yet."""

    def __bool__(self) -> bool:
        return bool(self.ahead)

    def add(self, message: ReceivedMessage) -> None:
        """Add the position of `message`."""
        self.ahead[message.ring].add(message.position)

    def publish(self) -> None:
        """Publish the positions that follow those published before, without gaps."""
        for ring, ahead in list(self.ahead.items()):
            position = int(self.published[ring])
            while position + 1 in ahead:
                position += 1
                ahead.remove(position)
            self.published[ring] = position
            if not ahead:
                del self.ahead[ring]


class PushQueue:
    """The pushes that arrive in the mailbox of one server during one generation."""

    def __init__(
        self, world: World, memory_layout: MemoryLayout, memory: np.ndarray, published: PublishedWeights
    ) -> None:
        """Queue the messages of the mailbox `memory`; acknowledgements go into `published`."""
        self.world = world
        self.memory_layout = memory_layout
        self.published = published
        self.words = memory.view(np.uint32)
        self.receiver = RingReceiver(world, memory_layout.rings, memory_layout.pushers, memory, published)
        half = world.config.push.factor_codec == "float16"
        dense = matrices(memory_layout.tensors)
        planned = {layer: plans(matrix, layer, memory_layout.served, half) for layer, matrix in dense.items()}
        self.factors = {layer: plan[world.rank] for layer, plan in planned.items() if plan and world.rank in plan}
        """How factors of a layer are multiplied into the shards held here."""
        self.held = {shard.index: shard for shard in memory_layout.served[world.rank]}
        self.members = [world.layout.places[rank].member for rank in memory_layout.pushers]
        self.highest_numbers: dict[tuple[int, int], int] = {}
        """(shard, ring) -> the highest number of a message that was accepted."""
        self.freed = RingPositions(published.applied)
        """The slots that are free: what is acknowledged."""
        self.stepped = RingPositions(published.stepped)
        """The messages that are in the published weights, or never will be."""
        self.counts: Counter[str] = Counter()

    def collect_accepted(self) -> list[ReceivedMessage]:
        """Return the messages that have arrived whole and are to be applied, ring by ring, in order."""
        arrived = [message for message in self.receiver.collect_messages() if self._accepts(message)]
        for ring, position in self.receiver.ask_again():
            self.counts["torn"] += 1
            log.error("message %d of %s stays torn; it is asked for again", position, self.pusher(ring))
        return arrived

    def free_slot(self, message: ReceivedMessage) -> None:
        """Free the slot of a message that is applied or refused."""
        self.freed.add(message)

    def count_step(self, message: ReceivedMessage) -> None:
        """Count a shard that has stepped on `message`; with the last one the message is in the weights."""
        message.unstepped -= 1
        if message.unstepped <= 0:
            self.stepped.add(message)

    def acknowledge_freed(self) -> None:
        """Publish the freed slots as acknowledgements."""
        self.freed.publish()

    @property
    def has_unacknowledged(self) -> bool:
        """Return whether slots are free that `acknowledge` has not published."""
        return bool(self.freed)

    def pusher(self, ring: int) -> str:
        """Return the name of the pusher of `ring`, for messages."""
        return str(self.world.layout.places[self.memory_layout.pushers[ring]])

    def _accepts(self, message: ReceivedMessage) -> bool:
        """Set the shards that `message` is to be applied to; return False, with its slot freed, if it is refused."""
        trouble = self._trouble(message)
        if trouble:
            self._refuse(message, trouble)
            self.stepped.add(message)
            self.free_slot(message)
            return False
        self.counts["bytes"] += 4 * message.words
        shards = [message.shard]
        if message.kind == message_formats.FACTOR:
            shards = [shard.index for shard in self.factors[self.held[message.shard].layer].shards]
        # A push that is sent again, in another generation, may be split differently: some of its shards may have it.
        message.targets = [
            shard for shard in shards if message.number > self.highest_numbers.get((shard, message.ring), 0)
        ]
        message.known = [shard for shard in shards if shard not in message.targets]
        message.unstepped = len(message.targets)
        for shard in message.targets:
            self.highest_numbers[shard, message.ring] = message.number
        if not message.targets:
            self.stepped.add(message)
            self._refuse(message, SENT_AGAIN)
        elif not message.finite:
            self._refuse_values(message)
        return True

    def _trouble(self, message: ReceivedMessage) -> str:
        """Return why `message` cannot be applied; an empty string if it can."""
        if message.generation != self.world.generation:
            return f"it is of generation {message.generation}, the current one is {self.world.generation}"
        if message.shard not in self.held:
            return f"shard {message.shard} is not held here"
        size = self.held[message.shard].size
        if message.kind not in message_formats.KINDS or not 0 <= message.codec < len(BY_NUMBER):
            return f"kind {message.kind}, codec {message.codec} are unknown"
        least = 0 if message.shard in self.memory_layout.frozen else 1
        inside = message.kind == message_formats.FACTOR or (
            message.values >= least and 0 <= message.first <= size - message.values
        )
        if not inside or message.words != self._words(message):
            values = f"{message.values} values from {message.first} of shard {message.shard} with {size}"
            return f"{message.words} words for {values}"
        if message.kind == message_formats.SPARSE or message.codec == NUMBERS["topk"]:
            indices, limit = self._indices(message, size)
            if indices.size and indices.max() >= limit:
                return f"an index beyond the {limit} parameters of shard {message.shard}"
        return ""

    def batches(self, message: ReceivedMessage) -> np.ndarray:
        """Return the ids of the batches whose gradients are in `message`, whose slot is not free yet."""
        if message.ids is not None:
            return message.ids
        if not message.batches:
            return NO_BATCHES
        start = message.start + message.words + message.words % 2
        return self.words[start : start + 2 * message.batches].view(np.int64)

    def _words(self, message: ReceivedMessage) -> int:
        """Return how many words the body of `message` must have by its header; -1 if there is no such message."""
        if message.kind == message_formats.SPARSE:
            return 2 * message.values
        if message.kind == message_formats.DELTA:
            return BY_NUMBER[message.codec].words(message.values)
        plan = self.factors.get(self.held[message.shard].layer)
        codec = NUMBERS[self.world.config.push.factor_codec]
        wrong = plan is None or message.shard != plan.shards[0].index or message.codec != codec or message.values < 0
        return -1 if wrong or plan is None else plan.words(message.values)

    def _indices(self, message: ReceivedMessage, size: int) -> tuple[np.ndarray, int]:
        """Return the indices in the body of `message`, and the limit that they must stay below."""
        if message.kind == message_formats.SPARSE:
            return self.words[message.start : message.start + message.values], size
        return self.words[message.start : message.start + message.words // 2], message.values

    def _refuse_values(self, message: ReceivedMessage) -> None:
        """Count `message` as refused because of a NaN or infinity; raise UserError if `server.on_nan` says stop."""
        trouble = f"NaN or infinity for shard {message.shard} ({self.held[message.shard].layer})"
        self._refuse(message, trouble)
        if self.world.config.server.on_nan == "stop":
            raise UserError(f"push {message.sequence} of {self.pusher(message.ring)}: {trouble}; server.on_nan = stop")

    def _refuse(self, message: ReceivedMessage, trouble: str) -> None:
        """Count and log a message that is not applied, because of `trouble`."""
        again = trouble == SENT_AGAIN
        self.counts["duplicates" if again else "refused"] += 1
        # After a rank is lost, hundreds of pushes may be sent again, as they should be.
        level = logging.DEBUG if again else logging.ERROR
        log.log(level, "push %d of %s not applied: %s", message.sequence, self.pusher(message.ring), trouble)


class StagedMessages:
    """The staged messages of one server during one generation."""

    def __init__(
        self,
        memory_layout: MemoryLayout,
        barrier: SnapshotBarrier,
        stepper: Stepper,
        most_folded: int | None,
    ) -> None:
        """Stage messages for steps; `barrier` says which ones a snapshot must not contain.

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

    def stage(self, message: ReceivedMessage) -> None:
        """Stage `message` for each of its shards that does not have it."""
        for shard in message.targets:
            self.by_shard[shard].append(message)

    def take_ready(self) -> dict[int, list[ReceivedMessage]]:
        """Unstage and return the messages that can be applied now, by shard: those of one step of each shard."""
        return {shard: messages for shard in list(self.by_shard) if (messages := self._unstage(shard))}

    def _unstage(self, shard: int) -> list[ReceivedMessage]:
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
