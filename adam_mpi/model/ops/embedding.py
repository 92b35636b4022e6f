"""Embeddings: rows of a table that integers choose, and numbers of its own for each position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.model.expression import symbol
from adam_mpi.model.graph import Parameter, Shape, Value
from adam_mpi.model.initialization import Initialization
from adam_mpi.model.ops.elementwise import Elementwise
from adam_mpi.model.ops.fields import hidden, number, whole
from adam_mpi.model.ops.operator import Composite, Operator, Run, Span, register

LARGEST_TABLE = 1 << 24
"""Rows that a table may have: integers up to here are exact as float32, which they lie in memory as."""


@register("embedding")
@dataclass(frozen=True)
class Embedding(Operator):
    """Look up each integer in a table of `entries` rows with `units` numbers, drawn with the given `deviation`."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    entries: int = whole()
    units: int = whole()
    deviation: float = number(0, default=0.02)

    def parameters(self, inputs: Sequence[Value]) -> tuple[Parameter, ...]:
        if self.entries > LARGEST_TABLE:
            raise ValueError(f"a table of {self.entries} entries is too large; {LARGEST_TABLE} are allowed")
        return (Parameter("table", (self.entries, self.units), Initialization("normal", self.deviation), "table"),)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        if value.dtype != "integer":
            raise ValueError(f"{value.name} is of type {value.dtype}; an embedding looks up integers")
        axes = ("token",) if value.axes == ("unit",) else value.axes
        return [Value("", (*value.shape, self.units), axes=(*axes, "unit"))]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [None, tape.add(EmbeddingTable(inputs[1].shape), inputs[0], errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        tokens, table = arrays
        outside = tokens[(tokens < 0) | (tokens >= self.entries)]
        if outside.size:
            raise UserError(f"an embedding of {self.entries} entries is asked for entry {outside[0]}; raise `entries`")
        return [table[tokens]]

    def emit(self, kernel: Any) -> None:
        tokens, table = kernel.inputs
        units = self.units
        with kernel.loop("place", tokens.value.size), kernel.each_lane():
            kernel(f"token = int({tokens.scalar('place')})")
            # An entry that does not exist makes NaN, which training reports; nothing outside the table is read.
            kernel(f"known = 0 <= token < {self.entries}")
            kernel("row = token if known else 0")
            with kernel.loop("unit", units):
                found = table.scalar(f"row * {units} + unit")
                result = kernel.outputs[0].scalar(f"place * {units} + unit")
                kernel(f"{result} = {found} if known else np.float32(np.nan)")

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [None, span] if axis == "unit" else [span, None]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("Gather", [inputs[1], inputs[0]], outputs, axis=0)


@dataclass(frozen=True)
class EmbeddingTable(Operator):
    """Add the errors (second input) of what was looked up to the rows that the integers (first input) choose."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    table: Shape = hidden()
    data_inputs = 2

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", self.table, batched=False)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        tokens, errors = arrays
        made = np.zeros(self.table, errors.dtype)
        np.add.at(made, tokens.reshape(-1), errors.reshape(-1, self.table[1]))
        return [made]

    def emit(self, kernel: Any) -> None:
        tokens, errors = kernel.inputs
        entries, units = self.table
        with kernel.loop("place", tokens.value.size), kernel.each_lane():
            kernel(f"token = int({tokens.scalar('place')})")
            with kernel.inside(f"if 0 <= token < {entries} and first + lane < count:"), kernel.loop("unit", units):
                gradient = kernel.outputs[0].scalar(f"token * {units} + unit")
                kernel(f"{gradient} += {errors.scalar(f'place * {units} + unit')}")


@register("position_embedding")
@dataclass(frozen=True)
class PositionEmbedding(Composite):
    """Add a parameter to each number of a sample, drawn with the given `deviation`: positions become known."""

    deviation: float = number(0, default=0.02)

    def parameters(self, inputs: Sequence[Value]) -> tuple[Parameter, ...]:
        return (Parameter("weight", inputs[0].shape, Initialization("normal", self.deviation), "bias"),)

    def build(self, tape: Any, inputs: Sequence[Value], parameters: Sequence[Value]) -> Sequence[Value]:
        return [tape.add(Elementwise(symbol(0) + symbol(1), "position"), inputs[0], parameters[0])]
