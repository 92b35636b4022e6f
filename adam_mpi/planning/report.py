"""The plan of a job as text, made without MPI: who does what on which host, and the bytes that takes and moves."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from adam_mpi.base.errors import UserError
from adam_mpi.base.text import amount
from adam_mpi.cluster.layout import Layout, arrange
from adam_mpi.config import Config
from adam_mpi.data.sets import Description, describe
from adam_mpi.model import parameters
from adam_mpi.model.engine import cpu
from adam_mpi.model.exchange import Assembly, Exchange
from adam_mpi.model.layers import Dense, LayerShape
from adam_mpi.model.network import Network
from adam_mpi.model.partition import Partition, partition
from adam_mpi.planning import memory
from adam_mpi.planning.plan import check_memory, largest_network, model, partitions, plan_memory_layout
from adam_mpi.sharding import batch_parts as parts
from adam_mpi.sharding.memory_layout import WIDTHS, MemoryLayout
from adam_mpi.sharding.push_protocol import Choice, captured_layers, choose, largest_push

MOST_ROWS = 40


def plan(config: Config, ranks: int, hosts: str | None, images: str | None = None) -> str:
    """`images`: what they are like where there is no data set, as in "3x256x256:21841"."""
    if ranks < 1:
        raise UserError(f"-n {ranks}: at least one rank is needed")
    description = describe(config.data) if images is None else _described(images)
    shapes = model(config, description)
    config.layout.partitions = partitions(config, shapes, ranks)
    layout = arrange(_hosts(ranks, hosts), config.layout)
    check_memory(config, description, shapes, layout)
    cut = partition(shapes, layout.partitions, config.layout.scheme)
    memory_layout = plan_memory_layout(config, cut, layout)
    choices = choose(memory_layout, config, largest_push(config), len({place.host for place in layout.places}))
    captured = captured_layers(choices)
    net = largest_network(config, description, cut, captured)
    needed, working = _memory(config, layout, description, net, memory_layout, captured), _working_set(net)
    strips = [_strips(config, cut, net)] if len(cut) > 1 else []
    roles = _roles(layout, config.server.copies, config.recover.spares)
    sections = [roles, _layers(shapes), *strips, _parameters(config, memory_layout, choices), needed, working]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _hosts(ranks: int, given: str | None) -> list[str]:
    """A host name per rank, from "4x16": four hosts with places for sixteen ranks each."""
    if given is None:
        return ["localhost"] * ranks
    count, _, places = given.partition("x")
    if not (count.isdigit() and places.isdigit() and int(count) * int(places) >= ranks):
        raise UserError(f"--hosts {given}: expected HOSTSxRANKS with room for {ranks} ranks, e.g. 4x16")
    return [f"host{rank // int(places)}" for rank in range(ranks)]


def _roles(layout: Layout, copies: int, spares: int) -> Iterator[str]:
    yield (
        f"{len(layout.places)} ranks: {len(layout.data)} data, {len(layout.workers)} worker in {layout.replicas} "
        f"replicas of {layout.partitions}, {len(layout.servers)} server"
    )
    yield f"lost servers survived without stopping: {layout.survives(copies)} (else a restart goes on from the store)"
    if spares:
        yield f"spares that stand by: {spares} processes more, for which mpirun needs slots"
    for place in layout.places[:MOST_ROWS]:
        yield f"  {place}"
    if len(layout.places) > MOST_ROWS:
        yield f"  ... and {len(layout.places) - MOST_ROWS} more"


def _layers(shapes: tuple[LayerShape, ...]) -> Iterator[str]:
    yield f"{'layer':10} {'output':>14} {'parameters':>12} {'connections':>13}"
    for shape in shapes:
        output = "x".join(map(str, shape.output))
        yield f"{shape.name:10} {output:>14} {shape.parameters:12,} {shape.connections:13,}"
    total, connections = (sum(getattr(s, name) for s in shapes) for name in ("parameters", "connections"))
    yield f"{'total':10} {'':14} {total:12,} {connections:13,}"


def _parameters(config: Config, memory_layout: MemoryLayout, choices: Mapping[str, Choice]) -> Iterator[str]:
    yield f"{len(memory_layout.shards)} shards on {len(memory_layout.servers)} servers"
    for server, held in [pair for pair in memory_layout.held.items() if pair[1]][:MOST_ROWS]:
        size = memory_layout.size(server)
        yield f"  server rank {server}: {len(held)} shards, {size:,} parameters, {amount(4 * size)} of weights"
    yield f"{'layer':10} {'delta push':>12} {'factor push':>12}   (of {largest_push(config)} images)"
    for choice in choices.values():
        factor = "-" if choice.factor_bytes is None else amount(choice.factor_bytes)
        yield f"{choice.layer:10} {amount(choice.delta_bytes):>12} {factor:>12}   {choice.protocol}"
    pushed = sum(c.delta_bytes if c.factors is None else c.factor_bytes or 0 for c in choices.values())
    width = WIDTHS["short"] if "short" in memory_layout.regions else WIDTHS["weights"]
    yield f"a push: {amount(pushed)};  a pull: {amount(width * memory_layout.parameters)}"


def _strips(config: Config, cut: Partition, net: Network) -> Iterator[str]:
    """What each strip of a replica owns, computes, and sends to the others."""
    if cut.hybrid:
        yield from _hybrid(config, cut)
    else:
        yield f"{len(cut)} strips: the columns or units that each owns of a layer's output, and its halo, left+right"
    for index, shape in enumerate(cut.shapes):
        exchange = cut.exchanges.get(index)
        if cut.strips[0].shapes[index].extent is None:
            continue
        owned = [f"{a}-{b - 1}{_halo(exchange, number)}" for number, (a, b) in enumerate(cut.owned[index])]
        yield f"  {shape.name:10} {'  '.join(owned)}"
    if first := _border_first(net):
        yield f"  border columns first, the others while those are on their way: before {', '.join(first)}"
    cache, images = max(cpu.caches().values(), default=0), config.train.batch
    yield f"{'strip':>7} {'image':>9} {'parameters':>14} {'GFLOP/image':>12} {'sent/image':>11} {'working set':>12}"
    for strip in cut.strips:
        sent, size = 4 * cut.traffic(strip.number)[0], strip.bytes(images)
        fits = "" if not cache else "  fits the cache" if size <= cache else f"  more than the cache of {amount(cache)}"
        yield (
            f"{strip.number:7} {f'{strip.columns[0]}-{strip.columns[1] - 1}':>9} {strip.parameters:14,} "
            f"{strip.flops / 1e9:12.4g} {amount(sent):>11} {amount(size):>12}{fits}"
        )


def _border_first(net: Network) -> list[str]:
    """Layers whose halo is sent before all columns of their input are computed."""
    if net.program is None:
        return []
    parts = pairwise(net.program.parts)
    ports = [part.port for part, after in parts if part.port and after.meanwhile and not after.training]
    return [net.program.crossings[port.passage].exchange.layer for port in ports]


def _hybrid(config: Config, cut: Partition) -> Iterator[str]:
    """How the ranks of a hybrid replica share a batch."""
    first = next(shape.name for shape in cut.shapes if isinstance(shape.layer, Dense))
    rounds, images = parts.count(config.train.batch, *parts.most(1, len(cut))), -(-config.train.batch // len(cut))
    yield f"{len(cut)} ranks, hybrid: each has {images} whole images of a batch before {first}, in {rounds} rounds;"
    yield "  then the units that each owns of a layer's output, and how many of its input come from the others"


def _halo(exchange: Exchange | None, strip: int) -> str:
    """How far a strip's need reaches beyond what it owns of a layer's input."""
    if exchange is None or isinstance(exchange, Assembly):
        return ""
    (a, b), (first, last) = exchange.owned[strip], exchange.needed[strip]
    return f" ({max(0, a - first)}+{max(0, last - b)})"


def _described(images: str) -> Description:
    """A data set of which only the images' shape and the number of classes are known."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+):(\d+)", images)
    if found is None or 0 in (numbers := [int(word) for word in found.groups()]):
        raise UserError(f"--images {images}: expected CHANNELSxROWSxCOLUMNS:CLASSES, e.g. 3x256x256:1000")
    return Description("images", (numbers[0], numbers[1], numbers[2]), numbers[3], 0, 0, 0)


def _memory(
    config: Config,
    layout: Layout,
    description: Description,
    net: Network,
    memory_layout: MemoryLayout,
    captured: Sequence[str],
) -> Iterator[str]:
    largest = max(memory_layout.servers, key=memory_layout.size)
    yield "memory per rank:"
    yield f"  data    {amount(memory.data(config, layout, description))} for the set and the batches ahead"
    worker = memory.worker(config, description, net, memory_layout, captured)
    yield f"  worker  {amount(worker)} with {config.worker.threads or 1} trainer thread(s)"
    server, served = memory.server(config, memory_layout), memory.served(config, memory_layout, largest)
    yield (
        f"  server  {amount(server)}: {amount(served)} for weights and optimizer, {amount(memory_layout.mailbox_bytes)} for "
        f"mailboxes ({len(layout.workers)} pushers x {memory_layout.slots} slots of {amount(memory_layout.slot_bytes)}), and a "
        "copy of what it serves while a snapshot is written"
    )


def _working_set(network: Network) -> Iterator[str]:
    """What a trainer thread goes through in every batch, and what this machine's caches hold of it."""
    weights = 4 * parameters.total(network.shapes)
    apart = f" ({amount(4 * network.program.apart)} if none shared memory)" if network.program else ""
    yield f"working set of a trainer thread: {amount(2 * weights + network.bytes)}"
    yield f"  weights {amount(weights)}, gradient {amount(weights)}, buffers {amount(network.bytes)}{apart}"
    caches = ", ".join(f"{level} {amount(size)}" for level, size in cpu.caches().items())
    yield f"  caches here: {caches or 'unknown'}"
