"""Define what an operator is: a frozen dataclass whose methods are its rules; and the registry of kinds.

An operator of its own is one file with one class:

    @register("scale")
    @dataclass(frozen=True)
    class Scale(Operator):
        factor: float = number(default=1.0)

        def outputs(self, inputs): ...       # shape rule, needed always
        def reference(self, run, *arrays): ...   # numpy, batch first: needed always
        def gradient(self, tape, inputs, outputs, errors): ...   # to train through it
        def emit(self, kernel): ...          # generated engine
        def needs(self, axis, span, inputs): ...     # to compute it in strips
        def onnx(self, export, inputs, outputs): ...     # to export it

An operator that can be written with others is a `Composite` with a `build` rule and nothing else.

A gradient rule adds nodes to the graph, with operators that have rules of their own; there is no other way back. A rule
that is missing raises `MissingRule`, which names the operator and the rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.model.graph import Node, Parameter, Value, shape_text

if TYPE_CHECKING:
    from adam_mpi.model.builder import GraphBuilder

Span = tuple[int, int]


class MissingRule(UserError):
    """An operator lacks a rule that is needed."""


@dataclass(frozen=True)
class Run:
    """Say how a reference rule is to compute: in training or not, and with which random key per sample."""

    training: bool = False
    keys: np.ndarray | None = None
    """64 bits per sample, a function of seed, epoch and sample."""
    dtype: np.dtype = np.dtype(np.float32)
    """The precision."""


@dataclass(frozen=True)
class Operator:
    """An operator without rules; kinds of operators override the methods that apply to them."""

    kind: ClassVar[str] = ""
    """The word for it in a configuration."""
    data_inputs: ClassVar[int | None] = 1
    """How many values it takes, apart from parameters; None: any number."""
    dtypes: ClassVar[tuple[str, ...]] = ("float",)
    """Types that all inputs may have; empty: the shape rule checks them."""
    alias: ClassVar[bool] = False
    """Whether the output is the input, seen in another shape: nothing is computed."""
    whole_batch: ClassVar[bool] = False
    """Whether its kernel needs all samples that go through the network together, not one block after the other."""

    def stem(self) -> str:
        """Return what its nodes are called where they are given no name; a number follows."""
        return self.kind or type(self).__name__.lower()

    def parameters(self, inputs: Sequence[Value]) -> tuple[Parameter, ...]:
        """Return the parameters it has for these data inputs; names are those of the parts: weight, bias."""
        return ()

    def bound(self, name: str, inputs: Sequence[Value]) -> "Operator":
        """Return the operator as node `name` has it for its `inputs`.

        Operators that draw random numbers are keyed by that name; those that only name an expression become it.
        """
        return self

    def adapted(self, tape: "GraphBuilder", inputs: Sequence[Value]) -> Sequence[Value]:
        """Return the data inputs as the operator takes them, by nodes that front ends add before its own."""
        return inputs

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        """Return shape, type and axes of the outputs, without names; raise ValueError for inputs that do not fit.

        `inputs` are data, then parameters.
        """
        self.missing("shape rule")

    def gradient(
        self, tape: "GraphBuilder", inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        """Return the error of each input, None where it has none, made of `errors` by nodes that are added to `tape`.

        An error is None where nothing depends on that output. What is not used in the end is dropped.
        """
        self.missing("gradient rule")

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        """Return the outputs, computed by numpy or numba in the precision of the inputs; samples come first."""
        self.missing("reference kernel")

    def emit(self, kernel: Any) -> None:
        """Emit the body of the kernel that computes the outputs of one block of samples."""
        self.missing("emitted kernel")

    def lower(self, lowering: Any, node: Node) -> None:
        """Add the calls that compute `node` to the generated program: that of the kernel which `emit` writes.

        Operators that take several calls, or kernels of their own, override it.
        """
        lowering.call_kernel(node)

    def together(self) -> int:
        """Return how many neighboring samples have to go through the network in one pass, counted from the first."""
        return 1

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        """Return what part along `axis` of each input is needed for outputs in `span`; None: all of it."""
        self.missing("partition rule")

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Add the ONNX nodes that compute the outputs."""
        self.missing("ONNX rule")

    def missing(self, rule: str) -> NoReturn:
        """Raise MissingRule for `rule`."""
        raise MissingRule(f"operator {self.kind or type(self).__name__} has no {rule}")

    def infer(self, name: str, inputs: Sequence[Value]) -> Sequence[Value]:
        """Return the outputs of node `name`; raise UserError that names the node, its inputs and what is wrong."""
        try:
            for value in inputs:
                if self.dtypes and value.dtype not in self.dtypes:
                    raise ValueError(
                        f"{value.name} is of type {value.dtype}; only {' and '.join(self.dtypes)} is taken"
                    )
            return self.outputs(inputs)
        except ValueError as error:
            given = ", ".join(f"{value.name} {shape_text(value.shape)}" for value in inputs if value.batched)
            raise UserError(f"node {name} ({self.kind or type(self).__name__}) of {given}: {error}") from None


@dataclass(frozen=True)
class Composite(Operator):
    """An operator that is made of others: it has `parameters` and `build`, and needs no other rule."""

    def build(self, tape: "GraphBuilder", inputs: Sequence[Value], parameters: Sequence[Value]) -> Sequence[Value]:
        """Add the nodes that compute the operator of the data `inputs` to `tape`; return its outputs.

        Nodes are named after the operator's own name; the last one has exactly that name. `tape.call(op, inputs,
        parameters)` adds a node that reads parameters.
        """
        self.missing("build rule")


Kind = TypeVar("Kind", bound=type[Operator])
REGISTRY: dict[str, type[Operator]] = {}
"""Kind -> operator, for all that users can name."""


def register(kind: str) -> Callable[[Kind], Kind]:
    """Return a decorator that makes an operator known as `kind` to all front ends."""

    def add(operator: Kind) -> Kind:
        if kind in REGISTRY:
            raise UserError(f"operator {kind!r} is registered twice; give the second one another kind")
        operator.kind = kind
        REGISTRY[kind] = operator
        return operator

    return add
