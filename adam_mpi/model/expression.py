"""Write functions of single numbers as expressions, differentiate them symbolically, and turn them into code. Pure.

An expression is built by arithmetic on symbols: `trace(lambda x, y: x * tanh(y), 2)`. The numpy reference and the
emitted kernels of all element-wise operators are made from it, and so is the expression of the gradient.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from adam_mpi.base.errors import UserError


@dataclass(frozen=True)
class Expression:
    """Apply `function` (one of FUNCTIONS, "input" or "constant") to `arguments`."""

    function: str
    arguments: tuple[Any, ...]

    def __post_init__(self) -> None:
        # Kept: an expression is compared often, and its parts may be many.
        object.__setattr__(self, "_hash", hash((self.function, self.arguments)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __add__(self, other: Any) -> "Expression":
        return apply("add", self, other)

    def __radd__(self, other: Any) -> "Expression":
        return apply("add", other, self)

    def __sub__(self, other: Any) -> "Expression":
        return apply("sub", self, other)

    def __rsub__(self, other: Any) -> "Expression":
        return apply("sub", other, self)

    def __mul__(self, other: Any) -> "Expression":
        return apply("mul", self, other)

    def __rmul__(self, other: Any) -> "Expression":
        return apply("mul", other, self)

    def __truediv__(self, other: Any) -> "Expression":
        return apply("div", self, other)

    def __rtruediv__(self, other: Any) -> "Expression":
        return apply("div", other, self)

    def __pow__(self, exponent: float) -> "Expression":
        return power(self, exponent)

    def __neg__(self) -> "Expression":
        return apply("sub", 0.0, self)

    def __bool__(self) -> bool:
        raise UserError(
            "an element-wise function cannot branch on its values; use nn.where(a, b, yes, no) for yes where a > b"
        )


@dataclass(frozen=True)
class Function:
    """Define a function of numbers: with numpy, as emitted source, and how an error goes back to its arguments.

    `back(error, whole, *arguments)` returns the errors of the arguments; None where there is none.
    """

    numpy: Callable
    emit: Callable[..., str]
    back: Callable[..., Sequence[Any]]


def symbol(number: int) -> Expression:
    """Return the input `number` of an element-wise function."""
    return Expression("input", (number,))


def constant(value: float) -> Expression:
    """Return the expression of a constant."""
    return Expression("constant", (float(value),))


def trace(function: Callable, inputs: int) -> Expression:
    """Return the expression that `function` computes of `inputs` symbols; raise UserError if it returns none."""
    made = function(*(symbol(number) for number in range(inputs)))
    if isinstance(made, int | float):
        made = constant(made)
    if not isinstance(made, Expression):
        raise UserError(f"an element-wise function returned {type(made).__name__}; return arithmetic on its arguments")
    return made


def value_of(expression: Expression) -> float | None:
    """Return the number that a constant is; None of anything else."""
    return expression.arguments[0] if expression.function == "constant" else None


def apply(function: str, *arguments: Any) -> Expression:
    """Return `function` of `arguments`, simplified where that changes no bits of a finite result."""
    given = tuple(a if isinstance(a, Expression) else constant(a) for a in arguments)
    numbers = [value_of(argument) for argument in given]
    if all(number is not None for number in numbers):
        return constant(float(FUNCTIONS[function].numpy(*numbers)))
    simple = _neutral(function, given, numbers)
    return Expression(function, given) if simple is None else simple


def _neutral(function: str, given: tuple[Expression, ...], numbers: list[float | None]) -> Expression | None:
    """Return what is left of a sum or product with a neutral or absorbing element."""
    if function == "add" and 0.0 in numbers:
        return given[1 - numbers.index(0.0)]
    if function == "mul" and 0.0 in numbers:
        return constant(0)
    if function == "mul" and 1.0 in numbers:
        return given[1 - numbers.index(1.0)]
    if (function, numbers[-1]) in (("sub", 0.0), ("div", 1.0)):
        return given[0]
    return None


def power(base: Any, exponent: float) -> Expression:
    """Return `base` to a constant power."""
    if isinstance(exponent, Expression):
        if value_of(exponent) is None:
            raise UserError("the exponent of a power is a constant; write exp(y * log(x)) for one that varies")
        exponent = exponent.arguments[0]
    return constant(1) if exponent == 0 else base if exponent == 1 else apply("power", base, exponent)


def _call(name: str) -> Callable[..., str]:
    return lambda *arguments: f"{name}({', '.join(arguments)})"


def _emit_power(base: str, exponent: str) -> str:
    number = float(exponent.removeprefix("splat(").removesuffix(")"))
    if number == int(number) and 1 < number <= 4:
        return "mul(" * (int(number) - 1) + base + f", {base})" * (int(number) - 1)
    if number == 0.5:
        return f"root({base})"
    if number == -1:
        return f"div(splat(1.0), {base})"
    if number == -0.5:
        return f"div(splat(1.0), root({base}))"
    return f"exponential(mul({exponent}, logarithm({base})))"


def _choose(a: Any, b: Any, yes: Any, no: Any) -> Expression:
    return apply("greater", a, b, yes, no)


# The error function as a rational polynomial times an exponential (Abramowitz and Stegun 7.1.26), error below 2e-7.
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _emit_erf(x: str) -> str:
    size = f"maximum({x}, sub(zero(), {x}))"
    t = f"div(splat(1.0), fma(splat(0.3275911), {size}, splat(1.0)))"
    series = f"splat({_ERF[4]})"
    for coefficient in reversed(_ERF[:4]):
        series = f"fma({series}, {t}, splat({coefficient}))"
    tail = f"sub(splat(1.0), mul(mul({series}, {t}), exponential(sub(zero(), mul({x}, {x})))))"
    return f"greater({x}, zero(), {tail}, sub(zero(), {tail}))"


FUNCTIONS: dict[str, Function] = {
    "add": Function(np.add, _call("add"), lambda e, w, a, b: (e, e)),
    "sub": Function(np.subtract, _call("sub"), lambda e, w, a, b: (e, 0.0 - e)),
    "mul": Function(np.multiply, _call("mul"), lambda e, w, a, b: (e * b, e * a)),
    "div": Function(np.divide, _call("div"), lambda e, w, a, b: (e / b, 0.0 - e * w / b)),
    "exp": Function(np.exp, _call("exponential"), lambda e, w, a: (e * w,)),
    "log": Function(np.log, _call("logarithm"), lambda e, w, a: (e / a,)),
    "sqrt": Function(np.sqrt, _call("root"), lambda e, w, a: (e * (0.5 / w),)),
    "tanh": Function(
        np.tanh,
        lambda x: f"sub(splat(1.0), div(splat(2.0), add(exponential(add({x}, {x})), splat(1.0))))",
        lambda e, w, a: (e * (1.0 - w * w),),
    ),
    "sigmoid": Function(
        special.expit,
        lambda x: f"div(splat(1.0), add(splat(1.0), exponential(sub(zero(), {x}))))",
        lambda e, w, a: (e * (w * (1.0 - w)),),
    ),
    "relu": Function(
        lambda x: np.maximum(x, 0), lambda x: f"maximum(zero(), {x})", lambda e, w, a: (_choose(w, 0, e, 0),)
    ),
    "erf": Function(special.erf, _emit_erf, lambda e, w, a: (e * (2 / math.sqrt(math.pi) * exp(0.0 - a * a)),)),
    "maximum": Function(np.maximum, _call("maximum"), lambda e, w, a, b: (_choose(a, b, e, 0), _choose(a, b, 0, e))),
    "minimum": Function(
        np.minimum,
        lambda a, b: f"greater({a}, {b}, {b}, {a})",
        lambda e, w, a, b: (_choose(a, b, 0, e), _choose(a, b, e, 0)),
    ),
    "greater": Function(
        lambda a, b, yes, no: np.where(np.greater(a, b), yes, no),
        _call("greater"),
        lambda e, w, a, b, yes, no: (None, None, _choose(a, b, e, 0), _choose(a, b, 0, e)),
    ),
    "power": Function(np.power, _emit_power, lambda e, w, a, n: (e * (n * power(a, n.arguments[0] - 1)), None)),
}


def exp(x: Any) -> Expression:
    """Return e to the power of x."""
    return apply("exp", x)


def _parts(expression: Expression, found: dict[Expression, None]) -> None:
    """Add all different parts of `expression` to `found`, arguments before what is made of them."""
    if expression in found:
        return
    if expression.function in FUNCTIONS:
        for argument in expression.arguments:
            _parts(argument, found)
    found[expression] = None


def parts(expression: Expression) -> list[Expression]:
    """Return all different parts of `expression`, arguments before what is made of them."""
    found: dict[Expression, None] = {}
    _parts(expression, found)
    return list(found)


def inputs_of(expression: Expression) -> list[int]:
    """Return the numbers of the inputs that `expression` reads, in ascending order."""
    return sorted(part.arguments[0] for part in parts(expression) if part.function == "input")


def substitute(expression: Expression, table: Mapping[Expression, Expression]) -> Expression:
    """Return `expression` with each part that is in `table` replaced."""
    if expression in table:
        return table[expression]
    if expression.function not in FUNCTIONS:
        return expression
    return apply(expression.function, *(substitute(argument, table) for argument in expression.arguments))


def gradient(expression: Expression, error: Expression) -> dict[int, Expression]:
    """Return the error of each input, by number, when `error` is that of the result."""
    errors: dict[Expression, Expression] = {expression: error}
    for part in reversed(parts(expression)):
        if part not in errors or part.function not in FUNCTIONS:
            continue
        back = FUNCTIONS[part.function].back(errors[part], part, *part.arguments)
        for argument, own in zip(part.arguments, back, strict=True):
            if own is not None and value_of(argument) is None:
                errors[argument] = errors[argument] + own if argument in errors else own
    return {part.arguments[0]: own for part, own in errors.items() if part.function == "input"}


def evaluate(expression: Expression, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Compute `expression` of `arrays` with numpy, in their precision."""
    known: dict[Expression, Any] = {}
    for part in parts(expression):
        if part.function == "input":
            known[part] = arrays[part.arguments[0]]
        elif part.function == "constant":
            known[part] = arrays[0].dtype.type(part.arguments[0])
        else:
            known[part] = FUNCTIONS[part.function].numpy(*(known[argument] for argument in part.arguments))
    return np.asarray(known[expression])


def emit(expression: Expression, inputs: Sequence[str]) -> tuple[list[str], str]:
    """Return statements that compute the parts of `expression` that are used twice, and the text of the whole."""
    lines, texts = emit_all([expression], inputs)
    return lines, texts[0]


def emit_all(expressions: Sequence[Expression], inputs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return statements that compute what `expressions` use twice, in all, and the text of each one."""
    found: dict[Expression, None] = {}
    for expression in expressions:
        _parts(expression, found)
    uses = Counter(expressions)
    for part in found:
        if part.function in FUNCTIONS:
            for argument in part.arguments:
                # Texts of some functions repeat their arguments.
                uses[argument] += 2 if part.function in ("erf", "power", "tanh", "minimum") else 1
    lines: list[str] = []
    known: dict[Expression, str] = {}
    for part in found:
        text = _text(part, known, inputs)
        if uses[part] > 1 and part.function in FUNCTIONS:
            lines.append(f"part{len(lines)} = {text}")
            text = f"part{len(lines) - 1}"
        known[part] = text
    return lines, [known[expression] for expression in expressions]


def _text(part: Expression, known: Mapping[Expression, str], inputs: Sequence[str]) -> str:
    if part.function == "input":
        return inputs[part.arguments[0]]
    if part.function == "constant":
        return f"splat({part.arguments[0]!r})" if part.arguments[0] else "zero()"
    return FUNCTIONS[part.function].emit(*(known[argument] for argument in part.arguments))
