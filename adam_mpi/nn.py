"""Build a model by calling functions: each returns a value that others take.

    from adam_mpi import nn

    x = nn.input((3, 32, 32), "byte")
    y = nn.relu(nn.conv(x, 64, 3, pad=1))
    z = nn.dense(nn.global_avg_pool(nn.add(y, nn.conv(y, 64, 3, pad=1))), 10)
    graph = nn.graph(z, nn.softmax_cross_entropy(z, nn.target(())))

All kinds of layers that a configuration knows are functions here, with the same fields. `nn.Layer("conv", channels=64,
kernel=3)` is a layer to call: calling it twice shares its parameters.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.model import ops  # noqa: F401
from adam_mpi.model.builder import GraphBuilder
from adam_mpi.model.expression import Expression, apply, substitute, symbol, trace
from adam_mpi.model.graph import Graph, Loss, Value
from adam_mpi.model.ops import fields
from adam_mpi.model.ops.cross_entropy import Correct, SoftmaxCrossEntropy
from adam_mpi.model.ops.elementwise import Elementwise
from adam_mpi.model.ops.levels import Levels
from adam_mpi.model.ops.operator import REGISTRY, Operator
from adam_mpi.model.passes.simplify import simplify

_COUNTER = itertools.count()


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value of a model under construction: what layer makes it of which others, as output `number`.

    Outputs of one call of a layer have the same `order`.
    """

    layer: "Layer | None"
    inputs: "tuple[Tensor, ...]" = ()
    number: int = 0
    value: Value | None = None
    """The input of the model that it is."""
    name: str = ""
    order: int = field(default_factory=lambda: next(_COUNTER))

    def __add__(self, other: Any) -> "Tensor":
        return _binary("add", self, other)

    def __radd__(self, other: Any) -> "Tensor":
        return _binary("add", other, self)

    def __sub__(self, other: Any) -> "Tensor":
        return _binary("sub", self, other)

    def __rsub__(self, other: Any) -> "Tensor":
        return _binary("sub", other, self)

    def __mul__(self, other: Any) -> "Tensor":
        return _binary("mul", self, other)

    def __rmul__(self, other: Any) -> "Tensor":
        return _binary("mul", other, self)

    def __truediv__(self, other: Any) -> "Tensor":
        return _binary("div", self, other)

    def __neg__(self) -> "Tensor":
        return _binary("sub", 0.0, self)


class Layer:
    """An operator to call on values; its calls share one set of parameters.

    Parameters
    ----------
    kind : str
        Kind of the layer, as in a configuration, like "conv".
    name : str
        Name of the node; numbered after the kind by default.
    values
        Fields of the layer.
    """

    def __init__(self, kind: str, name: str = "", **values: object) -> None:
        if kind not in REGISTRY:
            raise UserError(f"there is no layer {kind!r}; there are {', '.join(REGISTRY)}")
        self.op: Operator = fields.make(REGISTRY[kind], f"nn.{kind}", kind, values)
        self.name = name

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what the layer makes of `inputs`."""
        for given in inputs:
            if not isinstance(given, Tensor):
                raise UserError(f"nn.{self.op.kind} takes values of a model, not {type(given).__name__}")
        return Tensor(self, inputs, name=self.name)

    @classmethod
    def of(cls, op: Operator, name: str = "") -> "Layer":
        """Return a layer that applies `op`."""
        made = cls.__new__(cls)
        made.op = op
        made.name = name
        return made


def input(
    shape: Sequence[int],
    dtype: str = "float",
    name: str = "input",
    axes: Sequence[str] = (),
    mean: Sequence[float] = (0.0,),
    deviation: Sequence[float] = (1.0,),
) -> Tensor:
    """Return an input of the model: samples of `shape`, of type float, integer or byte.

    Bytes become (byte / 255 - mean) / deviation, with one number per channel or one for all.
    """
    value = Value(name, tuple(shape), dtype, tuple(axes))
    made = Tensor(None, value=value, name=name)
    if dtype != "byte":
        return made
    return Layer.of(Levels(tuple(map(float, mean)), tuple(map(float, deviation))))(made)


def target(shape: Sequence[int] = (), dtype: str = "integer", name: str = "target") -> Tensor:
    """Return an input that only losses and metrics read: classes by default, or vectors of floats."""
    return Tensor(None, value=Value(name, tuple(shape), dtype), name=name)


def elementwise(function: Callable, *inputs: Tensor, name: str = "") -> Tensor:
    """Apply `function` to each element of `inputs`; it is called once, with symbols, and differentiated as such.

    Examples
    --------
    >>> from adam_mpi import nn
    >>> x = nn.input((4,))
    >>> gated = nn.elementwise(lambda a, b: a * nn.tanh(b), x, nn.dense(x, 4))
    """
    return Layer.of(Elementwise(trace(function, len(inputs))), name)(*inputs)


def split(x: Tensor, parts: int | Sequence[int], axis: int = 0, name: str = "") -> list[Tensor]:
    """Return the parts of `x` along an `axis`: so many of equal size, or of the sizes in that list."""
    count = parts if isinstance(parts, int) else len(parts)
    first = Layer("split", name, parts=parts, axis=axis)(x)
    return [replace(first, number=number) for number in range(count)]


def maximum(x: Any, y: Any) -> Any:
    """Return the larger one of x and y."""
    return _binary("maximum", x, y)


def minimum(x: Any, y: Any) -> Any:
    """Return the smaller one of x and y."""
    return _binary("minimum", x, y)


def where(a: Any, b: Any, yes: Any, no: Any) -> Expression:
    """Return, within an element-wise function, `yes` where a is greater than b, and `no` elsewhere."""
    return apply("greater", a, b, yes, no)


def _binary(function: str, x: Any, y: Any) -> Any:
    if isinstance(x, Expression) or isinstance(y, Expression):
        return apply(function, x, y)
    label = {"mul": "multiply", "sub": "subtract", "div": "divide"}.get(function, function)
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return Layer.of(Elementwise(trace(lambda a, b: apply(function, a, b), 2), label))(x, y)
    if isinstance(x, Tensor):
        return Layer.of(Elementwise(trace(lambda a: apply(function, a, y), 1), label))(x)
    return Layer.of(Elementwise(trace(lambda b: apply(function, x, b), 1), label))(y)


def graph(
    outputs: Tensor | Sequence[Tensor],
    losses: Tensor | Sequence[Tensor | tuple[Tensor, float]] = (),
    sums: Mapping[str, Tensor] | None = None,
) -> Graph:
    """Return the graph that computes `outputs`, `losses`, and the metrics `sums`, which are added up over a batch.

    Parameters
    ----------
    outputs : Tensor or sequence of Tensor
        What predictions are.
    losses : Tensor or sequence of Tensor or of (Tensor, weight)
        What training makes smaller: numbers per sample.
    sums : mapping of str to Tensor
        Numbers per sample that are reported. Without "correct", the first softmax cross-entropy adds it: whether the
        class is right.

    Returns
    -------
    Graph
        Verified; nodes in the order in which the functions were called, parameters in the order of their first use.
    """
    wanted = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    terms = [losses] if isinstance(losses, Tensor) else list(losses)
    weighed = [term if isinstance(term, tuple) else (term, 1.0) for term in terms]
    named = {**_correct_sum([tensor for tensor, _ in weighed]), **(sums or {})}
    builder = _Builder()
    reached = _reached([*wanted, *(tensor for tensor, _ in weighed), *named.values()])
    for tensor in sorted(reached, key=lambda tensor: tensor.order):
        builder.place(tensor)
    return simplify(
        builder.tape.graph(
            outputs=[builder.values[tensor].name for tensor in wanted],
            losses=[Loss(builder.values[tensor].name, weight) for tensor, weight in weighed],
            sums=[(name, builder.values[tensor].name) for name, tensor in named.items()],
        )
    )


def _correct_sum(losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the sum "correct" of the first softmax cross-entropy among `losses`; empty if there is none."""
    for loss in losses:
        if loss.layer is not None and isinstance(loss.layer.op, SoftmaxCrossEntropy):
            scores, target = loss.inputs[:2]
            return {"correct": Layer.of(Correct(ignore=loss.layer.op.ignore))(scores, target)}
    return {}


def _reached(tensors: Sequence[Tensor]) -> set[Tensor]:
    found: set[Tensor] = set()
    open_ends = list(tensors)
    while open_ends:
        tensor = open_ends.pop()
        if tensor not in found:
            found.add(tensor)
            open_ends += tensor.inputs
    return found


class _Builder:
    """Adds tensors to a graph in the order of their making."""

    def __init__(self) -> None:
        self.tape = GraphBuilder()
        self.values: dict[Tensor, Value] = {}
        self.parameters: dict[Layer, list[str]] = {}
        self.calls: dict[int, tuple[Value, ...]] = {}
        """Place in the order of calls -> all outputs."""

    def place(self, tensor: Tensor) -> None:
        """Add the input or node that makes `tensor`."""
        if tensor.layer is None:
            assert tensor.value is not None
            self.values[tensor] = self.tape.input(tensor.value)
            return
        if tensor.order not in self.calls:
            self.calls[tensor.order] = self._call(tensor.layer, [self.values[given] for given in tensor.inputs])
        self.values[tensor] = self.calls[tensor.order][tensor.number]

    def _call(self, layer: Layer, inputs: Sequence[Value]) -> tuple[Value, ...]:
        """Add the node of `layer` for `inputs`; return its outputs."""
        shared = self.parameters.get(layer)
        before = set(self.tape.parameters)
        name = "" if shared is not None and layer.name else layer.name
        made = self.tape.layer(layer.op, inputs, name, shared)
        self.parameters.setdefault(layer, [name for name in self.tape.parameters if name not in before])
        return made


def __getattr__(kind: str) -> Callable[..., Any]:
    """Return the function that adds a layer of `kind`."""
    if kind not in REGISTRY:
        raise AttributeError(f"module 'adam_mpi.nn' has no attribute {kind!r}")
    operator = REGISTRY[kind]
    names = list(fields.settable(operator))

    def function(*arguments: Any, name: str = "", **values: Any) -> Any:
        if arguments and isinstance(arguments[0], Expression):
            return _on_symbols(operator, arguments)
        tensors = [given for given in arguments if isinstance(given, Tensor)]
        positional = dict(zip(names, arguments[len(tensors) :], strict=False))
        return Layer(kind, name, **positional, **values)(*tensors)

    function.__name__ = kind
    function.__doc__ = operator.__doc__
    return function


def _on_symbols(operator: type[Operator], arguments: Sequence[Any]) -> Expression:
    """Return the expression of an element-wise operator whose inputs are expressions."""
    bound = operator().bound("", [Value("", ())] * len(arguments))
    if not isinstance(bound, Elementwise):
        raise UserError(f"nn.{operator.kind} is not element-wise; apply it outside the function")
    return substitute(bound.expression, {symbol(number): given for number, given in enumerate(arguments)})
