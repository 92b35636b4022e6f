"""Emit what brings samples into memory, and results out of it: inputs, levels of bytes, outputs, sums, gradients.

Lanes without a sample repeat the last one, so that no operator meets numbers that no sample has; the errors of their
losses are zero.
"""

from typing import TYPE_CHECKING

import numpy as np

from adam_mpi.model.engine.schedule import Call
from adam_mpi.model.engine.source import Source
from adam_mpi.model.graph import Node, Value

if TYPE_CHECKING:
    from adam_mpi.model.engine.lowering import Lowering


def argument(lowering: "Lowering", value: str) -> str:
    """Return the name of the array that input `value` of the graph is fed through."""
    return f"input{[known.name for known in lowering.graph.inputs].index(value)}"


def add(lowering: "Lowering", value: Value) -> None:
    """Add the call that loads input `value`; bytes are loaded by the table of levels that reads them."""
    if value.dtype == "byte" or not lowering.graph.consumers(value.name):
        return
    _emit(lowering.source, "load_field(memory, fed, x, first, count, size)", _LOAD, lowering.lanes)
    place = lowering.place(value)
    arguments = ("memory", argument(lowering, value.name), place, "first", "count", str(value.size))
    lowering.add(Call("load_field", arguments), by_block=True, training=False)


def add_levels(lowering: "Lowering", node: Node, rows: np.ndarray) -> None:
    """Add the call that looks up the bytes `node` reads in a table: 256 levels in one row, or in a row per channel."""
    value = lowering.graph.values[node.inputs[0]]
    _emit(
        lowering.source,
        "load_levels(memory, fed, tables, x, first, count, table, size, plane)",
        _LEVELS,
        lowering.lanes,
    )
    table = sum(known.size for known in lowering.tables)
    lowering.tables.append(rows)
    plane = value.size // len(rows)
    place = lowering.place(node.outputs[0])
    sizes = (str(table), str(value.size), str(plane))
    fed = argument(lowering, value.name)
    lowering.add(
        Call("load_levels", ("memory", fed, "tables", place, "first", "count", *sizes)), by_block=True, training=False
    )


def add_results(lowering: "Lowering") -> None:
    """Add the calls that copy outputs, sample by sample, and add up losses and metrics."""
    for number, name in enumerate(lowering.graph.outputs):
        value = lowering.graph.values[name]
        _emit(lowering.source, "store_output(memory, result, x, first, count, size)", _STORE, lowering.lanes)
        arguments = ("memory", f"output{number}", lowering.place(value), "first", "count", str(value.size))
        lowering.add(Call("store_output", arguments), by_block=True, training=False)
    terms = [(0, loss.value, loss.weight) for loss in lowering.graph.losses]
    terms += [(number, value, 1.0) for number, (_, value) in enumerate(lowering.graph.sums, start=1)]
    for number, name, weight in terms:
        _emit(lowering.source, "add_sum(memory, sums, x, first, count, number, weight)", _SUM, lowering.lanes)
        place = lowering.place(lowering.graph.values[name])
        scale = repr(float(weight))
        lowering.add(
            Call("add_sum", ("memory", "sums", place, "first", "count", str(number), scale)),
            by_block=True,
            training=False,
        )


def emit_add(source: Source) -> None:
    """Emit `add_gradient`, which adds floats in memory to the gradient."""
    _emit(source, "add_gradient(memory, gradient, x, start, size)", _ADD, 0)


def emit_clear(source: Source) -> None:
    """Emit `clear_floats`."""
    _emit(source, "clear_floats(memory, x, size)", _CLEAR, 0)


_LOAD = """
for lane in range({lanes}):
    start = min(first + lane, count - 1) * size
    for place in range(size):
        memory[x + place * {lanes} + lane] = fed[start + place]
"""
_LEVELS = """
for lane in range({lanes}):
    start = min(first + lane, count - 1) * size
    for place in range(size):
        memory[x + place * {lanes} + lane] = tables[table + place // plane * 256 + int(fed[start + place])]
"""
_STORE = """
for lane in range(min({lanes}, count - first)):
    for place in range(size):
        result[(first + lane) * size + place] = memory[x + place * {lanes} + lane]
"""
_SUM = """
for lane in range(min({lanes}, count - first)):
    sums[number] += weight * memory[x + lane]
"""
_ADD = """
for place in range(size):
    gradient[start + place] += memory[x + place]
"""
_CLEAR = """
for place in range(size):
    memory[x + place] = 0
"""


def _emit(source: Source, head: str, body: str, lanes: int) -> None:
    """Emit the kernel `head` with `body`, unless it is there already."""
    name = head.partition("(")[0]
    if f"def {head}:" in source.lines:
        return
    with source.kernel(head, f"{name.replace('_', ' ').capitalize()}."):
        for line in body.format(lanes=lanes).strip("\n").splitlines():
            source(line)
