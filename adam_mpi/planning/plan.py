"""The parts of a job's plan: strips, network, memory layout, and whether its memory is enough. Pure."""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from adam_mpi.base import machine
from adam_mpi.base.errors import UserError
from adam_mpi.base.log import format_bytes
from adam_mpi.cluster.layout import Layout, arrange
from adam_mpi.config import Config
from adam_mpi.data.sets import Description, describe
from adam_mpi.model import parameters
from adam_mpi.model.frontends import configured
from adam_mpi.model.graph import Value
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.metrics import MetricSet
from adam_mpi.model.metrics import choose as choose_metrics
from adam_mpi.model.network import Network
from adam_mpi.model.partition import Partition, Strip, fitting, largest_strip_count, partition
from adam_mpi.planning import memory, recipe
from adam_mpi.sharding import batches as parts
from adam_mpi.sharding import memory_layout as memory_layouts
from adam_mpi.sharding.fields import CLASSES, INPUT, WEIGHT
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.push_protocol import Choice, captured_layers, choose_protocols, largest_push
from adam_mpi.worker import thread_weights


def partitions(config: Config, shapes: tuple[LayerShape, ...], ranks: int) -> int:
    """Return the planned strips of a replica: as configured, or as few as let working sets fit the last-level cache."""
    if config.layout.partitions:
        return config.layout.partitions
    cache = max(machine.caches().values(), default=0)
    if not cache:
        raise UserError('layout.partitions = "auto": this machine does not report its cache sizes; give a number')
    return len(fitting(shapes, config.train.batch, cache, ranks, config.layout.scheme))


def model(config: Config, description: Description) -> tuple[LayerShape, ...]:
    """Return the planned layers of the configured network on the data set of `description`."""
    graph = not configured.is_stack(config.model)
    _check_fields(description, graph)
    return configured.infer(
        config.model, description.shape, description.classes, description.form, target=_target(description)
    )


def _target(description: Description) -> Value:
    """Return what a graph is fed as the first target of a data set."""
    field = description.target
    return Value(field.name, field.shape, "integer" if field.dtype.startswith("int") else "float")


def _check_fields(description: Description, graph: bool) -> None:
    """Raise UserError for fields that a `graph`, or a list of layers with a softmax, cannot take."""
    inputs = [field for field in description.fields if field.role == INPUT]
    if len(inputs) > 1 or (inputs[0].dtype.startswith("int") and not graph):
        shown = ", ".join(f"{field.name} ({field.dtype})" for field in inputs)
        raise UserError(f"data.inputs: model.layers takes one input of bytes or floats, not {shown}")
    if WEIGHT in [field.name for field in description.fields]:
        raise UserError(
            "data.transform: mixup and cutmix give each image two classes, the softmax after model.layers takes one; "
            "set both to 0"
        )
    if graph:
        return
    if description.target.kind != CLASSES or len(description.fields) > 2:
        shown = ", ".join(f"{field.name} ({field.kind})" for field in description.fields if field.role != INPUT)
        raise UserError(f"data.targets: the softmax after model.layers takes one target of classes, not {shown}")


def metrics(config: Config, description: Description) -> MetricSet:
    """Return the planned metrics of the job; raise UserError for those that its targets do not have."""
    train = config.train
    return choose_metrics(
        train.metrics, train.monitor, train.monitor_mode, kind=description.target.kind, outputs=description.classes
    )


def network(
    config: Config,
    description: Description,
    shapes: tuple[LayerShape, ...],
    captured: Sequence[str] = (),
    choices: dict | None = None,
    strip: Strip | None = None,
) -> Network:
    """Return the planned network as configured, for the inputs of `description`."""
    images = config.train.batch
    if strip is not None:
        images = parts.largest_part(images, *parts.most_parts(config.worker.in_flight, strip.ranks))
    return Network(
        shapes,
        images,
        config.run.seed,
        engine=config.kernels.engine,
        captured=captured,
        choices=choices,
        batches=thread_weights.batches(config),
        strip=strip,
        form=description.form,
    )


def largest_network(config: Config, description: Description, cut: Partition, captured: Sequence[str]) -> Network:
    """Return the planned network of the strip that needs the most memory."""
    strip = max(cut.strips, key=lambda strip: strip.bytes(config.train.batch))
    return network(config, description, strip.shapes, captured, strip=strip if len(cut) > 1 else None)


def check_memory(
    config: Config, description: Description, shapes: tuple[LayerShape, ...], layout: Layout, survivable: bool = True
) -> None:
    """Raise a UserError for a planned job that needs more than `layout.memory`, with the strips or servers that fit.

    `survivable`: whether training continues when a rank is lost; servers need memory for that.
    """
    limit = config.layout.memory
    if not limit:
        return
    scheme = config.layout.scheme
    memory_layout = plan_memory_layout(config, partition(shapes, layout.partitions, scheme), layout)
    captured = captured_layers(
        choose_protocols(memory_layout, config, largest_push(config), len({p.host for p in layout.places}))
    )

    def worker_bytes(strips: int) -> int:
        # Strips push gradients, never factors.
        factors = captured if strips == 1 else ()
        net = largest_network(config, description, partition(shapes, strips, scheme), factors)
        return memory.worker(config, description, net, memory_layout, factors)

    if worker_bytes(layout.partitions) > limit:
        raise UserError(_too_few_strips(limit, worker_bytes, layout.partitions, shapes, scheme))
    if (needed := memory.server(config, memory_layout, survivable)) > limit:
        raise UserError(_too_few_servers(limit, needed, memory_layout))


def _too_few_strips(
    limit: int, worker_bytes: Callable[[int], int], strips: int, shapes: tuple[LayerShape, ...], scheme: str
) -> str:
    """Return the error of a planned worker that needs more than `limit` with this number of `strips`."""
    candidates = range(strips, largest_strip_count(shapes, scheme) + 1)
    least = bisect_left(candidates, True, key=lambda strips: worker_bytes(strips) <= limit)
    advice = "no number of strips helps: allow more, or lower worker.in_flight or train.batch"
    if least < len(candidates):
        advice = f"set layout.partitions = {candidates[least]} or more"
    layer = max(shapes, key=lambda shape: shape.parameters)
    needed = worker_bytes(strips)
    return (
        f"layout.memory = {format_bytes(limit)}: a worker takes {format_bytes(needed)} with layout.partitions = "
        f"{strips}, "
        f"and {layer.name} alone has {format_bytes(4 * layer.parameters)} of weights; {advice}"
    )


def _too_few_servers(limit: int, needed: int, memory_layout: MemoryLayout) -> str:
    """Return the error of a planned server that needs `needed` bytes, more than `limit`."""
    count = len(memory_layout.servers)
    # Mailboxes do not become smaller with more servers.
    fixed = memory_layout.mailbox_bytes + memory_layout.replication_bytes
    advice = f"lower server.mailbox_bytes: mailboxes take {format_bytes(fixed)}"
    if limit > fixed:
        advice = f"set layout.servers = {math.ceil(count * (needed - fixed) / (limit - fixed))} or more"
    return (
        f"layout.memory = {format_bytes(limit)}: a server takes {format_bytes(needed)} with "
        f"layout.servers = {count}; {advice}"
    )


def plan_memory_layout(
    config: Config, cut: Partition, layout: Layout, replicas: int = 0, holders: Sequence[tuple[int, ...]] = ()
) -> MemoryLayout:
    """Return the planned memory layout of the servers.

    `replicas`: how many the job began with; `holders`: shard -> the ranks that hold it, unless hashing places it.
    """
    servers = {rank: layout.places[rank].host for rank in layout.servers}
    tensors = parameters.tensors(cut.shapes)
    shards = memory_layouts.cut_for(tensors, (replicas or layout.replicas) * layout.partitions, config, cut)
    return memory_layouts.plan_layout(
        tensors, servers, layout.pushers, config, partition=cut, shards=shards, holders=holders
    )


@dataclass(frozen=True)
class JobPlan:
    """What the ranks of a job would agree on."""

    config: Config
    description: Description
    shapes: tuple[LayerShape, ...]
    layout: Layout
    partition: Partition
    memory_layout: MemoryLayout
    choices: Mapping[str, Choice]
    """Layer -> what it pushes."""
    captured: Sequence[str]
    """Layers that push factors."""
    network: Network
    """The network of the strip that needs the most memory."""


def plan_job(config: Config, ranks: int, hosts: str | None, images: str | None = None) -> JobPlan:
    """Return the plan of a job of `ranks` ranks; raise a UserError for one that cannot run.

    `hosts`: as in "4x16", four hosts with room for sixteen ranks each; `images`: what they are like where there is no
    data set, as in "3x256x256:21841".
    """
    if ranks < 1:
        raise UserError(f"-n {ranks}: at least one rank is needed")
    description = describe(config.data) if images is None else _parse_images(images)
    shapes = model(config, description)
    config.layout.partitions = partitions(config, shapes, ranks)
    layout = arrange(_parse_hosts(ranks, hosts), config.layout)
    recipe.decide(config, layout.replicas * (config.worker.threads or 1), crowded=False)
    check_memory(config, description, shapes, layout)
    cut = partition(shapes, layout.partitions, config.layout.scheme)
    memory_layout = plan_memory_layout(config, cut, layout)
    choices = choose_protocols(
        memory_layout, config, largest_push(config), len({place.host for place in layout.places})
    )
    captured = captured_layers(choices)
    return JobPlan(
        config=config,
        description=description,
        shapes=shapes,
        layout=layout,
        partition=cut,
        memory_layout=memory_layout,
        choices=choices,
        captured=captured,
        network=largest_network(config, description, cut, captured),
    )


def _parse_hosts(ranks: int, hosts: str | None) -> list[str]:
    """Return a host name per rank for the command `plan`, from "4x16": four hosts with sixteen ranks each."""
    if hosts is None:
        return ["localhost"] * ranks
    count, _, room = hosts.partition("x")
    if not (count.isdigit() and room.isdigit() and int(count) * int(room) >= ranks):
        raise UserError(f"--hosts {hosts}: expected HOSTSxRANKS with room for {ranks} ranks, e.g. 4x16")
    return [f"host{rank // int(room)}" for rank in range(ranks)]


def _parse_images(images: str) -> Description:
    """Return a data set for the command `plan`, of which only image shape and number of classes are known."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+):(\d+)", images)
    if found is None or 0 in (numbers := [int(text) for text in found.groups()]):
        raise UserError(f"--images {images}: expected CHANNELSxROWSxCOLUMNS:CLASSES, e.g. 3x256x256:1000")
    channels, rows, columns, classes = numbers
    return Description(name="images", shape=(channels, rows, columns), classes=classes, train=0, validation=0, test=0)
