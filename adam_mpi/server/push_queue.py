"""The mailbox of a server, read: messages in order, those in trouble refused, slots freed without gaps."""

import logging
from collections import Counter, defaultdict

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.world import World
from adam_mpi.sharding import message_format
from adam_mpi.sharding.codecs import BY_NUMBER, NUMBERS
from adam_mpi.sharding.factors import matrices, plans
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.transport.mailbox import ReceivedMessage, RingReceiver
from adam_mpi.transport.published_weights import PublishedWeights

SENT_AGAIN = "it has come before"
NO_BATCHES = np.empty(0, np.int64)
log = logging.getLogger(__name__)


class PushQueue:
    def __init__(
        self, world: World, memory_layout: MemoryLayout, memory: np.ndarray, published: PublishedWeights
    ) -> None:
        self.world, self.memory_layout, self.published = world, memory_layout, published
        self.words = memory.view(np.uint32)
        self.intake = RingReceiver(world, memory_layout.rings, memory_layout.pushers, memory, published)
        dense, half = matrices(memory_layout.tensors), world.config.push.factor_codec == "float16"
        planned = {layer: plans(matrix, layer, memory_layout.held, half) for layer, matrix in dense.items()}
        self.factors = {layer: plan[world.rank] for layer, plan in planned.items() if plan and world.rank in plan}
        """How factors of a layer are multiplied into the shards held here."""
        self.held = {shard.index: shard for shard in memory_layout.held[world.rank]}
        self.members = [world.layout.places[rank].member for rank in memory_layout.pushers]
        self.sequences: dict[tuple[int, int], int] = {}
        """(shard, ring) -> the highest number taken."""
        self.freed: dict[int, set[int]] = defaultdict(set)
        """Ring -> positions that are dealt with and not yet published as such."""
        self.counts: Counter[str] = Counter()

    def collect(self) -> list[ReceivedMessage]:
        """Everything that has arrived whole, ring by ring, in order."""
        arrived = [mail for mail in self.intake.collect() if self._accepts(mail)]
        for ring, position in self.intake.ask_again():
            self.counts["torn"] += 1
            log.error("message %d of %s stays torn; asked for it again", position, self.pusher(ring))
        return arrived

    def settle(self, mail: ReceivedMessage) -> None:
        """A message has been dealt with: its slot may be used again."""
        self.freed[mail.ring].add(mail.position)

    def acknowledge(self) -> None:
        """Publish what has been dealt with, ring by ring and without gaps."""
        for ring, freed in list(self.freed.items()):
            position = int(self.published.applied[ring])
            while position + 1 in freed:
                position += 1
                freed.remove(position)
            self.published.applied[ring] = position
            if not freed:
                del self.freed[ring]

    @property
    def news(self) -> bool:
        return bool(self.freed)

    def pusher(self, ring: int) -> str:
        return str(self.world.layout.places[self.memory_layout.pushers[ring]])

    def _accepts(self, mail: ReceivedMessage) -> bool:
        """Find out which shards have to take it; False, with its slot freed, if it is not for us to apply."""
        trouble = self._trouble(mail)
        if trouble:
            self._refuse(mail, trouble)
            self.settle(mail)
            return False
        self.counts["bytes"] += 4 * mail.words
        shards = [mail.shard]
        if mail.kind == message_format.FACTOR:
            shards = [shard.index for shard in self.factors[self.held[mail.shard].layer].shards]
        # One that is sent again, in another generation, may be cut in another way: some of its shards may have it.
        ring, number = mail.ring, mail.number
        mail.targets = [shard for shard in shards if number > self.sequences.get((shard, ring), 0)]
        mail.known = [shard for shard in shards if shard not in mail.targets]
        for shard in mail.targets:
            self.sequences[shard, ring] = number
        if not mail.targets:
            self._refuse(mail, SENT_AGAIN)
        elif not mail.finite:
            self.refuse_values(mail)
        return True

    def _trouble(self, mail: ReceivedMessage) -> str:
        if mail.generation != self.world.generation:
            return f"it is of generation {mail.generation}, now is {self.world.generation}"
        if mail.shard not in self.held:
            return f"shard {mail.shard} is not held here"
        size = self.held[mail.shard].size
        if mail.kind not in message_format.KINDS or not 0 <= mail.codec < len(BY_NUMBER):
            return f"kind {mail.kind}, codec {mail.codec} are unknown"
        inside = mail.kind == message_format.FACTOR or (mail.values >= 1 and 0 <= mail.first <= size - mail.values)
        if not inside or mail.words != self._words(mail):
            return f"{mail.words} words for {mail.values} values from {mail.first} of shard {mail.shard} with {size}"
        if mail.kind == message_format.SPARSE or mail.codec == NUMBERS["topk"]:
            indices, limit = self._indices(mail, size)
            if indices.size and indices.max() >= limit:
                return f"an index beyond the {limit} parameters of shard {mail.shard}"
        return ""

    def batches(self, mail: ReceivedMessage) -> np.ndarray:
        """The batches whose gradients are in a message that is not acknowledged yet."""
        if not mail.batches:
            return NO_BATCHES
        start = mail.start + mail.words + mail.words % 2
        return self.words[start : start + 2 * mail.batches].view(np.int64)

    def _words(self, mail: ReceivedMessage) -> int:
        """How long the body of such a message must be."""
        if mail.kind == message_format.SPARSE:
            return 2 * mail.values
        if mail.kind == message_format.DELTA:
            return BY_NUMBER[mail.codec].words(mail.values)
        plan = self.factors.get(self.held[mail.shard].layer)
        codec = NUMBERS[self.world.config.push.factor_codec]
        wrong = plan is None or mail.shard != plan.shards[0].index or mail.codec != codec or mail.values < 0
        return -1 if wrong or plan is None else plan.words(mail.values)

    def _indices(self, mail: ReceivedMessage, size: int) -> tuple[np.ndarray, int]:
        """The indices that a body names, and what they must stay below."""
        if mail.kind == message_format.SPARSE:
            return self.words[mail.start : mail.start + mail.values], size
        return self.words[mail.start : mail.start + mail.words // 2], mail.values

    def refuse_values(self, mail: ReceivedMessage) -> None:
        """A NaN or an infinity: counted as refused, named with its sender; the weights stay as they are."""
        trouble = f"NaN or infinity for shard {mail.shard} ({self.held[mail.shard].layer})"
        self._refuse(mail, trouble)
        if self.world.config.server.on_nan == "stop":
            raise UserError(f"push {mail.sequence} of {self.pusher(mail.ring)}: {trouble}; server.on_nan = stop")

    def _refuse(self, mail: ReceivedMessage, trouble: str) -> None:
        again = trouble == SENT_AGAIN
        self.counts["duplicates" if again else "refused"] += 1
        # After a loss there may be hundreds that were sent again, as they should be.
        level = logging.DEBUG if again else logging.ERROR
        log.log(level, "push %d of %s not applied: %s", mail.sequence, self.pusher(mail.ring), trouble)
