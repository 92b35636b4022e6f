"""Add the step of a dense layer to a program, with the relu that follows it.

A large layer's gradient is fused with the update (`dense_weights.py`); a captured layer keeps its activations and
errors, image by image.
"""

from adam_mpi.model.engine import dense_product, dense_weights, per_image_dense
from adam_mpi.model.engine.builder import Builder
from adam_mpi.model.engine.dense_weights import DenseBuffers, DenseKernel, DenseSpec
from adam_mpi.model.engine.schedule import Buffer, Call, Step
from adam_mpi.model.layers import Activation


def add(builder: Builder, index: int) -> int:
    """Add the step of the dense layer `index`; return how many layers it took."""
    relu = index + 1 < len(builder.shapes) and builder.shapes[index + 1].layer == Activation("relu")
    layer = _layer(builder, index, relu)
    inputs = builder.values
    input_errors = builder.errors if builder.learning else None
    builder.add_output(index + relu)
    if layer.name in builder.fused:
        builder.errors = Buffer(builder.errors.name, layer.units, images=builder.round_images)
    buffers = DenseBuffers(inputs, builder.values, builder.errors, input_errors)
    if builder.per_image:
        step = per_image_dense.emit_per_image_dense_step(builder.source, layer, buffers, builder.errors_first)
        _keep(builder, step, layer.name, (inputs, layer.features), (builder.errors, layer.units))
    else:
        step = _step(builder, layer, buffers)
    builder.steps.append(step)
    builder.learning = True
    builder.relu = relu
    return 1 + relu


def _layer(builder: Builder, index: int, relu: bool) -> DenseSpec:
    """Return the description of the dense layer `index`."""
    shape = builder.shapes[index]
    units, features = shape.weight or ()
    return DenseSpec(
        name=shape.name,
        weights="shared" if shape.name in builder.uncopied else "weights",
        units=units,
        features=features,
        weight=builder.offsets[f"{shape.name}/weight"],
        bias=builder.offsets[f"{shape.name}/bias"],
        row_lanes=builder.row_lanes,
        registers=builder.registers,
        relu=relu,
        masked=builder.relu,
    )


def _step(builder: Builder, layer: DenseSpec, buffers: DenseBuffers) -> Step:
    """Emit the kernels of a dense layer whose blocks have several images, and return its step."""
    name = layer.name
    weight = str(layer.weight)
    inputs = buffers.inputs
    outputs = buffers.outputs
    errors = buffers.errors
    product = dense_product.forward(layer.units, layer.features, layer.bias, layer.relu)
    panel = _product(builder, f"{name}_forward", product)
    transposed = _transposed(builder, name, "activations", layer.features)
    dense_weights.emit_transpose(builder.source, f"{name}_transpose", layer.features, builder.lanes)
    dense_weights.emit_gradient(
        builder.source, _kernel(builder, layer, "weights"), dense_weights.group(builder.blocks * builder.lanes)
    )
    arguments = ("memory", layer.weights, weight, inputs, outputs, outputs, panel, "blocks")
    step = Step(False, [Call(f"{name}_forward", arguments)])
    if buffers.input_errors:
        panel = _product(builder, f"{name}_data", dense_product.to_data(layer.units, layer.features, layer.masked))
        arguments = ("memory", layer.weights, weight, errors, buffers.input_errors, inputs, panel, "blocks")
        step.backward.append(Call(f"{name}_data", arguments))
    sums = ("memory", "gradient", weight, errors, transposed, "blocks", "fresh")
    to_weights = step.later if builder.errors_first else step.backward
    to_weights.append(Call(f"{name}_transpose", ("memory", inputs, transposed, "blocks")))
    to_weights.append(Call(f"{name}_weights", sums, "not later" if name in builder.fused else ""))
    if name in builder.fused:
        _add_fused_update(builder, layer, errors, transposed)
    if name in builder.kept:
        builder.kept[name] = (transposed,)
        _keep(builder, step, name, (errors, layer.units))
    return step


def _kernel(builder: Builder, layer: DenseSpec, suffix: str) -> DenseKernel:
    """Return the kernel called `suffix` of `layer`, in the cheapest tiles."""
    tile = dense_weights.choose(layer.units, layer.features, builder.lanes, builder.registers)
    return DenseKernel(
        name=f"{layer.name}_{suffix}",
        units=layer.units,
        features=layer.features,
        lanes=builder.lanes,
        tile=tile,
        bias=layer.bias,
    )


def _add_fused_update(builder: Builder, layer: DenseSpec, errors: Buffer, transposed: Buffer) -> None:
    """Emit the fused update of `layer`, which reads what all batches of a round left in memory, and add its call."""
    kernel = _kernel(builder, layer, "apply_fused")
    dense_weights.emit_fused_update(builder.source, kernel)
    floats = builder.round_images * kernel.tile.columns * builder.lanes
    panel = Buffer(f"{layer.name}/panel of a round", floats, each_block=False)
    arguments = ("memory", "shared", "contribution", str(layer.weight), errors, transposed, panel)
    builder.fused_calls.append(Call(kernel.name, (*arguments, "blocks", "factor", "unit_value")))


def _keep(builder: Builder, step: Step, name: str, *kept: tuple[Buffer, int]) -> None:
    """Keep buffers of a captured layer, (buffer, numbers per image) each: they are transposed on the way back."""
    if name not in builder.kept:
        return
    for number, (buffer, columns) in enumerate(kept):
        transposed = _transposed(builder, name, f"kept{number}", columns)
        dense_weights.emit_transpose(builder.source, f"{name}_keep{number}", columns, builder.lanes)
        step.backward.append(Call(f"{name}_keep{number}", ("memory", buffer, transposed, "blocks")))
        builder.kept[name] += (transposed,)


def _transposed(builder: Builder, name: str, what: str, columns: int) -> Buffer:
    """Return the buffer of values image by image: of a pass, or of all batches of a round if they are kept."""
    if name in builder.kept or name in builder.fused:
        return Buffer(f"{name}/{what}", dense_weights.transposed_pitch(columns), images=builder.round_images)
    return Buffer(f"{name}/{what}", dense_weights.transposed_floats(columns, builder.lanes))


def _product(builder: Builder, name: str, product: dense_product.Product) -> Buffer:
    """Emit the kernel `name` of `product`, and return the panel it works with."""
    chosen = dense_product.choose(product, builder.blocks, builder.registers)
    dense_product.emit(builder.source, name, product, builder.lanes, chosen)
    floats = dense_product.panel_floats(product, builder.lanes, chosen.many)
    return Buffer(f"{name}/panel", floats, each_block=False)
