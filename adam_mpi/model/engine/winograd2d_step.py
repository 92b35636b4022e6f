"""The step of a 3x3 convolution by Winograd's transform: kernels for the pieces, and one per direction that calls them.

forward, data:  pad; for each group of tiles: values, the sixteen products, outputs
weights:        pad; for each group of tiles: values, errors, the sixteen sums
"""

from dataclasses import dataclass, replace

from adam_mpi.model.engine import conv_weights, dense_product, dense_weights, tiles, winograd2d
from adam_mpi.model.engine.conv_step import Job, unpool
from adam_mpi.model.engine.memory import Buffer, Call, Step
from adam_mpi.model.engine.winograd2d import PARTS, TURNED
from adam_mpi.model.exchange import Span


@dataclass(frozen=True)
class Side:
    """Planes that are padded and cut into tiles, and how many tiles there are."""

    planes: int
    height: int
    width: int
    pads: tuple[int, int, int]
    """Winograd1D of zeros above and below, columns of zeros left, and right."""
    rows: int
    columns: int
    first: int = 0
    """Of its tiles in a row, where it is a part of the planes."""
    within: tuple[int, int] = (0, 0)
    """How wide the planes are then, and where it begins in them."""

    def part(self, span: Span) -> "Side":
        """The tiles that make these columns of the outputs."""
        (a, b), (lines, left, _) = span, self.pads
        begin, end = a - left, tiles.up(b, 2) + 2 - left
        first, last = max(0, begin), min(self.width, end)
        pads = lines, first - begin, end - last
        return replace(
            self, width=last - first, pads=pads, columns=-(-b // 2) - a // 2, first=a // 2, within=(self.width, first)
        )

    @property
    def padded(self) -> tuple[int, int]:
        """Sides of a plane with its border, filled up to whole tiles."""
        lines, left, right = self.pads
        return tiles.up(self.height + 2 * lines, 2), tiles.up(self.width + left + right, 2)

    @property
    def group_rows(self) -> int:
        return winograd2d.group_rows(self.rows, self.columns)

    @property
    def group(self) -> int:
        """Tiles in a group."""
        return self.group_rows * self.columns


def step(job: Job) -> Step:
    shape, name, source = job.shape, job.name, job.source
    pads = shape.pad, shape.left, shape.right
    columns = shape.columns // 2 if job.window == 2 else -(-shape.columns // 2)
    inputs = Side(shape.channels, shape.height, shape.width, pads, shape.rows // 2, columns)
    turned_pads = 2 - shape.pad, 2 - shape.left, 2 - shape.right
    errors = Side(shape.maps, shape.rows, shape.columns, turned_pads, shape.height // 2, -(-shape.width // 2))
    floats = PARTS * shape.maps * shape.channels
    kernels = job.buffer("transformed kernels", floats, lasting=True)
    sums = job.buffer("gradient of transformed kernels", floats, lasting=True)
    winograd2d.emit_weights(source, f"{name}_transform", shape, job.weight)
    winograd2d.emit_clear(source, f"{name}_clear", floats)
    winograd2d.emit_gradient(source, f"{name}_gradient", shape, job.weight)
    back, output_errors, winners = unpool(job)
    forward = _forward(job, inputs, errors, winners, kernels)
    emit_weights(job, inputs)
    turned = job.buffer("turned", inputs.group * dense_weights.turned_floats(shape.channels, job.lanes))
    scratch = _scratch(job, "to weights", (inputs, errors))
    arguments = ("memory", "gradient", output_errors, job.inputs, sums, *scratch, turned)
    to_weights, to_data = [Call(f"{name}_weights", arguments)], []
    if job.input_errors:
        emit_data(job, errors)
        scratch = _scratch(job, "to data", (inputs, errors))
        arguments = ("memory", "weights", output_errors, job.input_errors, job.inputs, kernels, *scratch)
        to_data = [Call(f"{name}_data", arguments)]
    return Step(
        True,
        **job.forward(forward),
        **job.backward(back, to_weights, to_data),
        prepare=[Call(f"{name}_transform", ("memory", "weights", kernels))],
        clear=[Call(f"{name}_clear", ("memory", sums))],
        finish=[Call(f"{name}_gradient", ("memory", "gradient", sums))],
    )


def _forward(job: Job, inputs: Side, errors: Side, winners: Buffer | None, kernels: Buffer) -> list[Call]:
    """A call for all columns, or for each span of them."""
    calls, name = [], f"{job.name}_forward"
    if job.spans:
        # For the way back to the weights.
        _emit_values(job, name, inputs)
    for number, span in enumerate(job.spans or (None,)):
        one, side = f"{name}{number if span else ''}", inputs.part(span) if span else inputs
        emit_forward(job, one, side)
        scratch = _scratch(job, one.removeprefix(f"{job.name}_"), (side, errors))
        places = job.inputs, job.outputs, winners or job.outputs, kernels
        calls.append(Call(one, ("memory", "weights", *places, *scratch)))
    return calls


def _scratch(job: Job, call: str, sides: tuple[Side, Side]) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """Padded planes, transformed tiles, products, and a panel of packed kernels.

    Each call has its own, so that none of them lives longer than it, and all share memory.
    """
    widest = PARTS * max(side.group for side in sides) * max(side.planes for side in sides) * job.lanes
    padded = max(side.planes * side.padded[0] * side.padded[1] for side in sides) * job.lanes
    panel = _panel_floats(job, sides[1])
    floats = {"padded": padded, "tiles": widest, "products": widest, "panel": panel}
    one, two, three, four = (job.buffer(f"{what} {call}", count) for what, count in floats.items())
    return one, two, three, four


def _panel_floats(job: Job, errors: Side) -> int:
    product = dense_product.to_data(job.shape.maps, job.shape.channels)
    tile, _ = dense_product.choose(product, errors.group, job.registers)
    return dense_product.CHUNK * dense_product.group(product, job.lanes, tile)


def emit_forward(job: Job, name: str, side: Side) -> None:
    shape = job.shape
    winograd2d.emit_outputs(
        job.source,
        f"{name}_outputs",
        shape.maps,
        (shape.rows, shape.columns),
        side.group_rows,
        side.columns,
        job.lanes,
        bias=job.bias,
        relu=job.relu,
        pooled=job.window == 2,
        first=side.first,
    )
    _emit_chain(job, name, side, dense_product.forward(shape.maps, shape.channels), list(range(PARTS)))


def emit_data(job: Job, side: Side) -> None:
    shape = job.shape
    winograd2d.emit_outputs(
        job.source,
        f"{job.name}_data_outputs",
        shape.channels,
        (shape.height, shape.width),
        side.group_rows,
        side.columns,
        job.lanes,
        masked=job.masked,
    )
    _emit_chain(job, f"{job.name}_data", side, dense_product.to_data(shape.maps, shape.channels), TURNED)


def _emit_values(job: Job, name: str, side: Side) -> None:
    size, (top, left, _), within = (side.height, side.width), side.pads, side.within
    padding = top, left, job.lanes, within if within[0] else (side.width, 0)
    winograd2d.emit_pad(job.source, f"{name}_pad", side.planes, size, side.padded, *padding)
    places = side.planes, *side.padded, side.group_rows, side.columns, job.lanes
    winograd2d.emit_values(job.source, f"{name}_values", *places)


def _emit_chain(job: Job, name: str, side: Side, product: dense_product.Product, parts: list[int]) -> None:
    """Planes in, planes out; `extra` is for winners, or the mask of a relu; `parts` is the order of the kernels."""
    source, lanes, pairs = job.source, job.lanes, product.units * product.terms
    _emit_values(job, name, side)
    chosen = dense_product.choose(product, side.group, job.registers)
    dense_product.emit(source, f"{name}_product", product, lanes, *chosen)
    head = f"{name}(memory, weights, planes, outputs, extra, kernels, padded, tiles, products, panel)"
    with source.kernel(head, f"{job.shape}, Winograd, groups of {side.group} tiles."):
        source(f"{name}_pad(memory, planes, padded)")
        with source.inside(f"for group in range({side.rows // side.group_rows}):"):
            source(f"{name}_values(memory, padded, tiles, group)")
            for part, kernel in enumerate(parts):
                values = f"tiles + {part * side.group * product.terms * lanes}"
                results = f"products + {part * side.group * product.units * lanes}"
                places = f"kernels + {kernel * pairs}, {values}, {results}, 0, panel"
                source(f"{name}_product(memory, memory, {places}, {side.group})")
            source(f"{name}_outputs(memory, weights, products, outputs, extra, group)")


def emit_weights(job: Job, side: Side) -> None:
    source, shape, lanes, name = job.source, job.shape, job.lanes, job.name
    winograd2d.emit_errors(source, f"{name}_weights_errors", shape, side.group_rows, side.columns, lanes)
    dense_weights.emit_turn(source, f"{name}_weights_turn", shape.channels, lanes)
    tile = tiles.choose(shape.maps, -(-shape.channels // lanes), job.registers, overhead=1.0)
    group = dense_weights.group(side.group * lanes)
    dense_weights.emit(source, f"{name}_weights_sums", shape.maps, shape.channels, lanes, tile, group)
    head = f"{name}_weights(memory, gradient, errors, planes, sums, padded, tiles, products, panel, turned)"
    with source.kernel(head, f"{shape}, Winograd, groups of {side.group} tiles."):
        source(f"{name}_forward_pad(memory, planes, padded)")
        with source.inside(f"for group in range({side.rows // side.group_rows}):"):
            source(f"{name}_forward_values(memory, padded, tiles, group)")
            source(f"{name}_weights_errors(memory, errors, products, group)")
            with source.inside(f"for part in range({PARTS}):"):
                source(
                    f"{name}_weights_turn(memory, tiles + part * {side.group * shape.channels * lanes}, turned, "
                    f"{side.group})"
                )
                source(
                    f"{name}_weights_sums(memory, memory, sums + part * {shape.maps * shape.channels}, "
                    f"products + part * {side.group * shape.maps * lanes}, turned, {side.group}, False)"
                )
        conv_weights.emit_bias(source, shape, job.bias, lanes)
