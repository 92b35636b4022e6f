"""Lower dense layers of a graph, over one axis, to the fast products: all blocks of a pass at once.

Kernels are shared by layers of equal shape: they see the weights from the layer's own offset on.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from adam_mpi.model.engine import dense_product, dense_weights
from adam_mpi.model.engine.conv_lowering import at_offset
from adam_mpi.model.engine.schedule import Buffer, Call
from adam_mpi.model.graph import Value

if TYPE_CHECKING:
    from adam_mpi.model.engine.lowering import Lowering


def add_forward(
    lowering: "Lowering", name: str, offset: int, values: tuple[Value, Value], bias: bool, relu: bool
) -> None:
    """Add the product of `values`, inputs and outputs, with the weights from `offset` on, biases behind them."""
    inputs, outputs = values
    product = dense_product.forward(outputs.size, inputs.size, outputs.size * inputs.size if bias else None, relu)
    results = lowering.buffer(outputs)
    kernel, panel = _product(lowering, name, product)
    _call(lowering, kernel, offset, ("weights", "0", lowering.buffer(inputs), results, results, panel), training=False)


def add_data(
    lowering: "Lowering", name: str, offset: int, values: tuple[Value, Value], mask: Value | None, training: bool
) -> None:
    """Add the product of `values`, errors and errors of inputs; where relu made the inputs, `mask` has them."""
    errors, input_errors = values
    product = dense_product.to_data(errors.size, input_errors.size, mask is not None)
    results = lowering.buffer(input_errors)
    masked = lowering.buffer(mask) if mask else results
    kernel, panel = _product(lowering, f"{name}/data", product)
    arguments = ("weights", "0", lowering.buffer(errors), results, masked, panel)
    _call(lowering, kernel, offset, arguments, training=training)


def add_weights(lowering: "Lowering", name: str, offset: int, values: tuple[Value, Value], bias: bool) -> None:
    """Add the gradient of the weights from `offset` on, and of the biases behind them; `values`: inputs and errors."""
    inputs, errors = values
    units = errors.size
    features = inputs.size
    pitch = dense_weights.transposed_floats(features, lowering.lanes)
    transposed = Buffer(f"{name}/transposed", pitch)
    transpose = _emitted(
        lowering,
        ("transpose", features),
        lambda kernel: dense_weights.emit_transpose(lowering.source, kernel, features, lowering.lanes),
    )
    _call(lowering, transpose, offset, (lowering.buffer(inputs), transposed))
    tile = dense_weights.choose(units, features, lowering.lanes, lowering.registers)
    group = dense_weights.group(lowering.pass_blocks * lowering.lanes)

    def emit(kernel: str) -> None:
        made = dense_weights.DenseKernel(
            name=kernel,
            units=units,
            features=features,
            lanes=lowering.lanes,
            tile=tile,
            bias=units * features if bias else None,
        )
        dense_weights.emit_gradient(lowering.source, made, group)

    sums = _emitted(lowering, ("dense gradient", units, features, bias), emit)
    fresh = "fresh" if lowering.overwrites(offset, units * features) else "False"
    call = ("memory", "gradient", "0", lowering.buffer(errors), transposed, "blocks", fresh)
    lowering.add(Call(sums, tuple(at_offset(call, offset))), by_block=False, training=True)


def _product(lowering: "Lowering", name: str, product: dense_product.Product) -> tuple[str, Buffer]:
    """Return the kernel of `product`, and the panel it works with."""
    chosen = dense_product.choose(product, lowering.pass_blocks, lowering.registers)
    kernel = _emitted(
        lowering,
        ("product", product),
        lambda kernel: dense_product.emit(lowering.source, kernel, product, lowering.lanes, chosen),
    )
    floats = dense_product.panel_floats(product, lowering.lanes, chosen.many)
    return kernel, Buffer(f"{name}/panel", floats, each_block=False)


def _emitted(lowering: "Lowering", key: tuple, emit: Callable[[str], None]) -> str:
    """Return the name of the kernel for `key`, emitted if it is the first."""
    if key not in lowering.shared:
        lowering.shared[key] = f"{key[0].replace(' ', '_')}_{len(lowering.shared) + 1}"
        emit(lowering.shared[key])
    return lowering.shared[key]


def _call(
    lowering: "Lowering", kernel: str, offset: int, arguments: tuple[Buffer | str, ...], training: bool = True
) -> None:
    call = Call(kernel, ("memory", *at_offset(arguments, offset), "blocks"))
    lowering.add(call, by_block=False, training=training)
