"""Build the step of a 3x3 convolution by Winograd's transform: kernels for the pieces, and one per direction.

forward, data:  pad; for each group of tiles: values, the sixteen products, outputs
weights:        pad; for each group of tiles: values, errors, the sixteen sums
"""

from adam_mpi.model.engine import conv_kernels, dense_product, dense_weights, winograd2d_kernels
from adam_mpi.model.engine.conv_step import ConvSpec, unpool
from adam_mpi.model.engine.schedule import Buffer, Call, Step
from adam_mpi.model.engine.winograd2d_kernels import PARTS, ROTATED, Outputs, Side


def emit_winograd2d_step(spec: ConvSpec) -> Step:
    """Emit the kernels of the convolution `spec` by Winograd in tiles, and return its step."""
    name = spec.name
    source = spec.source
    inputs, errors = _sides(spec)
    floats = PARTS * spec.shape.maps * spec.shape.channels
    kernels = spec.buffer("transformed kernels", floats, lasting=True)
    sums = spec.buffer("gradient of transformed kernels", floats, lasting=True)
    winograd2d_kernels.emit_winograd2d_weights(source, f"{name}_transform", spec.shape, spec.weight)
    winograd2d_kernels.emit_winograd2d_clear(source, f"{name}_clear", floats)
    winograd2d_kernels.emit_winograd2d_gradient(source, f"{name}_gradient", spec.shape, spec.weight)
    back, output_errors, winners = unpool(spec)
    forward = _winograd2d_forward(spec, (inputs, errors), winners, kernels)
    to_weights = [_winograd2d_to_weights(spec, (inputs, errors), output_errors, sums)]
    to_data = []
    if spec.input_errors:
        _emit_winograd2d_data(spec, errors)
        scratch = _winograd2d_scratch(spec, "to data", (inputs, errors))
        buffers = (output_errors, spec.input_errors, spec.inputs, kernels, *scratch)
        to_data.append(Call(f"{name}_data", ("memory", "weights", *buffers)))
    return Step(
        True,
        **spec.forward(forward),
        **spec.backward(back, to_weights, to_data),
        prepare=[Call(f"{name}_transform", ("memory", "weights", kernels))],
        clear=[Call(f"{name}_clear", ("memory", sums))],
        finish=[Call(f"{name}_gradient", ("memory", "gradient", sums))],
    )


def _sides(spec: ConvSpec) -> tuple[Side, Side]:
    """Return the inputs in tiles of the outputs, and the errors in tiles of the inputs."""
    shape = spec.shape
    inputs = Side(
        planes=shape.channels,
        height=shape.height,
        width=shape.width,
        pads=(shape.pad, shape.left, shape.right),
        rows=shape.rows // 2,
        columns=shape.columns // 2 if spec.window == 2 else -(-shape.columns // 2),
    )
    errors = Side(
        planes=shape.maps,
        height=shape.rows,
        width=shape.columns,
        pads=(2 - shape.pad, 2 - shape.left, 2 - shape.right),
        rows=shape.height // 2,
        columns=-(-shape.width // 2),
    )
    return inputs, errors


def _winograd2d_forward(
    spec: ConvSpec, sides: tuple[Side, Side], winners: Buffer | None, kernels: Buffer
) -> list[Call]:
    """Emit the forward kernels of Winograd in tiles; return one call for all columns, or one for each span."""
    calls = []
    name = f"{spec.name}_forward"
    inputs, errors = sides
    if spec.spans:
        # For the way back to the weights.
        _emit_values(spec, name, inputs)
    for number, span in enumerate(spec.spans or (None,)):
        one = f"{name}{number if span else ''}"
        side = inputs.part(span) if span else inputs
        _emit_winograd2d_forward(spec, one, side)
        scratch = _winograd2d_scratch(spec, one.removeprefix(f"{spec.name}_"), (side, errors))
        buffers = (spec.inputs, spec.outputs, winners or spec.outputs, kernels, *scratch)
        calls.append(Call(one, ("memory", "weights", *buffers)))
    return calls


def _winograd2d_to_weights(spec: ConvSpec, sides: tuple[Side, Side], errors: Buffer, sums: Buffer) -> Call:
    """Emit the way back to the weights and return its call; `errors` are those of the outputs."""
    side = sides[0]
    _emit_winograd2d_weights(spec, side)
    floats = dense_weights.transposed_floats(spec.shape.channels, spec.lanes)
    transposed = spec.buffer("transposed", side.group * floats)
    scratch = _winograd2d_scratch(spec, "to weights", sides)
    return Call(f"{spec.name}_weights", ("memory", "gradient", errors, spec.inputs, sums, *scratch, transposed))


def _winograd2d_scratch(spec: ConvSpec, call: str, sides: tuple[Side, Side]) -> tuple[Buffer, ...]:
    """Return buffers for padded planes, transformed tiles, products, and a panel of packed kernels.

    Each call has its own, so that none of them lives longer than it, and all share memory.
    """
    widest = PARTS * max(side.group for side in sides) * max(side.planes for side in sides) * spec.lanes
    padded = max(side.planes * side.padded[0] * side.padded[1] for side in sides) * spec.lanes
    floats = {"padded": padded, "tiles": widest, "products": widest, "panel": _panel_floats(spec, sides[1])}
    return tuple(spec.buffer(f"{what} {call}", count) for what, count in floats.items())


def _panel_floats(spec: ConvSpec, errors: Side) -> int:
    product = dense_product.to_data(spec.shape.maps, spec.shape.channels)
    tile = dense_product.choose(product, errors.group, spec.registers).many
    return dense_product.panel_floats(product, spec.lanes, tile)


def _emit_winograd2d_forward(spec: ConvSpec, name: str, side: Side) -> None:
    """Emit the kernel `name` that computes the outputs of the tiles of `side`."""
    shape = spec.shape
    outputs = Outputs(
        side=side,
        planes=shape.maps,
        height=shape.rows,
        width=shape.columns,
        lanes=spec.lanes,
        bias=spec.bias,
        relu=spec.relu,
        pooled=spec.window == 2,
    )
    winograd2d_kernels.emit_winograd2d_outputs(spec.source, f"{name}_outputs", outputs)
    _emit_chain(spec, name, side, dense_product.forward(shape.maps, shape.channels), list(range(PARTS)))


def _emit_winograd2d_data(spec: ConvSpec, side: Side) -> None:
    """Emit the kernel that computes the errors of the inputs; `side` are the errors of the outputs."""
    shape = spec.shape
    outputs = Outputs(
        side=side,
        planes=shape.channels,
        height=shape.height,
        width=shape.width,
        lanes=spec.lanes,
        masked=spec.masked,
    )
    winograd2d_kernels.emit_winograd2d_outputs(spec.source, f"{spec.name}_data_outputs", outputs)
    _emit_chain(spec, f"{spec.name}_data", side, dense_product.to_data(shape.maps, shape.channels), ROTATED)


def _emit_values(spec: ConvSpec, name: str, side: Side) -> None:
    """Emit the kernels that pad the planes of `side`, and transform their tiles."""
    winograd2d_kernels.emit_winograd2d_pad(spec.source, f"{name}_pad", side, spec.lanes)
    winograd2d_kernels.emit_winograd2d_values(spec.source, f"{name}_values", side, spec.lanes)


def _emit_chain(spec: ConvSpec, name: str, side: Side, product: dense_product.Product, parts: list[int]) -> None:
    """Emit the kernel `name` from planes to planes; `parts` is the order of the transformed kernels.

    Its argument `extra` is for winners, or the mask of a relu.
    """
    source = spec.source
    lanes = spec.lanes
    pairs = product.units * product.terms
    _emit_values(spec, name, side)
    chosen = dense_product.choose(product, side.group, spec.registers)
    dense_product.emit(source, f"{name}_product", product, lanes, chosen)
    head = f"{name}(memory, weights, planes, outputs, extra, kernels, padded, tiles, products, panel)"
    with source.kernel(head, f"{spec.shape}, Winograd, groups of {side.group} tiles."):
        source(f"{name}_pad(memory, planes, padded)")
        with source.inside(f"for group in range({side.rows // side.group_rows}):"):
            source(f"{name}_values(memory, padded, tiles, group)")
            for part, kernel in enumerate(parts):
                values = f"tiles + {part * side.group * product.terms * lanes}"
                results = f"products + {part * side.group * product.units * lanes}"
                places = f"kernels + {kernel * pairs}, {values}, {results}, 0, panel"
                source(f"{name}_product(memory, memory, {places}, {side.group})")
            source(f"{name}_outputs(memory, weights, products, outputs, extra, group)")


def _emit_winograd2d_weights(spec: ConvSpec, side: Side) -> None:
    """Emit the kernel that adds up the gradient of the transformed kernels, and adds to that of the bias."""
    source = spec.source
    shape = spec.shape
    lanes = spec.lanes
    name = spec.name
    winograd2d_kernels.emit_winograd2d_errors(source, f"{name}_weights_errors", shape, side, lanes)
    dense_weights.emit_transpose(source, f"{name}_weights_transpose", shape.channels, lanes)
    tile = dense_weights.choose(shape.maps, shape.channels, lanes, spec.registers)
    kernel = dense_weights.DenseKernel(f"{name}_weights_sums", shape.maps, shape.channels, lanes, tile)
    dense_weights.emit_gradient(source, kernel, dense_weights.group(side.group * lanes))
    head = f"{name}_weights(memory, gradient, errors, planes, sums, padded, tiles, products, panel, transposed)"
    with source.kernel(head, f"{shape}, Winograd, groups of {side.group} tiles."):
        source(f"{name}_forward_pad(memory, planes, padded)")
        with source.inside(f"for group in range({side.rows // side.group_rows}):"):
            source(f"{name}_forward_values(memory, padded, tiles, group)")
            source(f"{name}_weights_errors(memory, errors, products, group)")
            with source.inside(f"for part in range({PARTS}):"):
                values = f"tiles + part * {side.group * shape.channels * lanes}"
                errors = f"products + part * {side.group * shape.maps * lanes}"
                weight = f"sums + part * {shape.maps * shape.channels}"
                source(f"{name}_weights_transpose(memory, {values}, transposed, {side.group})")
                source(f"{kernel.name}(memory, memory, {weight}, {errors}, transposed, {side.group}, False)")
        conv_kernels.emit_bias(source, shape, spec.bias, lanes)
