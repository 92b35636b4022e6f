"""The push client: cuts gradient buffers into messages, one per shard, and sends each to the server of its shard."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import numpy as np

from adam_mpi.cluster.watchdog import Wait
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.codecs import CODECS, NUMBERS
from adam_mpi.sharding.memory_layout import WorkerShards
from adam_mpi.sharding.message_formats import MOST_PARTS
from adam_mpi.sharding.push_protocol import FactorPlan
from adam_mpi.sharding.shards import Shard, Spans
from adam_mpi.transport.conservation import ConservationRecorder
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.ring_sender import RingSender
from adam_mpi.worker.diagnostics import Trouble
from adam_mpi.worker.gradient_buffer import Encoded, GradientBuffer, takes_back
from adam_mpi.worker.push_messages import FactorMessage, PushMessage, PushRings, ShardMessage
from adam_mpi.worker.residual import Residual, ResidualSnapshot


class PushClient:
    """Push gradient buffers, and keep each until all its messages are acknowledged.

    What belongs to one generation is in `rings` and `snapshot`, which are made for each.
    """

    def __init__(
        self, generation: Generation, worker_shards: WorkerShards | None = None, carried: Spans | None = None
    ) -> None:
        """Push the `worker_shards`, by default all; `carried` is what an earlier job's codec had left out of them."""
        self.config = generation.world.config
        self.rings = PushRings(generation, worker_shards or WorkerShards(generation.memory_layout))
        self.codec = CODECS[self.config.push.codec]
        self.residual = Residual(self.rings.worker_shards, self.codec, carried)
        self.snapshot = ResidualSnapshot(self.residual, self.rings)
        self.seen = np.zeros(len(generation.memory_layout.shards), np.int64)
        """Versions of the shards that the last pull brought."""
        self.unacknowledged: deque[GradientBuffer] = deque()
        self.acknowledged: deque[GradientBuffer] = deque()
        """Pushes that are acknowledged as a whole and whose batches are not reported."""
        self.conservation: ConservationRecorder | None = None
        """Counts pushes in a run whose every push adds 1 to every parameter; None in others."""
        self.clock = 0
        """The clock of the next push."""
        self.sent = 0
        self.completed = 0
        """Pushes that were acknowledged as a whole."""
        self.resent = 0
        self.last: tuple[int, int] = (0, 0)
        """The number of the last push that was acknowledged as a whole, and the clock after it."""
        self.bytes_before = 0
        """Bytes sent in earlier generations."""
        self.traffic: Counter[str] = Counter()
        """Bytes pushed, by layer and protocol: "conv1 delta"."""
        self.trouble: Trouble | None = None
        """The first gradient that was not finite."""

    def begin_generation(self, generation: Generation) -> None:
        """Send what is not acknowledged again in `generation`, with its old numbers."""
        self.bytes_before = self.bytes
        worker_shards = self.rings.worker_shards
        self.rings.drop()
        self.rings = PushRings(generation, worker_shards)
        self.residual.lay_out(self.rings.worker_shards)
        self.snapshot = ResidualSnapshot(self.residual, self.rings)
        self.resent += len(self.unacknowledged)
        for buffer in self.unacknowledged:
            self._send(buffer)

    def take_back_from(self, clock: int) -> list[GradientBuffer]:
        """Take back the pushes from `clock` on; earlier ones have reached all servers. Return what was under way."""
        forgotten = self._stop_sending()
        for buffer in forgotten:
            if buffer.clock >= clock:
                self.sent -= 1
                continue
            self._count_completed(buffer)
            if self.conservation is not None:
                self.conservation.record_acknowledgement()
        for buffer in reversed(forgotten):
            if buffer.clock >= clock:
                self._take_back(buffer, buffer.encoded)
            self.residual.forget_encodings(buffer.encoded)
        self.clock = clock
        return forgotten

    def take_back_missing(self, taken: Mapping[int, int]) -> list[GradientBuffer]:
        """Take back what is under way, apart from the parts of it that shards have; return what was under way.

        `taken`: shard -> the highest number of this worker's messages that it has, where the codec has error feedback.
        """
        given_up = self._stop_sending()
        for buffer in reversed(given_up):
            number = buffer.sequence * MOST_PARTS
            missing = {shard: part for shard, part in buffer.encoded.items() if taken.get(shard, 0) < number}
            self._take_back(buffer, missing)
            self.residual.forget_encodings(buffer.encoded)
        return given_up

    def discard(self) -> list[GradientBuffer]:
        """Send nothing again of what is under way; return it, to be freed."""
        return self._stop_sending()

    def _stop_sending(self) -> list[GradientBuffer]:
        """Send nothing again of what is under way; return it."""
        self.rings.clear_sent()
        stopped = list(self.unacknowledged)
        self.unacknowledged.clear()
        return stopped

    def _take_back(self, buffer: GradientBuffer, encoded: Mapping[int, Encoded]) -> None:
        """Take a push back, and out of the residual of the shards in `encoded`, which do not have it."""
        self.residual.take_back(encoded)
        if self.conservation is not None:
            for shard in encoded:
                self.conservation.withdraw_message(buffer.sequence, self.rings.memory_layout.shards[shard])
            self.conservation.record_withdrawal()

    def push(self, buffer: GradientBuffer) -> None:
        """Send `buffer` to the servers; it stays in use until it is in `acknowledged`."""
        self.rings.world.injector.at("push")
        self.sent += 1
        buffer.sequence = self.sent
        buffer.clock = self.clock
        self.clock += 1
        self.unacknowledged.append(buffer)
        self._send(buffer)

    def _send(self, buffer: GradientBuffer) -> None:
        buffer.pending = 0
        for sender in self.rings.senders:
            messages = self._messages(buffer, sender)
            messages[-1] = replace(messages[-1], last=True)
            buffer.pending += len(messages)
            (sender.held if self.snapshot.holds(buffer.clock) else sender.waiting).extend(messages)

    def _messages(self, buffer: GradientBuffer, sender: RingSender[PushMessage]) -> list[PushMessage]:
        """Return what one server gets of a push: a message per shard, or per part of a layer's factors."""
        messages: list[PushMessage] = []
        pushed = self.rings.worker_shards.pushed[sender.server]
        for layer, group in groupby(pushed, key=lambda shard: shard.layer):
            factors = self.rings.generation.choices[layer].factors
            if factors is None:
                messages += [ShardMessage(self, buffer, shard, sender.copy) for shard in group]
            else:
                messages += self._factor_messages(buffer, layer, factors[sender.server])
        return messages

    def _factor_messages(self, buffer: GradientBuffer, layer: str, plan: FactorPlan) -> list[FactorMessage]:
        """Return messages with as many images as a slot has room for; one without images advances the clock too."""
        count = buffer.factors[layer].count
        room = plan.images(self.rings.memory_layout.body_words)
        cuts = [slice(first, min(first + room, count)) for first in range(0, max(count, 1), room)]
        return [
            FactorMessage(client=self, buffer=buffer, layer=layer, plan=plan, images=images, part=part, parts=len(cuts))
            for part, images in enumerate(cuts)
        ]

    def encoded(self, buffer: GradientBuffer, shard: Shard) -> Encoded:
        """Return the part of a push for `shard` as it was first encoded, in whatever generation that was.

        Encoded a second time it would be in the residual twice, and a server that has it drops it.
        """
        if shard.index not in buffer.encoded:
            values = buffer.values[self.rings.worker_shards.part(shard)]
            keep = takes_back(self.config, self.rings.memory_layout.strips)
            sent = self.residual.encode(shard.index, values, keep)
            buffer.encoded[shard.index] = sent
            if self.conservation is not None and sent.finite:
                codec = NUMBERS[self.config.push.codec]
                self.conservation.record_message(buffer.sequence, shard, codec, sent.words)
        return buffer.encoded[shard.index]

    def header(self, buffer: GradientBuffer, shard: Shard) -> np.ndarray:
        """Return a header with what all messages of a push have in common."""
        header = np.zeros((), message_formats.HEADER)
        header["generation"] = self.rings.world.generation
        header["pusher"] = self.rings.world.place.member
        header["sequence"] = buffer.sequence
        header["clock"] = buffer.clock
        header["shard"] = shard.index
        header["seen"] = self.seen[shard.index]
        header["images"] = buffer.images
        header["parts"] = 1
        return header

    def count_message(self, buffer: GradientBuffer, layer: str, kind: str, header: np.ndarray) -> None:
        """Count the bytes of a message; and keep the first gradient that is not finite, the last layer's of several."""
        self.traffic[f"{layer} {kind}"] += 4 * int(header["words"])
        if header["finite"] or (self.trouble is not None and self.trouble.step != buffer.sequence):
            return
        order = [tensor.layer for tensor in self.rings.memory_layout.tensors]
        if self.trouble is None or order.index(layer) > order.index(self.trouble.layer):
            self.trouble = Trouble(
                what=f"the gradient of {layer}",
                layer=layer,
                step=buffer.sequence,
                epoch=buffer.done[0].epoch,
                batches=sorted({done.number for done in buffer.done}),
                images=[],
            )

    def step(self) -> bool:
        """Send and acknowledge messages of pushes as far as possible now; return whether that was anything."""
        worked = self.rings.step()
        self.snapshot.step(self.clock)
        return worked

    def awaits(self) -> Iterator[Wait]:
        """Yield the oldest message to each server that is not acknowledged, and the oldest that has not arrived.

        A server acknowledges a message only when other ranks have done their part: with clocks all replicas, with
        copies the servers that have them. It waits for these ranks itself, so only the arrival is owed at once.
        """
        patient = not self.config.asynchronous or self.rings.memory_layout.peers.count > 0
        for sender in self.rings.senders:
            if sender.sent:
                oldest = sender.sent[0]
                what = f"the acknowledgement of push {oldest.buffer.sequence}, {oldest.where}"
                yield Wait(what, sender.server, sender.applied, patient=patient)
            if patient and sender.arrived < len(sender.sent):
                late = sender.sent[sender.arrived]
                what = f"the arrival of push {late.buffer.sequence}, {late.where}"
                yield Wait(what, sender.server, sender.applied + sender.arrived)

    def missing_parts(self, stepped: Mapping[int, int]) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the spans and values of pushes that are not in weights read when servers had `stepped` on the rings."""
        for sender in self.rings.senders:
            for message in sender.missing(stepped[sender.server]):
                for part in message.missing():
                    yield part, message.buffer.values[part]

    def count_unapplied(self) -> int:
        """Return how many pushes are not known to be in the weights that every server publishes."""
        late = {message.buffer.sequence for sender in self.rings.senders for message in sender.missing(sender.stepped)}
        return len(late)

    def acknowledge_message(self, buffer: GradientBuffer) -> None:
        """Acknowledge one message of a push; with the last one the push is complete."""
        buffer.pending -= 1
        if buffer.pending:
            return
        self.unacknowledged.remove(buffer)
        self.residual.forget_encodings(buffer.encoded)
        self.acknowledged.append(buffer)
        self._count_completed(buffer)

    def _count_completed(self, buffer: GradientBuffer) -> None:
        self.completed += 1
        self.last = (buffer.sequence, buffer.clock + 1)

    def conserve(self, conservation: ConservationRecorder) -> None:
        """Count pushes with `conservation`, in a run whose every push adds 1 to every parameter."""
        self.conservation = conservation
        if self.residual.values.size:
            conservation.perturb_residual(self.residual.shards, self.residual.parts)

    def record_residual(self) -> None:
        """Record what the codec carries in the end, in a run that checks conservation."""
        if self.conservation is not None and self.residual.values.size:
            self.conservation.write_residual(self.residual.shards, self.residual.parts)

    @property
    def carried(self) -> float | None:
        """Return the length of what the codec has left out, as a mean gradient of a batch or as a step."""
        return self.residual.norm(1 if self.config.optimizer.where == "worker" else 1 / self.config.train.batch)

    @property
    def idle(self) -> bool:
        """Return whether every push is acknowledged."""
        return not self.unacknowledged

    @property
    def bytes(self) -> int:
        """Return the bytes sent, of this generation and earlier ones."""
        return self.bytes_before + self.rings.bytes
