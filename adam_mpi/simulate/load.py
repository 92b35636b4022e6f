"""The bytes, messages and seconds of one push, pull and batch of a job, from the plan of the real job. Pure."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from adam_mpi.cluster.layout import Layout
from adam_mpi.config import Config
from adam_mpi.data.sets import Description
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.partition import partition
from adam_mpi.planning.plan import plan_memory_layout
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.fields import message_bytes
from adam_mpi.sharding.memory_layout import MOST_BATCHES, WIDTHS, MemoryLayout
from adam_mpi.sharding.message_formats import HEADER_WORDS
from adam_mpi.sharding.push_protocol import MULTIPLY, Choice, captured_layers, choose_protocols, largest_push
from adam_mpi.simulate.hosts import Costs
from adam_mpi.worker.gradient_buffer import MOST_PUSHES


@dataclass
class Part:
    """The part of a push that one server gets."""

    bytes: int = 0
    messages: int = 0
    seconds: float = 0.0
    """Seconds in which the server applies it."""


@dataclass(frozen=True)
class Load:
    """What a replica sends and receives in one step."""

    push: dict[int, Part]
    """The part of a push that each server gets."""
    pull: dict[int, int]
    """Bytes of weights that a pull reads from each server."""
    held: dict[int, int]
    """Bytes of weights that each server holds."""
    copies: dict[int, dict[int, int]]
    """Bytes of the weights of each server that each other server has a copy of."""
    images: int
    """Images of a batch that a replica computes: all of them, or with clocks its share."""
    batch: int
    """Bytes of these images."""
    gradient: int
    """Bytes of a gradient of all layers."""
    most: int
    """Images that a push grows to while all others are under way; a push of factors does not grow."""


def chosen(config: Config, layout: Layout, shapes: tuple[LayerShape, ...]) -> tuple[MemoryLayout, Mapping[str, Choice]]:
    """Return where shards lie in the simulated job, and what each layer pushes."""
    memory_layout = plan_memory_layout(config, partition(shapes, layout.partitions, config.layout.scheme), layout)
    return memory_layout, choose_protocols(
        memory_layout, config, largest_push(config), len({place.host for place in layout.places})
    )


def replica_load(
    config: Config, layout: Layout, shapes: tuple[LayerShape, ...], data: Description, costs: Costs
) -> Load:
    """Return the load of a replica of the simulated job: what it sends and receives in one step."""
    memory_layout, choices = chosen(config, layout, shapes)
    share = config.train.batch if config.asynchronous else -(-config.train.batch // layout.replicas)
    # Layers are chosen for a whole batch, as if a replica were alone; what it pushes is its share.
    images = largest_push(config) if config.asynchronous else share
    push = defaultdict[int, Part](Part)
    codec = CODECS[config.push.codec]
    for choice in choices.values():
        for server, plan in (choice.factors or {}).items():
            messages = -(-images // plan.images(memory_layout.body_words))
            multiplied = 2 * images * sum(shard.size for shard in plan.shards) / MULTIPLY
            _add_traffic(push[server], 4 * (messages * HEADER_WORDS + plan.words(images)), messages, multiplied)
    for server, shards in memory_layout.served.items():
        for shard in shards:
            if choices[shard.layer].factors is None:
                size = 4 * (HEADER_WORDS + codec.words(shard.size))
                _add_traffic(push[server], size, 1, size * costs.apply)
    width = WIDTHS["short"] if "short" in memory_layout.regions else WIDTHS["weights"]
    # With few large shards some servers hold copies only, and no pull reads from them.
    pull = {server: width * memory_layout.size(server) for server in push}
    most = images if captured_layers(choices) else min(MOST_BATCHES * config.train.batch, MOST_PUSHES * images)
    held = {server: 4 * memory_layout.size(server) for server in memory_layout.servers}
    return Load(
        push=dict(push),
        pull=pull,
        held=held,
        copies=_copies(memory_layout),
        images=share,
        batch=message_bytes(share, data.fields),
        gradient=sum(held.values()),
        most=most,
    )


def _copies(memory_layout: MemoryLayout) -> dict[int, dict[int, int]]:
    """Return the simulated bytes of each server's shards that others hold copies of, by server and other server."""
    copies: dict[int, dict[int, int]] = {server: defaultdict(int) for server in memory_layout.servers}
    for shard in memory_layout.shards:
        server, *others = memory_layout.holders[shard.index]
        for other in others:
            copies[server][other] += 4 * shard.size
    return copies


def _add_traffic(part: Part, size: int, messages: int, seconds: float) -> None:
    """Add bytes, messages and seconds to `part` of the simulated load."""
    part.bytes += size
    part.messages += messages
    part.seconds += seconds
