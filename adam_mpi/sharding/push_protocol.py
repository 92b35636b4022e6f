"""The push protocol of each layer, deltas or factors, chosen by estimated time. Pure.

Bytes are those that a pusher sends, activations repeated for every server that holds rows of the layer; replication
sends the folded gradient in both protocols, and makes no difference. A server has to multiply factors, which takes time
that a delta does not; time on the wire and time of the multiplication are added.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from adam_mpi.base.errors import UserError
from adam_mpi.config import Config
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.factors import FactorPlan, Matrix, matrices, plans
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.message_format import HEADER_WORDS

WIRE = 1.25e9  # bytes per second of a 10 Gb/s link between hosts
MEMORY = 5e9  # bytes per second of a push inside one host
MULTIPLY = 60e9  # operations per second of one core's BLAS


@dataclass(frozen=True)
class Choice:
    """What one layer pushes, and the bytes of a push by either protocol."""

    layer: str
    delta_bytes: int
    factor_bytes: int | None
    """None where factors are not possible."""
    factors: dict[int, FactorPlan] | None
    """Server -> its plan, where factors are chosen."""

    @property
    def protocol(self) -> str:
        """Return the name of the protocol."""
        return "delta" if self.factors is None else "factor"


def choose(
    memory_layout: MemoryLayout, config: Config, images: int, hosts: int, kept: Collection[str] | None = None
) -> dict[str, Choice]:
    """Return layer -> what it pushes, for pushes of `images` images in a job on `hosts` hosts.

    `kept`: the layers that push factors in a job that is running; networks are compiled for them. Raises UserError if
    the configuration asks for factors that are not possible.
    """
    _check_wanted(memory_layout, config)
    dense = matrices(memory_layout.tensors)
    multipliable = config.optimizer.where == "server" and memory_layout.strips == 1
    choices = {}
    for layer in dict.fromkeys(shard.layer for shard in memory_layout.shards):
        matrix = dense.get(layer) if multipliable else None
        choice = _estimate(memory_layout, config, layer, matrix, images)
        faster = choice.factor_bytes is not None and _factors_are_faster(memory_layout, choice, images, hosts)
        auto = config.push.protocol == "auto" and faster and config.push.codec == "none"
        use = (config.push.protocol == "factor" or auto) if kept is None else layer in kept
        choices[layer] = choice if use else replace(choice, factors=None)
    return choices


def _check_wanted(memory_layout: MemoryLayout, config: Config) -> None:
    """Raise UserError if the configuration asks for factors that are not possible."""
    if config.push.protocol != "factor":
        return
    if config.optimizer.where == "worker":
        raise UserError('push.protocol = "factor": needs optimizer.where = "server"; workers that step push deltas')
    if memory_layout.strips > 1:
        raise UserError('push.protocol = "factor": strips push deltas; set "auto", or layout.partitions = 1')


def _estimate(memory_layout: MemoryLayout, config: Config, layer: str, matrix: Matrix | None, images: int) -> Choice:
    """Return a choice of factors for `layer`, with the bytes of a push; of deltas where factors are not possible."""
    codec = CODECS[config.push.codec]
    sizes = [shard.size for shard in memory_layout.shards if shard.layer == layer]
    delta = sum(4 * (HEADER_WORDS + codec.words(size)) for size in sizes)
    half = config.push.factor_codec == "float16"
    planned = plans(matrix, layer, memory_layout.held, half) if matrix is not None else None
    if planned is None or not _sendable(planned, memory_layout, config, images):
        return Choice(layer, delta, None, None)
    factor = sum(4 * (HEADER_WORDS + plan.words(images)) for plan in planned.values())
    return Choice(layer, delta, factor, planned)


def _factors_are_faster(memory_layout: MemoryLayout, choice: Choice, images: int, hosts: int) -> bool:
    """Return whether a push of factors takes less time than a delta, including their multiplication."""
    assert choice.factor_bytes is not None, "asked where factors are possible"
    speed = WIRE if hosts > 1 else MEMORY
    operations = 2 * images * sum(shard.size for shard in memory_layout.shards if shard.layer == choice.layer)
    return choice.factor_bytes / speed + operations / MULTIPLY < choice.delta_bytes / speed


def _sendable(planned: Mapping[int, FactorPlan], memory_layout: MemoryLayout, config: Config, images: int) -> bool:
    """Return whether factors of `images` images can be sent.

    A message has to have room for one image, and a ring for all parts of a push in synchronous training, because the
    server waits for all of them. AdaGrad squares the gradient of a push, so the push has to fit into one message.
    """
    room = min(plan.images(memory_layout.body_words) for plan in planned.values())
    if config.consistency.staleness == 0:
        return room >= 1 and -(-images // room) <= memory_layout.slots
    return room >= (images if config.optimizer.kind == "adagrad" else 1)


def captured_layers(choices: Mapping[str, Choice]) -> list[str]:
    """Return the layers that push factors, whose activations and errors have to be captured."""
    return [layer for layer, choice in choices.items() if choice.factors is not None]


def largest_push(config: Config) -> int:
    """Return how many images one push has at most, where layers push factors."""
    if not config.asynchronous:
        return config.train.batch
    return -(-config.push.images // config.train.batch) * config.train.batch
