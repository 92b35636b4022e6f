"""Element-wise operators: unary, binary, and functions of the user's own, all by one expression.

The numpy reference, the emitted kernel and the gradient are made from the expression. Inputs are broadcast against
each other as numpy does, by their shapes per sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model import expression
from adam_mpi.model.expression import Expression, symbol
from adam_mpi.model.graph import Value, shape_text
from adam_mpi.model.ops.fields import hidden
from adam_mpi.model.ops.operator import Operator, Run, Span
from adam_mpi.model.ops.reduce import SumTo


@dataclass(frozen=True)
class Elementwise(Operator):
    """Apply `expression` to each element of the inputs; `label` names its nodes, and does not matter otherwise."""

    data_inputs: ClassVar[None] = None
    expression: Expression = hidden(symbol(0))
    label: str = hidden("elementwise")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elementwise) and self.expression == other.expression

    def __hash__(self) -> int:
        return hash(self.expression)

    def stem(self) -> str:
        return self.label

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        try:
            shape = np.broadcast_shapes(*(value.shape for value in inputs))
        except ValueError:
            raise ValueError(f"shapes {', '.join(shape_text(v.shape) for v in inputs)} do not meet") from None
        if any(value.batched and len(value.shape) != len(shape) for value in inputs):
            raise ValueError("all have to have as many axes; reshape to sizes of 1 where axes are missing")
        whole = next((value for value in inputs if value.shape == shape and value.batched), inputs[0])
        axes = whole.axes if whole.shape == shape else ()
        return [Value("", shape, axes=axes, batched=any(value.batched for value in inputs))]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        # Parts that are equal to the output are read from it: the derivatives of many functions are simple there.
        error = symbol(len(inputs))
        table = {self.expression: symbol(len(inputs) + 1)}
        given = [*inputs, errors[0], outputs[0]]
        back = expression.gradient(self.expression, error)
        return [
            self._error(tape, expression.substitute(back[number], table), given, value) if number in back else None
            for number, value in enumerate(inputs)
        ]

    def _error(self, tape: Any, back: Expression, given: Sequence[Any], value: Value) -> Value | None:
        """Add a node for the expression `back` over those of `given` that it reads; sum over what was broadcast."""
        numbers = expression.inputs_of(back)
        if not numbers:
            return None
        table = {symbol(number): symbol(place) for place, number in enumerate(numbers)}
        made = expression.substitute(back, table)
        read = [given[number] for number in numbers]
        result = read[0] if made == symbol(0) else tape.add(Elementwise(made), *read)
        if result.shape == value.shape and result.batched == value.batched:
            return result
        return tape.add(SumTo(value.shape, value.axes, value.batched), result)

    def activation(self) -> str | None:
        """Return which of relu, tanh and sigmoid it computes, if any."""
        found = {part.function for part in expression.parts(self.expression)}
        return next((function for function in ("relu", "tanh", "sigmoid") if function in found), None)

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [expression.evaluate(self.expression, arrays)]

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [span if axis in value.axes and value.shape[value.axes.index(axis)] > 1 else None for value in inputs]

    def emit(self, kernel: Any) -> None:
        kernel.elementwise(self.expression)

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        known: dict[Expression, str] = {}
        for part in expression.parts(self.expression):
            if part.function == "input":
                known[part] = inputs[part.arguments[0]]
            elif part.function == "constant":
                known[part] = export.constant(np.float32(part.arguments[0]))
            else:
                known[part] = _onnx_part(export, part.function, [known[argument] for argument in part.arguments])
        export.node("Identity", [known[self.expression]], outputs)


ONNX = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "relu": "Relu",
    "erf": "Erf",
    "maximum": "Max",
    "minimum": "Min",
    "power": "Pow",
}
"""Function of an expression -> operator of ONNX."""


def _onnx_part(export: Any, function: str, arguments: list[str]) -> str:
    if function == "greater":
        return export.node("Where", [export.node("Greater", arguments[:2]), *arguments[2:]])
    return export.node(ONNX[function], arguments)


def total(count: int) -> Elementwise:
    """Return the sum of `count` values."""
    made = symbol(0)
    for number in range(1, count):
        made = made + symbol(number)
    return Elementwise(made, "accumulate")
