"""The messages of a push: the values of a shard, or activations and errors of a dense layer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from adam_mpi.cluster.world import World
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.codecs import CODECS, NUMBERS
from adam_mpi.sharding.memory_layout import MemoryLayout, WorkerShards
from adam_mpi.sharding.push_protocol import FactorPlan
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import batch_id
from adam_mpi.transport import mailbox
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.ring_sender import RingSender
from adam_mpi.worker.gradient_buffer import GradientBuffer

if TYPE_CHECKING:
    from adam_mpi.worker.push_client import PushClient


@dataclass(frozen=True)
class ShardMessage:
    """The part of a gradient buffer that belongs to one shard."""

    client: "PushClient"
    buffer: GradientBuffer
    shard: Shard
    copy: Callable[[np.ndarray, np.ndarray], bool]
    """Copies words into the memory of the server; returns whether all are finite."""
    last: bool = False
    """Whether it is the last message of the push to its server."""

    @property
    def where(self) -> str:
        """Return a name of the shard, for messages."""
        return f"shard {self.shard.index}"

    @property
    def part(self) -> slice:
        """Return the place of the shard in the worker's vector."""
        return self.client.rings.worker_shards.part(self.shard)

    def write(self, body: np.ndarray) -> np.ndarray:
        """Write the values into `body`; return the header without the position in the ring."""
        client = self.client
        header = client.header(self.buffer, self.shard)
        frozen = self.shard.index in client.rings.memory_layout.frozen
        values = self.buffer.values[self.part][: 0 if frozen else None]
        if frozen:
            header["finite"] = 1
        elif client.codec.feedback:
            sent = client.encoded(self.buffer, self.shard)
            header["words"] = sent.words.size
            header["finite"] = sent.finite
            body[: sent.words.size] = sent.words
        elif client.codec is CODECS["none"]:
            header["words"] = values.size
            header["finite"] = self.copy(body, values.view(np.uint32))
        elif mailbox.finite(values.view(np.uint32)):
            header["words"] = client.codec.encode(values, values[:0], body)
            header["finite"] = 1
        else:
            header["words"] = client.codec.words(values.size)
            body[: header["words"]] = 0
        header["codec"] = NUMBERS["none" if frozen else client.config.push.codec]
        header["kind"] = message_formats.DELTA
        header["values"] = values.size
        header["last"] = self.last
        client.count_message(self.buffer, self.shard.layer, "delta", header)
        return header

    def batches(self) -> np.ndarray:
        """Return the ids of the batches of the push."""
        return _batches(self.buffer)

    def acknowledge(self) -> None:
        """Note that the server has handled the message of a push."""
        self.client.acknowledge_message(self.buffer)

    def missing(self) -> list[slice]:
        """Return the spans of the worker's vector that are not applied before this message is."""
        return [self.part]


@dataclass(frozen=True)
class FactorMessage:
    """Activations and errors of some images of a gradient buffer, for the rows of a layer that one server holds."""

    client: "PushClient"
    buffer: GradientBuffer
    layer: str
    plan: FactorPlan
    images: slice
    part: int
    """The number of this message among the `parts` that the images are spread over."""
    parts: int
    last: bool = False
    """Whether it is the last message of the push to its server."""

    @property
    def where(self) -> str:
        """Return a name of the layer, for messages."""
        return f"layer {self.layer}"

    def write(self, body: np.ndarray) -> np.ndarray:
        """Write the factors into `body`; return the header without the position in the ring."""
        header = self.client.header(self.buffer, self.plan.shards[0])
        factors = self.buffer.factors[self.layer]
        activations = factors.activations[self.images]
        errors = factors.errors[self.images]
        gradient = self.buffer.values
        matrix = self.plan.matrix
        # The gradient of the biases is of all images: the first part has it.
        header["words"] = self.plan.write(body, activations, errors, gradient if self.part == 0 else None)
        sent = (activations, errors, gradient[matrix.biases : matrix.biases + matrix.outputs])
        header["finite"] = all(mailbox.finite(values.reshape(-1).view(np.uint32)) for values in sent)
        header["codec"] = NUMBERS[self.client.config.push.factor_codec]
        header["kind"] = message_formats.FACTOR
        header["values"] = len(activations)
        header["last"] = self.last
        header["part"] = self.part
        header["parts"] = self.parts
        self.client.count_message(self.buffer, self.layer, "factor", header)
        return header

    def batches(self) -> np.ndarray:
        """Return the ids of the batches of the push."""
        return _batches(self.buffer)

    def acknowledge(self) -> None:
        """Note that the server has handled the message of a push."""
        self.client.acknowledge_message(self.buffer)

    def missing(self) -> list[slice]:
        """Return the spans of the whole layer for the last part: until that is in, the layer counts as missing."""
        if self.part < self.parts - 1:
            return []
        return [slice(shard.start, shard.stop) for shard in self.plan.shards]


PushMessage = ShardMessage | FactorMessage


def _batches(buffer: GradientBuffer) -> np.ndarray:
    """Return the ids of the batches of a push; the parts that threads have computed of a joint one are one batch."""
    return np.unique(np.array([batch_id(done.epoch, done.number) for done in buffer.done], np.int64))


class PushRings:
    """Hold a sender for each server that this worker pushes to in `generation`."""

    def __init__(self, generation: Generation, worker_shards: WorkerShards) -> None:
        """Lay `worker_shards`, which may be those of an earlier generation, out for `generation`."""
        self.generation = generation
        self.worker_shards = replace(worker_shards, memory_layout=generation.memory_layout)
        self.ring = self.memory_layout.pushers.index(self.world.rank)
        """The number of this worker's ring in each mailbox."""
        self.senders: list[RingSender[PushMessage]] = [
            RingSender(
                self.memory_layout.rings, server, self.ring, generation.mailbox_window, generation.weights_window
            )
            for server in self.memory_layout.servers
            if self.worker_shards.pushed[server]
        ]

    @property
    def world(self) -> World:
        """Return the ranks of the generation."""
        return self.generation.world

    @property
    def memory_layout(self) -> MemoryLayout:
        """Return the memory layout of the generation."""
        return self.generation.memory_layout

    @property
    def pushers(self) -> int:
        """Return the number of workers that push."""
        return len(self.memory_layout.pushers)

    @property
    def bytes(self) -> int:
        """Return the bytes sent in this generation."""
        return sum(sender.bytes for sender in self.senders)

    @property
    def far(self) -> list[RingSender[PushMessage]]:
        """Return the senders to servers on other nodes."""
        return [sender for sender in self.senders if not sender.near]

    def step(self) -> bool:
        """Make a step of the sender of each server; return whether anything was done."""
        self.generation.mailbox_window.sync()
        self.generation.weights_window.sync()
        return any([sender.step() for sender in self.senders])

    def clear_sent(self) -> None:
        """Acknowledge nothing more of what is under way."""
        for sender in self.senders:
            sender.sent.clear()

    def drop(self) -> None:
        """Release all messages, and with them the memory of the generation."""
        for sender in self.senders:
            sender.drop()
