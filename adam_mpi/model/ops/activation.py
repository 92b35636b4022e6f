"""Element-wise operators that have a name: activations, arithmetic on values, and functions of the user's own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from adam_mpi.model import expression
from adam_mpi.model.expression import Expression, apply, symbol, trace
from adam_mpi.model.graph import Value
from adam_mpi.model.ops.elementwise import Elementwise
from adam_mpi.model.ops.fields import choice, number
from adam_mpi.model.ops.operator import Operator, register


@dataclass(frozen=True)
class Named(Operator):
    """An element-wise operator that a configuration names; its nodes are `Elementwise`."""

    def expression(self) -> Expression:
        """Return the expression of the inputs."""
        self.missing("expression")

    def bound(self, name: str, inputs: Sequence[Value]) -> Operator:
        return Elementwise(self.expression(), self.kind)


def define(kind: str, function: Callable, inputs: int = 1) -> type[Operator]:
    """Register the element-wise operator `kind`, without fields: `function` of so many `inputs`."""
    made = trace(function, inputs)

    def own(self: Named) -> Expression:
        return made

    body: dict[str, Any] = {"expression": own, "data_inputs": inputs, "__doc__": f"Apply {kind} to each element."}
    return register(kind)(dataclass(frozen=True)(type(kind.title().replace("_", ""), (Named,), body)))


def relu(x: Any) -> Expression:
    """Return max(x, 0)."""
    return apply("relu", x)


def sigmoid(x: Any) -> Expression:
    """Return 1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


def tanh(x: Any) -> Expression:
    """Return the hyperbolic tangent of x."""
    return apply("tanh", x)


define("relu", relu)
define("tanh", tanh)
define("sigmoid", sigmoid)
define("silu", lambda x: x * sigmoid(x))
define("exp", expression.exp)
define("log", lambda x: apply("log", x))
define("sqrt", lambda x: apply("sqrt", x))
define("absolute", lambda x: apply("greater", x, 0.0, x, 0.0 - x))
define("subtract", lambda x, y: x - y, 2)
define("divide", lambda x, y: x / y, 2)


@register("gelu")
@dataclass(frozen=True)
class Gelu(Named):
    """Apply x times the normal distribution function of x: by the error function, or nearly, by tanh."""

    form: str = choice("erf", "tanh", default="erf")

    def expression(self) -> Expression:
        x = symbol(0)
        if self.form == "erf":
            return 0.5 * x * (1.0 + apply("erf", x * (1 / math.sqrt(2))))
        return 0.5 * x * (1.0 + tanh((x + 0.044715 * (x * x * x)) * math.sqrt(2 / math.pi)))


@register("leaky_relu")
@dataclass(frozen=True)
class LeakyRelu(Named):
    """Apply x above zero, and `slope` times x below."""

    slope: float = number(default=0.01)

    def expression(self) -> Expression:
        x = symbol(0)
        return apply("greater", x, 0.0, x, x * self.slope)


@register("power")
@dataclass(frozen=True)
class Power(Named):
    """Raise to a constant power."""

    exponent: float = number()

    def expression(self) -> Expression:
        return expression.power(symbol(0), self.exponent)


@register("scale")
@dataclass(frozen=True)
class Scale(Named):
    """Multiply by a constant `factor`, and add a constant `offset`."""

    factor: float = number(default=1.0)
    offset: float = number(default=0.0)

    def expression(self) -> Expression:
        return symbol(0) * float(self.factor) + float(self.offset)


@dataclass(frozen=True)
class Arithmetic(Operator):
    """Combine any number of inputs, element by element, by one function of two."""

    data_inputs: ClassVar[None] = None
    function: ClassVar[str] = ""

    def bound(self, name: str, inputs: Sequence[Value]) -> Operator:
        made = symbol(0)
        for place in range(1, len(inputs)):
            made = apply(self.function, made, symbol(place))
        return Elementwise(made, self.kind)


@register("add")
@dataclass(frozen=True)
class Add(Arithmetic):
    """Add values up."""

    function: ClassVar[str] = "add"


@register("multiply")
@dataclass(frozen=True)
class Multiply(Arithmetic):
    """Multiply values with each other."""

    function: ClassVar[str] = "mul"


@register("maximum")
@dataclass(frozen=True)
class Maximum(Arithmetic):
    """Take the largest of several values."""

    function: ClassVar[str] = "maximum"


@register("minimum")
@dataclass(frozen=True)
class Minimum(Arithmetic):
    """Take the smallest of several values."""

    function: ClassVar[str] = "minimum"
