"""The plan of a job as text: the role of each rank on its host, and the bytes that it holds and moves."""

from collections.abc import Iterator
from itertools import pairwise

from adam_mpi.base import machine
from adam_mpi.base.log import format_bytes
from adam_mpi.config import Config
from adam_mpi.model import parameters
from adam_mpi.model.exchange import Assembly, Exchange
from adam_mpi.model.layers import Dense, LayerShape
from adam_mpi.model.network import Network
from adam_mpi.model.partition import Partition
from adam_mpi.planning import memory
from adam_mpi.planning.plan import JobPlan, plan_job
from adam_mpi.sharding import batches as parts
from adam_mpi.sharding.memory_layout import WIDTHS
from adam_mpi.sharding.push_protocol import largest_push
from adam_mpi.worker.batch_filter import keeps_velocity

MOST_ROWS = 40


def plan_text(config: Config, ranks: int, hosts: str | None, images: str | None = None) -> str:
    """Return the plan of a job as text; see `plan_job` for the arguments."""
    return format_plan(plan_job(config, ranks, hosts, images))


def format_plan(plan: JobPlan) -> str:
    """Return `plan` as text, one paragraph per subject."""
    sections = [_role_lines(plan), _layer_lines(plan.shapes)]
    if len(plan.partition) > 1:
        sections.append(_strip_lines(plan))
    sections += [_parameter_lines(plan), _memory_lines(plan), _working_set_lines(plan.network)]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _role_lines(plan: JobPlan) -> Iterator[str]:
    """Yield the planned role of each rank as text."""
    layout = plan.layout
    survived = layout.survives(plan.config.server.copies)
    yield (
        f"{len(layout.places)} ranks: {len(layout.data)} data, {len(layout.workers)} worker in {layout.replicas} "
        f"replicas of {layout.partitions}, {len(layout.servers)} server"
    )
    yield f"lost servers survived without stopping: {survived} (with more, a restart resumes from the store)"
    if spares := plan.config.recover.spares:
        yield f"spares that stand by: {spares} processes more, for which mpirun needs slots"
    for place in layout.places[:MOST_ROWS]:
        yield f"  {place}"
    if len(layout.places) > MOST_ROWS:
        yield f"  ... and {len(layout.places) - MOST_ROWS} more"


def _layer_lines(shapes: tuple[LayerShape, ...]) -> Iterator[str]:
    """Yield the table of the planned layers, as text."""
    yield f"{'layer':10} {'output':>14} {'parameters':>12} {'connections':>13}"
    for shape in shapes:
        output = "x".join(map(str, shape.output))
        yield f"{shape.name:10} {output:>14} {shape.parameters:12,} {shape.connections:13,}"
    total = sum(shape.parameters for shape in shapes)
    connections = sum(shape.connections for shape in shapes)
    yield f"{'total':10} {'':14} {total:12,} {connections:13,}"


def _parameter_lines(plan: JobPlan) -> Iterator[str]:
    """Yield the planned shards of each server and the sizes of pushes, as text."""
    memory_layout = plan.memory_layout
    yield f"{len(memory_layout.shards)} shards on {len(memory_layout.servers)} servers"
    for server, held in [pair for pair in memory_layout.served.items() if pair[1]][:MOST_ROWS]:
        size = memory_layout.size(server)
        yield f"  server rank {server}: {len(held)} shards, {size:,} parameters, {format_bytes(4 * size)} of weights"
    yield f"{'layer':10} {'delta push':>12} {'factor push':>12}   (of {largest_push(plan.config)} images)"
    for choice in plan.choices.values():
        factor = "-" if choice.factor_bytes is None else format_bytes(choice.factor_bytes)
        yield f"{choice.layer:10} {format_bytes(choice.delta_bytes):>12} {factor:>12}   {choice.protocol}"
    pushed = sum(c.delta_bytes if c.factors is None else c.factor_bytes or 0 for c in plan.choices.values())
    width = WIDTHS["short"] if "short" in memory_layout.regions else WIDTHS["weights"]
    if keeps_velocity(plan.config):
        kept = format_bytes(WIDTHS["weights"] * memory_layout.parameters)
        yield f"each trainer thread keeps a velocity of {kept}; it has no factors, so all layers push deltas"
    yield f"a push: {format_bytes(pushed)};  a pull: {format_bytes(width * memory_layout.parameters)}"


def _strip_lines(plan: JobPlan) -> Iterator[str]:
    """Yield the text of what each planned strip of a replica owns, computes, and sends to the others."""
    cut = plan.partition
    if cut.hybrid:
        yield from _hybrid_lines(plan.config, cut)
    else:
        yield f"{len(cut)} strips: the columns or units that each owns of a layer's output, and its halo, left+right"
    for index, shape in enumerate(cut.shapes):
        exchange = cut.exchanges.get(index)
        if cut.strips[0].shapes[index].extent is None:
            continue
        owned = [f"{a}-{b - 1}{_halo_columns(exchange, number)}" for number, (a, b) in enumerate(cut.owned[index])]
        yield f"  {shape.name:10} {'  '.join(owned)}"
    if first := _border_first(plan.network):
        yield f"  border columns first, the others while those are on their way: before {', '.join(first)}"
    yield from _strip_sizes(plan)


def _strip_sizes(plan: JobPlan) -> Iterator[str]:
    """Yield a table of the planned strips with their parameters, work, traffic and working set, as text."""
    cache = max(machine.caches().values(), default=0)
    yield f"{'strip':>7} {'image':>9} {'parameters':>14} {'GFLOP/image':>12} {'sent/image':>11} {'working set':>12}"
    for strip in plan.partition.strips:
        sent = 4 * plan.partition.traffic(strip.number)[0]
        size = strip.bytes(plan.config.train.batch)
        fits = (
            ""
            if not cache
            else "  fits the cache"
            if size <= cache
            else f"  more than the cache of {format_bytes(cache)}"
        )
        yield (
            f"{strip.number:7} {f'{strip.columns[0]}-{strip.columns[1] - 1}':>9} {strip.parameters:14,} "
            f"{strip.flops / 1e9:12.4g} {format_bytes(sent):>11} {format_bytes(size):>12}{fits}"
        )


def _border_first(net: Network) -> list[str]:
    """Return the layers for the plan's text whose halo is sent before all columns of their input are computed."""
    if net.program is None:
        return []
    parts = pairwise(net.program.parts)
    ports = [part.port for part, after in parts if part.port and after.meanwhile and not after.training]
    return [net.program.crossings[port.exchange].exchange.layer for port in ports]


def _hybrid_lines(config: Config, cut: Partition) -> Iterator[str]:
    """Yield the text of how the ranks of a planned hybrid replica share a batch."""
    first = next(shape.name for shape in cut.shapes if isinstance(shape.layer, Dense))
    rounds = parts.count_parts(config.train.batch, *parts.most_parts(1, len(cut)))
    images = -(-config.train.batch // len(cut))
    yield f"{len(cut)} ranks, hybrid: each has {images} whole images of a batch before {first}, in {rounds} rounds;"
    yield "  then the units that each owns of a layer's output, and how many of its input come from the others"


def _halo_columns(exchange: Exchange | None, strip: int) -> str:
    """Return for the plan's text how many columns `strip` needs beyond its own of a layer's input, left and right."""
    if exchange is None or isinstance(exchange, Assembly):
        return ""
    a, b = exchange.owned[strip]
    first, last = exchange.needed[strip]
    return f" ({max(0, a - first)}+{max(0, last - b)})"


def _memory_lines(plan: JobPlan) -> Iterator[str]:
    """Yield the planned memory of each role, as text."""
    config = plan.config
    memory_layout = plan.memory_layout
    largest = max(memory_layout.servers, key=memory_layout.size)
    yield "memory per rank:"
    data = memory.data(config, plan.layout, plan.description)
    yield f"  data    {format_bytes(data)} for the set and the batches ahead"
    worker = memory.worker(config, plan.description, plan.network, memory_layout, plan.captured)
    yield f"  worker  {format_bytes(worker)} with {config.worker.threads or 1} trainer thread(s)"
    server = memory.server(config, memory_layout)
    served = memory.served(config, memory_layout, largest)
    slots = f"{memory_layout.slots} slots of {format_bytes(memory_layout.slot_bytes)}"
    yield (
        f"  server  {format_bytes(server)}: {format_bytes(served)} for weights and optimizer, "
        f"{format_bytes(memory_layout.mailbox_bytes)} for mailboxes ({len(plan.layout.workers)} pushers x {slots}), "
        "and a copy of what it serves while a snapshot is written"
    )


def _working_set_lines(network: Network) -> Iterator[str]:
    """Yield the text of what a planned trainer thread reads and writes per batch, and this machine's caches."""
    weights = 4 * parameters.total(network.shapes)
    apart = f" ({format_bytes(4 * network.program.unshared_floats)} if none shared memory)" if network.program else ""
    yield f"working set of a trainer thread: {format_bytes(2 * weights + network.bytes)}"
    parts = f"weights {format_bytes(weights)}, gradient {format_bytes(weights)}"
    yield f"  {parts}, buffers {format_bytes(network.bytes)}{apart}"
    caches = ", ".join(f"{level} {format_bytes(size)}" for level, size in machine.caches().items())
    yield f"  caches here: {caches or 'unknown'}"
