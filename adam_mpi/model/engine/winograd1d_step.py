"""The step of a convolution by Winograd's transform along lines: the kernels it emits, called in order."""

from adam_mpi.model.engine import conv_weights, tiles, winograd1d_backward, winograd1d_forward, winograd2d
from adam_mpi.model.engine.conv_step import Job, unpool
from adam_mpi.model.engine.memory import Buffer, Call, Step
from adam_mpi.model.engine.winograd1d import Winograd1D


def step(job: Job) -> Step:
    shape, name, source = job.shape, job.name, job.source
    lines, maps = Winograd1D(shape, job.lanes), winograd1d_backward.sum_maps(shape, job.registers)
    sums = winograd1d_backward.sum_floats(lines, maps)
    kernels = job.buffer("transformed kernels", lines.points * (job.bias - job.weight) // shape.kernel, lasting=True)
    gradient = job.buffer("gradient of transformed kernels", sums, lasting=True)
    winograd1d_forward.emit_kernels(source, f"{name}_transform", lines, job.weight)
    winograd1d_backward.emit_gradient(source, f"{name}_gradient", lines, job.weight, maps)
    winograd2d.emit_clear(source, f"{name}_clear", sums)
    back, errors, winners = unpool(job)
    transformed = job.errors_buffer("transformed errors", lines.product_floats)
    winograd1d_backward.emit_errors(source, f"{name}_errors", lines)
    back.append(Call(f"{name}_errors", ("memory", errors, transformed)))
    to_weights = _to_weights(job, lines, maps, errors, transformed, gradient)
    return Step(
        True,
        _forward(job, lines, kernels, winners),
        **job.backward(back, to_weights, _to_data(job, lines, kernels, transformed)),
        prepare=[Call(f"{name}_transform", ("memory", "weights", kernels))],
        clear=[Call(f"{name}_clear", ("memory", gradient))],
        finish=[Call(f"{name}_gradient", ("memory", "gradient", gradient))],
    )


def _forward(job: Job, lines: Winograd1D, kernels: Buffer, winners: Buffer | None) -> list[Call]:
    name, source, values = job.name, job.source, job.buffer("values", lines.value_floats)
    products = job.buffer("products", lines.product_floats)
    winograd1d_forward.emit_values(source, f"{name}_values", lines)
    tile = tiles.choose(job.shape.maps, lines.tiles, job.registers, slide=2)
    winograd1d_forward.emit_products(source, f"{name}_products", lines, tile)
    winograd1d_forward.emit_outputs(source, f"{name}_outputs", lines, job.bias, job.relu, job.window)
    outputs: tuple[Buffer | str, ...] = ("memory", "weights", products, job.outputs)
    if winners:
        outputs += (winners, job.buffer("strip", job.window * job.shape.columns * job.lanes))
    return [
        Call(f"{name}_values", ("memory", job.inputs, values)),
        Call(f"{name}_products", ("memory", kernels, values, products)),
        Call(f"{name}_outputs", outputs),
    ]


def _to_weights(
    job: Job, lines: Winograd1D, maps: int, errors: Buffer, transformed: Buffer, gradient: Buffer
) -> list[Call]:
    """The values are made again: kept from the way forward they would fill the cache."""
    name, source, values = job.name, job.source, job.buffer("values again", lines.value_floats)
    winograd1d_backward.emit_sums(source, f"{name}_sums", lines, maps)
    with source.kernel(f"{name}_bias(memory, gradient, errors)", "Gradient of the bias."):
        conv_weights.emit_bias(source, job.shape, job.bias, job.lanes)
    return [
        Call(f"{name}_bias", ("memory", "gradient", errors)),
        Call(f"{name}_values", ("memory", job.inputs, values)),
        Call(f"{name}_sums", ("memory", transformed, values, gradient)),
    ]


def _to_data(job: Job, lines: Winograd1D, kernels: Buffer, transformed: Buffer) -> list[Call]:
    if job.input_errors is None:
        return []
    name, source = job.name, job.source
    products = job.buffer("products to data", lines.back_floats)
    tile = tiles.choose(job.shape.channels, lines.across, job.registers)
    winograd1d_backward.emit_back(source, f"{name}_back", lines, tile)
    winograd1d_backward.emit_spread(source, f"{name}_spread", lines, job.masked)
    return [
        Call(f"{name}_back", ("memory", kernels, transformed, products)),
        Call(f"{name}_spread", ("memory", products, job.inputs, job.input_errors)),
    ]
