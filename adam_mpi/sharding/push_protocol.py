"""Delta or factors: what each layer pushes, chosen by arithmetic. Pure.

Bytes are those that leave a pusher, activations repeated for every server that holds rows of the layer; replication
sends the folded gradient whichever way it came, and does not tell the two apart. A server must multiply factors, which
costs it time that a delta does not; time on the wire and time of the multiplication are added up.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from adam_mpi.base.errors import UserError
from adam_mpi.config import Config
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.factors import FactorPlan, matrices, plans
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.message_format import HEADER_WORDS

WIRE = 1.25e9  # bytes per second of a 10 Gb/s link between hosts
MEMORY = 5e9  # bytes per second of a push inside one host
MULTIPLY = 60e9  # operations per second of one core's BLAS


@dataclass(frozen=True)
class Choice:
    layer: str
    delta_bytes: int
    factor_bytes: int | None
    """None where factors are impossible."""
    factors: dict[int, FactorPlan] | None
    """The plan per server where factors are chosen."""

    @property
    def protocol(self) -> str:
        return "delta" if self.factors is None else "factor"


def choose(
    memory_layout: MemoryLayout, config: Config, images: int, hosts: int, kept: Collection[str] | None = None
) -> dict[str, Choice]:
    """What each layer pushes, for pushes of so many images in a job on so many hosts.

    `kept`: the layers that push factors in a job that is under way; networks are compiled for them.
    """
    dense = matrices(memory_layout.tensors)
    codec, wanted = CODECS[config.push.codec], config.push.protocol
    half = config.push.factor_codec == "float16"
    if wanted == "factor" and config.optimizer.where == "worker":
        raise UserError('push.protocol = "factor": needs optimizer.where = "server"; workers that step push deltas')
    if wanted == "factor" and memory_layout.strips > 1:
        raise UserError('push.protocol = "factor": strips push deltas; set "auto", or layout.partitions = 1')
    choices = {}
    for layer in dict.fromkeys(shard.layer for shard in memory_layout.shards):
        shards = [shard for shard in memory_layout.shards if shard.layer == layer]
        delta = sum(4 * (HEADER_WORDS + codec.words(shard.size)) for shard in shards)
        multiplied = layer in dense and config.optimizer.where == "server" and memory_layout.strips == 1
        planned = plans(dense[layer], layer, memory_layout.held, half) if multiplied else None
        if planned is not None and not _sendable(planned, memory_layout, config, images):
            planned = None
        bytes_ = None if planned is None else sum(4 * (HEADER_WORDS + plan.words(images)) for plan in planned.values())
        operations = 2 * images * sum(shard.size for shard in shards)
        speed = WIRE if hosts > 1 else MEMORY
        better = bytes_ is not None and bytes_ / speed + operations / MULTIPLY < delta / speed
        use = wanted == "factor" or (wanted == "auto" and better and config.push.codec == "none")
        use = use if kept is None else layer in kept
        choices[layer] = Choice(layer, delta, bytes_, planned if use else None)
    return choices


def _sendable(planned: Mapping[int, FactorPlan], memory_layout: MemoryLayout, config: Config, images: int) -> bool:
    """A message takes an image at least; and a synchronous server waits for all parts of a push in one ring.

    AdaGrad squares the gradient of a push, so others must get it in one message.
    """
    room = min(plan.images(memory_layout.body_words) for plan in planned.values())
    if config.consistency.staleness == 0:
        return room >= 1 and -(-images // room) <= memory_layout.slots
    return room >= (images if config.optimizer.kind == "adagrad" else 1)


def captured_layers(choices: Mapping[str, Choice]) -> list[str]:
    """The layers whose activations and errors are wanted."""
    return [layer for layer, choice in choices.items() if choice.factors is not None]


def largest_push(config: Config) -> int:
    """Images in one push at the most, where layers push factors."""
    if not config.asynchronous:
        return config.train.batch
    return -(-config.push.images // config.train.batch) * config.train.batch
