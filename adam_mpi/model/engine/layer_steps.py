"""Add the steps of layers to a program: one rule per kind of layer, in the table STEPS."""

import math
from collections.abc import Callable
from dataclasses import replace

from adam_mpi.base.errors import UserError
from adam_mpi.model.engine import activations_and_loss, conv_choice, dense_step, per_image_conv, pool_and_norm
from adam_mpi.model.engine.builder import Builder
from adam_mpi.model.engine.conv_step import ConvSpec, Fused, fused
from adam_mpi.model.engine.convolution import shape_of
from adam_mpi.model.engine.schedule import Buffer, Call, Crossing, Step
from adam_mpi.model.exchange import Assembly, Exchange
from adam_mpi.model.layers import Activation, AvgPool, Conv, Dense, Dropout, LocalResponseNorm, MaxPool


def add(builder: Builder, index: int) -> int:
    """Add the step that begins with layer `index`; return how many layers it took.

    Raises UserError for a layer whose kind has no rule in STEPS.
    """
    shape = builder.shapes[index]
    rule = STEPS.get(type(shape.layer))
    if rule is None:
        raise UserError(
            f"layer {shape.name}: the generated engine has no kernels for {type(shape.layer).__name__}, as "
            'layer_steps.STEPS lacks a rule for it; set kernels.engine = "reference"'
        )
    return rule(builder, index)


def _conv(builder: Builder, index: int) -> int:
    """Add a convolution with the relu and the pooling that are fused with it, by image or by the chosen algorithm."""
    shape = builder.shapes[index]
    taken = fused(builder.shapes, index)
    spec = _conv_spec(builder, index, taken)
    if builder.per_image:
        step = per_image_conv.emit_per_image_conv_step(spec, builder.row_lanes)
    else:
        choice = builder.choices.get(shape.name)
        choice = choice or conv_choice.choices(spec.shape, spec.window, builder.registers)[0]
        builder.choices[shape.name] = choice
        following = builder.shapes[index + taken.layers - 1 :]
        images = builder.blocks * builder.lanes
        spans = conv_choice.border_spans(following, spec.shape, spec.window, choice["algorithm"], images)
        step = conv_choice.step(replace(spec, spans=spans), choice)
    builder.steps.append(step)
    builder.learning = True
    builder.relu = taken.relu and taken.window == 1
    return taken.layers


def _conv_spec(builder: Builder, index: int, taken: Fused) -> ConvSpec:
    """Return the convolution of layer `index`, and make `values` and `errors` those of the last fused layer."""
    shape = builder.shapes[index]
    errors_first = builder.errors_first
    inputs = builder.values
    input_errors = builder.errors if builder.learning else None
    builder.add_output(index + taken.layers - 1, exchanged=errors_first)
    return ConvSpec(
        source=builder.source,
        name=shape.name,
        shape=shape_of(shape),
        lanes=builder.lanes,
        registers=builder.registers,
        relu=taken.relu,
        window=taken.window,
        masked=builder.relu,
        weight=builder.offsets[f"{shape.name}/weight"],
        bias=builder.offsets[f"{shape.name}/bias"],
        inputs=inputs,
        outputs=builder.values,
        errors=builder.errors,
        input_errors=input_errors,
        errors_first=errors_first,
    )


def _max_pool(builder: Builder, index: int) -> int:
    """Add a max-pooling, which keeps the winner of each window for the way back."""
    shape = builder.shapes[index]
    inputs = builder.values
    input_errors = builder.errors
    masks = builder.mask_calls(by_block=True)
    builder.add_output(index)
    winners = Buffer(f"{shape.name}/winners", builder.values.floats)
    windows = _windows(builder, index)
    pool_and_norm.emit_max_pool_forward(builder.source, f"{shape.name}_forward", windows)
    step = Step(True, [Call(f"{shape.name}_forward", ("memory", inputs, builder.values, winners))])
    if builder.learning:
        pool_and_norm.emit_max_pool_backward(builder.source, f"{shape.name}_backward", windows)
        arguments = ("memory", builder.errors, winners, input_errors)
        step.backward = [Call(f"{shape.name}_backward", arguments), *masks]
    builder.steps.append(step)
    return 1


def _avg_pool(builder: Builder, index: int) -> int:
    """Add an average-pooling."""
    shape = builder.shapes[index]
    inputs = builder.values
    input_errors = builder.errors
    masks = builder.mask_calls(by_block=True)
    builder.add_output(index)
    windows = _windows(builder, index)
    pool_and_norm.emit_average_pool_forward(builder.source, f"{shape.name}_forward", windows)
    step = Step(True, [Call(f"{shape.name}_forward", ("memory", inputs, builder.values))])
    if builder.learning:
        pool_and_norm.emit_average_pool_backward(builder.source, f"{shape.name}_backward", windows)
        step.backward = [Call(f"{shape.name}_backward", ("memory", builder.errors, input_errors)), *masks]
    builder.steps.append(step)
    return 1


def _windows(builder: Builder, index: int) -> pool_and_norm.Windows:
    """Return the windows of the pooling that is layer `index`."""
    shape = builder.shapes[index]
    layer = shape.layer
    assert isinstance(layer, MaxPool)
    return pool_and_norm.Windows(shape.input, layer.size, layer.stride, builder.lanes)


def _local_response_norm(builder: Builder, index: int) -> int:
    """Add a local response normalization, which keeps its scales for the way back."""
    shape = builder.shapes[index]
    layer = shape.layer
    assert isinstance(layer, LocalResponseNorm)
    inputs = builder.values
    input_errors = builder.errors
    masks = builder.mask_calls(by_block=True)
    builder.add_output(index)
    scales = Buffer(f"{shape.name}/scales", builder.values.floats)
    pool_and_norm.emit_norm_forward(builder.source, f"{shape.name}_forward", shape.input, layer, builder.lanes)
    step = Step(True, [Call(f"{shape.name}_forward", ("memory", inputs, builder.values, scales))])
    if builder.learning:
        pool_and_norm.emit_norm_backward(builder.source, f"{shape.name}_backward", shape.input, layer, builder.lanes)
        arguments = ("memory", builder.errors, inputs, builder.values, scales, input_errors)
        step.backward = [Call(f"{shape.name}_backward", arguments), *masks]
    builder.steps.append(step)
    return 1


def _dropout(builder: Builder, index: int) -> int:
    """Add a dropout; its errors are masked in place."""
    shape = builder.shapes[index]
    layer = shape.layer
    assert isinstance(layer, Dropout)
    inputs = builder.values
    masks = builder.mask_calls(by_block=True)
    builder.values = Buffer(shape.name, inputs.floats)
    # Masks know layers by their number among all of the model's, whatever a strip has between them.
    number = sum(not isinstance(before.layer, Exchange) for before in builder.shapes[:index])
    mask = activations_and_loss.DropoutMask(math.prod(shape.input), shape.within, number, layer.rate)
    activations_and_loss.emit_dropout(builder.source, shape.name, mask, builder.lanes)
    step = Step(True, [Call(shape.name, ("memory", "keys", inputs, builder.values, "first", "training"))])
    if builder.learning:
        arguments = ("memory", "keys", builder.errors, builder.errors, "first", "training")
        step.backward = [Call(shape.name, arguments), *masks]
    builder.steps.append(step)
    return 1


def _activation(builder: Builder, index: int) -> int:
    """Add an activation function; its errors are computed in place."""
    layer = builder.shapes[index].layer
    assert isinstance(layer, Activation)
    name = layer.function
    inputs = builder.values
    by_block = index < builder.first_dense
    masks = builder.mask_calls(by_block)
    builder.values = Buffer(builder.shapes[index].name, inputs.floats)
    count = builder.count(inputs, by_block)
    step = Step(by_block, [Call(f"{name}_forward", ("memory", inputs, builder.values, count))])
    if builder.learning:
        step.backward = [Call(f"{name}_backward", ("memory", builder.values, builder.errors, count)), *masks]
    builder.steps.append(step)
    return 1


def _exchange(builder: Builder, index: int) -> int:
    """End a group of steps; what errors still lack when they come back is that group's first work."""
    layer = builder.shapes[index].layer
    assert isinstance(layer, Exchange)
    owned = builder.values
    owned_errors = builder.errors
    by_block = index < builder.first_dense
    if masks := builder.mask_calls(by_block):
        builder.steps.append(Step(by_block, [], masks))
    builder.add_output(index, exchanged=True)
    crossing = Crossing(
        exchange=layer,
        owned=owned,
        needed=builder.values,
        owned_errors=owned_errors,
        needed_errors=builder.errors,
        learning=builder.learning,
    )
    builder.crossings.append(crossing)
    builder.steps = []
    builder.groups.append(builder.steps)
    return 1


STEPS: dict[type, Callable[[Builder, int], int]] = {
    Conv: _conv,
    Dense: dense_step.add,
    MaxPool: _max_pool,
    AvgPool: _avg_pool,
    LocalResponseNorm: _local_response_norm,
    Dropout: _dropout,
    Activation: _activation,
    Exchange: _exchange,
    Assembly: _exchange,
}
"""Kind of layer -> what adds its step, and returns how many layers the step took."""
