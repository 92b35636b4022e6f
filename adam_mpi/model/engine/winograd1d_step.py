"""Build the step of a convolution by Winograd's transform along rows: the kernels it emits, called in order."""

from adam_mpi.model.engine import conv_kernels, tiles, winograd1d_kernels, winograd2d_kernels
from adam_mpi.model.engine.conv_step import ConvSpec, unpool
from adam_mpi.model.engine.schedule import Buffer, Call, Step
from adam_mpi.model.engine.winograd1d import COLUMNS, Winograd1D


def emit_winograd1d_step(spec: ConvSpec) -> Step:
    """Emit the kernels of the convolution `spec` by Winograd along rows, and return its step."""
    shape = spec.shape
    name = spec.name
    source = spec.source
    winograd = Winograd1D(shape, spec.lanes)
    maps = winograd1d_kernels.sum_maps(shape, spec.registers)
    sums = winograd1d_kernels.sum_floats(winograd, maps)
    rows = shape.maps * shape.channels * shape.kernel
    kernels = spec.buffer("transformed kernels", winograd.points * rows, lasting=True)
    gradient = spec.buffer("gradient of transformed kernels", sums, lasting=True)
    winograd1d_kernels.emit_winograd1d_kernels(source, f"{name}_transform", winograd, spec.weight)
    winograd1d_kernels.emit_winograd1d_gradient(source, f"{name}_gradient", winograd, spec.weight, maps)
    winograd2d_kernels.emit_winograd2d_clear(source, f"{name}_clear", sums)
    back, errors, winners = unpool(spec)
    transformed = spec.errors_buffer("transformed errors", winograd.product_floats)
    winograd1d_kernels.emit_winograd1d_errors(source, f"{name}_errors", winograd)
    back.append(Call(f"{name}_errors", ("memory", errors, transformed)))
    _emit_to_weights(spec, winograd, maps)
    forward = _winograd1d_forward(spec, winograd, kernels, winners)
    to_weights = _winograd1d_to_weights(spec, winograd, (errors, transformed), gradient)
    to_data = _winograd1d_to_data(spec, winograd, kernels, transformed)
    return Step(
        True,
        forward,
        **spec.backward(back, to_weights, to_data),
        prepare=[Call(f"{name}_transform", ("memory", "weights", kernels))],
        clear=[Call(f"{name}_clear", ("memory", gradient))],
        finish=[Call(f"{name}_gradient", ("memory", "gradient", gradient))],
    )


def _winograd1d_forward(spec: ConvSpec, winograd: Winograd1D, kernels: Buffer, winners: Buffer | None) -> list[Call]:
    """Emit the forward kernels of Winograd along rows and return their calls."""
    name = spec.name
    source = spec.source
    values = spec.buffer("values", winograd.value_floats)
    products = spec.buffer("products", winograd.product_floats)
    winograd1d_kernels.emit_winograd1d_values(source, f"{name}_values", winograd)
    tile = tiles.choose(spec.shape.maps, winograd.tiles, spec.registers, slide=2)
    winograd1d_kernels.emit_winograd1d_products(source, f"{name}_products", winograd, tile)
    winograd1d_kernels.emit_winograd1d_outputs(source, winograd, spec.forward_kernel("outputs", tiles.Tile(1, COLUMNS)))
    outputs: tuple[Buffer | str, ...] = ("memory", "weights", products, spec.outputs)
    if winners:
        outputs += (winners, spec.buffer("unpooled", spec.window * spec.shape.columns * spec.lanes))
    return [
        Call(f"{name}_values", ("memory", spec.inputs, values)),
        Call(f"{name}_products", ("memory", kernels, values, products)),
        Call(f"{name}_outputs", outputs),
    ]


def _emit_to_weights(spec: ConvSpec, winograd: Winograd1D, maps: int) -> None:
    winograd1d_kernels.emit_winograd1d_sums(spec.source, f"{spec.name}_sums", winograd, maps)
    if spec.bias is None:
        return
    with spec.source.kernel(f"{spec.name}_bias(memory, gradient, errors)", "Gradient of the bias."):
        conv_kernels.emit_bias(spec.source, spec.shape, spec.bias, spec.lanes)


def _winograd1d_to_weights(
    spec: ConvSpec, winograd: Winograd1D, errors: tuple[Buffer, Buffer], gradient: Buffer
) -> list[Call]:
    """Return the calls back to the weights; `errors`: as they are, and transformed.

    The values are computed again: kept from the way forward they would fill the cache.
    """
    plain, transformed = errors
    values = spec.buffer("values again", winograd.value_floats)
    bias = [] if spec.bias is None else [Call(f"{spec.name}_bias", ("memory", "gradient", plain))]
    return [
        *bias,
        Call(f"{spec.name}_values", ("memory", spec.inputs, values)),
        Call(f"{spec.name}_sums", ("memory", transformed, values, gradient)),
    ]


def _winograd1d_to_data(spec: ConvSpec, winograd: Winograd1D, kernels: Buffer, transformed: Buffer) -> list[Call]:
    """Emit the way back to the data and return its calls; none where no layer before this one learns."""
    if spec.input_errors is None:
        return []
    name = spec.name
    products = spec.buffer("products to data", winograd.back_floats)
    tile = tiles.choose(spec.shape.channels, winograd.across, spec.registers)
    winograd1d_kernels.emit_winograd1d_back(spec.source, f"{name}_back", winograd, tile)
    winograd1d_kernels.emit_winograd1d_spread(spec.source, f"{name}_spread", winograd, spec.masked)
    return [
        Call(f"{name}_back", ("memory", kernels, transformed, products)),
        Call(f"{name}_spread", ("memory", products, spec.inputs, spec.input_errors)),
    ]
