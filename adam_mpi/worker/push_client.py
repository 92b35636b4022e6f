"""The push client: cuts gradient_buffers into letters, one per shard, and sends each to the server of its shard."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from adam_mpi.checkpoint.disk_task import disk_seconds
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.sharding import message_format
from adam_mpi.sharding.codecs import CODECS, NUMBERS
from adam_mpi.sharding.factors import FactorPlan
from adam_mpi.sharding.message_format import MOST_PARTS
from adam_mpi.sharding.position import batch_id
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.spans import Spans
from adam_mpi.sharding.worker_shards import WorkerShards
from adam_mpi.transport import mailbox
from adam_mpi.transport.conservation import Conservation
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.ring_sender import RingSender
from adam_mpi.worker.diagnostics import Trouble
from adam_mpi.worker.gradient_buffer import Encoded, GradientBuffer, takes_back
from adam_mpi.worker.residual import Residual


@dataclass(frozen=True)
class ShardMessage:
    """The part of a contribution that one shard takes."""

    client: "PushClient"
    contribution: GradientBuffer
    shard: Shard
    copy: Callable[[np.ndarray, np.ndarray], bool]
    """Into the memory of its server."""
    last: bool

    @property
    def where(self) -> str:
        return f"shard {self.shard.index}"

    @property
    def part(self) -> slice:
        return self.client.holding.part(self.shard)

    def write(self, body: np.ndarray) -> np.ndarray:
        client, contribution = self.client, self.contribution
        header = client.header(contribution, self.shard)
        values = contribution.values[self.part]
        if client.codec.feedback:
            sent = client.encoded(contribution, self.shard)
            header["words"], header["finite"] = sent.words.size, sent.finite
            body[: sent.words.size] = sent.words
        elif client.codec is CODECS["none"]:
            header["words"], header["finite"] = values.size, self.copy(body, values.view(np.uint32))
        elif mailbox.finite(values.view(np.uint32)):
            header["words"], header["finite"] = client.codec.encode(values, values[:0], body), 1
        else:
            header["words"] = client.codec.words(values.size)
            body[: header["words"]] = 0
        header["codec"] = NUMBERS[client.world.config.push.codec]
        header["kind"], header["values"], header["last"] = message_format.DELTA, self.shard.size, self.last
        client.note(contribution, self.shard.layer, "delta", header)
        return header

    def batches(self) -> np.ndarray:
        return _batches(self.contribution)

    def settled(self) -> None:
        self.client.settle(self.contribution)

    def missing(self) -> list[slice]:
        return [self.part]


@dataclass(frozen=True)
class FactorMessage:
    """Activations and errors of some images of a contribution, for the rows of a layer that one server holds."""

    client: "PushClient"
    contribution: GradientBuffer
    layer: str
    plan: FactorPlan
    images: slice
    part: int
    parts: int
    last: bool

    @property
    def where(self) -> str:
        return f"layer {self.layer}"

    def write(self, body: np.ndarray) -> np.ndarray:
        contribution, header = self.contribution, self.client.header(self.contribution, self.plan.shards[0])
        factors = contribution.factors[self.layer]
        activations, errors = factors.activations[self.images], factors.errors[self.images]
        # The gradient of the biases is of all images: it goes with the first part.
        gradient, matrix = contribution.values, self.plan.matrix
        header["words"] = self.plan.write(body, activations, errors, gradient if self.part == 0 else None)
        sent = activations, errors, gradient[matrix.biases : matrix.biases + matrix.outputs]
        header["finite"] = all(mailbox.finite(values.reshape(-1).view(np.uint32)) for values in sent)
        header["codec"] = NUMBERS[self.client.world.config.push.factor_codec]
        header["kind"], header["values"], header["last"] = message_format.FACTOR, len(activations), self.last
        header["part"], header["parts"] = self.part, self.parts
        self.client.note(contribution, self.layer, "factor", header)
        return header

    def batches(self) -> np.ndarray:
        return _batches(self.contribution)

    def settled(self) -> None:
        self.client.settle(self.contribution)

    def missing(self) -> list[slice]:
        """The whole layer counts as missing until the last part of its factors is in."""
        return [slice(s.start, s.stop) for s in self.plan.shards] if self.part == self.parts - 1 else []


class PushClient:
    def __init__(
        self, generation: Generation, holding: WorkerShards | None = None, carried: Spans | None = None
    ) -> None:
        """`carried`: what an earlier job's codec had left out of what we push."""
        world, memory_layout = generation.world, generation.memory_layout
        self.holding = holding or WorkerShards(memory_layout)
        self.lanes: list[RingSender[ShardMessage | FactorMessage]] = []
        self.seen = np.zeros(len(memory_layout.shards), np.int64)
        """Versions of the shards that the last pull brought."""
        self.unacknowledged: deque[GradientBuffer] = deque()
        self.acknowledged: deque[GradientBuffer] = deque()
        self.codec = CODECS[world.config.push.codec]
        self.residual = Residual(self.holding, self.codec, carried)
        self.conservation: Conservation | None = None
        self.sent = self.settled = self.clock = self.resent = 0
        self.last = 0, 0
        """The number of the last push that was acknowledged as a whole, and the clock after it."""
        self.bytes_before = 0
        self.traffic: Counter[str] = Counter()
        """Bytes pushed, by layer and protocol: "conv1 delta"."""
        self.trouble: Trouble | None = None
        """The first gradient that was not finite."""
        self.enter(generation)

    def enter(self, generation: Generation) -> None:
        """Begin a generation: what is not acknowledged is cut anew and sent again, with its old numbers."""
        self.bytes_before = self.bytes
        world = generation.world
        memory_layout = generation.memory_layout
        self.generation = generation
        self.choices = generation.choices
        self.world = world
        self.memory_layout = memory_layout
        self.holding = replace(self.holding, memory_layout=memory_layout)
        self.ring, self.pusher = memory_layout.pushers.index(world.rank), world.place.member
        for lane in self.lanes:
            lane.drop()
        self.lanes = [
            RingSender(memory_layout.rings, server, self.ring, generation.mailbox_window, generation.weights_window)
            for server in memory_layout.servers
            if self.holding.pushed[server]
        ]
        self.residual.enter(self.holding, self.ring, self.lanes, disk_seconds(world.config))
        self.resent += len(self.unacknowledged)
        for contribution in self.unacknowledged:
            self._send(contribution)

    def forget(self, clock: int) -> list[GradientBuffer]:
        """Take back what is under way, but for what has reached all servers: that of earlier clocks."""
        forgotten = self._stop()
        for contribution in forgotten:
            if contribution.clock >= clock:
                self.sent -= 1
                continue
            self.settled += 1
            self.last = contribution.sequence, contribution.clock + 1
            if self.conservation is not None:
                self.conservation.acknowledged()
        for contribution in reversed(forgotten):
            if contribution.clock >= clock:
                self._take_back(contribution, contribution.encoded)
            self.residual.release(contribution.encoded)
        self.clock = clock
        return forgotten

    def give_up(self, taken: Mapping[int, int]) -> list[GradientBuffer]:
        """Take back what is under way, but for the parts of it that shards have.

        `taken`: shard -> the highest number of our messages that it has, where the codec has error feedback.
        """
        given_up = self._stop()
        for contribution in reversed(given_up):
            number = contribution.sequence * MOST_PARTS
            missing = {shard: part for shard, part in contribution.encoded.items() if taken.get(shard, 0) < number}
            self._take_back(contribution, missing)
            self.residual.release(contribution.encoded)
        return given_up

    def _stop(self) -> list[GradientBuffer]:
        """Send nothing again of what is under way; returns it."""
        for lane in self.lanes:
            lane.sent.clear()
        stopped, self.unacknowledged = list(self.unacknowledged), deque()
        return stopped

    def _take_back(self, contribution: GradientBuffer, encoded: Mapping[int, Encoded]) -> None:
        """A push is taken back, with what its encoding did to the residual of these shards, which do not have it."""
        self.residual.take_back(encoded)
        if self.conservation is not None:
            for shard in encoded:
                self.conservation.decoded(contribution.sequence, self.memory_layout.shards[shard])
            self.conservation.given_up()

    def push(self, contribution: GradientBuffer) -> None:
        self.world.injector.at("push")
        contribution.clock = self.clock
        self.sent, self.clock = self.sent + 1, self.clock + 1
        contribution.sequence = self.sent
        self.unacknowledged.append(contribution)
        self._send(contribution)

    def _send(self, contribution: GradientBuffer) -> None:
        contribution.pending = 0
        for lane in self.lanes:
            letters = self._letters(contribution, lane)
            letters[-1] = replace(letters[-1], last=True)
            contribution.pending += len(letters)
            (lane.held if self.residual.holds(contribution.clock) else lane.waiting).extend(letters)

    def _letters(self, contribution: GradientBuffer, lane: RingSender) -> list[ShardMessage | FactorMessage]:
        """What one server gets of a push: a letter per shard, or per part of a layer's factors."""
        letters: list[ShardMessage | FactorMessage] = []
        for layer, group in groupby(self.holding.pushed[lane.server], key=lambda shard: shard.layer):
            factors = self.choices[layer].factors
            if factors is None:
                letters += [ShardMessage(self, contribution, shard, lane.copy, False) for shard in group]
            else:
                letters += self._factor_letters(contribution, layer, factors[lane.server])
        return letters

    def _factor_letters(self, contribution: GradientBuffer, layer: str, plan: FactorPlan) -> list[FactorMessage]:
        """As many images in a letter as a slot has room for; one without images keeps the clock going."""
        count, room = contribution.factors[layer].count, plan.images(self.memory_layout.body_words)
        cuts = [slice(first, min(first + room, count)) for first in range(0, max(count, 1), room)]
        return [
            FactorMessage(self, contribution, layer, plan, images, part, len(cuts), False)
            for part, images in enumerate(cuts)
        ]

    def encoded(self, contribution: GradientBuffer, shard: Shard) -> Encoded:
        """Return the part of a push for one shard as it was first encoded, in whatever generation that was.

        Encoded a second time it would be in the residual twice, and a server that has it drops it.
        """
        if shard.index not in contribution.encoded:
            values = contribution.values[self.holding.part(shard)]
            sent = self.residual.encode(shard.index, values, takes_back(self.world.config, self.memory_layout.strips))
            contribution.encoded[shard.index] = sent
            if self.conservation is not None and sent.finite:
                codec = NUMBERS[self.world.config.push.codec]
                self.conservation.encoded(contribution.sequence, shard, codec, sent.words)
        return contribution.encoded[shard.index]

    def header(self, contribution: GradientBuffer, shard: Shard) -> np.ndarray:
        """What all messages of a push have in common."""
        header = np.zeros((), message_format.HEADER)
        header["generation"], header["pusher"] = self.world.generation, self.pusher
        header["sequence"], header["clock"] = contribution.sequence, contribution.clock
        header["shard"], header["seen"], header["images"] = shard.index, self.seen[shard.index], contribution.images
        header["parts"] = 1
        return header

    def note(self, contribution: GradientBuffer, layer: str, kind: str, header: np.ndarray) -> None:
        """Count what goes out; and keep the first gradient that is not finite, the last layer's where several are."""
        self.traffic[f"{layer} {kind}"] += 4 * int(header["words"])
        if header["finite"] or (self.trouble is not None and self.trouble.step != contribution.sequence):
            return
        order = [tensor.layer for tensor in self.memory_layout.tensors]
        if self.trouble is None or order.index(layer) > order.index(self.trouble.layer):
            epoch, batches = contribution.done[0].epoch, sorted({done.number for done in contribution.done})
            self.trouble = Trouble(f"the gradient of {layer}", layer, contribution.sequence, epoch, batches, [])

    def step(self) -> bool:
        self.generation.mailbox_window.sync()
        self.generation.weights_window.sync()
        worked = [lane.step() for lane in self.lanes]
        self.residual.step(self.clock)
        return any(worked)

    def awaits(self) -> Iterator[Wait]:
        """The oldest message to each server that is not acknowledged; with clocks also the oldest not arrived."""
        clocks = not self.world.config.asynchronous
        for lane in self.lanes:
            if lane.sent:
                what = f"the acknowledgement of push {lane.sent[0].contribution.sequence}, {lane.sent[0].where}"
                # With clocks a server waits for all replicas, but with what has arrived only.
                yield Wait(what, lane.server, lane.applied, patient=clocks)
            if clocks and lane.arrived < len(lane.sent):
                late = lane.sent[lane.arrived]
                what = f"the arrival of push {late.contribution.sequence}, {late.where}"
                yield Wait(what, lane.server, lane.applied + lane.arrived)

    def settle(self, contribution: GradientBuffer) -> None:
        """A message of a push has been dealt with; with the last one the push is acknowledged."""
        contribution.pending -= 1
        if contribution.pending:
            return
        self.unacknowledged.remove(contribution)
        self.residual.release(contribution.encoded)
        self.acknowledged.append(contribution)
        self.settled += 1
        self.last = contribution.sequence, contribution.clock + 1

    @property
    def idle(self) -> bool:
        return not self.unacknowledged

    @property
    def bytes(self) -> int:
        return self.bytes_before + sum(lane.bytes for lane in self.lanes)


def _batches(contribution: GradientBuffer) -> np.ndarray:
    """Ids of the batches of a push; the parts that threads have computed of a joint one are one batch."""
    return np.unique(np.array([batch_id(done.epoch, done.number) for done in contribution.done], np.int64))
