"""Make the model that a configuration describes: a stack of layers, or a graph.

A stack is what the list of layers has been: each takes the one before it, of the kinds in `layers.KINDS` and with their
fields. Whatever goes beyond that is a graph: names, inputs, blocks, other kinds and fields, losses of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Protocol

from adam_mpi.base.errors import UserError
from adam_mpi.model import layers
from adam_mpi.model.builder import GraphBuilder
from adam_mpi.model.frontends import graph_json, layer_list
from adam_mpi.model.graph import Graph, Loss, Value
from adam_mpi.model.graph_layers import GraphLayers, check_fed
from adam_mpi.model.input_format import BYTES, InputFormat
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.ops import external, fields
from adam_mpi.model.ops.cross_entropy import Correct, SoftmaxCrossEntropy
from adam_mpi.model.ops.levels import Levels
from adam_mpi.model.ops.operator import REGISTRY, Operator
from adam_mpi.model.passes.simplify import simplify

DEFAULT_LOSS = {"kind": "softmax_cross_entropy"}
TARGET = "target"


class ModelSection(Protocol):
    """The section `model` of a configuration."""

    layers: list
    losses: list
    graph: str
    operators: str


def infer(
    model: ModelSection, shape: Sequence[int], classes: int, form: InputFormat, target: Value | None = None
) -> tuple[LayerShape, ...]:
    """Return the layers of `model` for samples of `shape` in the format `form`, which belong to `classes` classes.

    `target` is what the data set has as target. Raises UserError for a model that does not fit together, or the data.
    """
    if model.operators:
        external.load(model.operators)
    if not model.graph and is_stack(model):
        channels, rows, columns = shape
        return layers.infer(layers.parse(model.layers), (channels, rows, columns), classes)
    made = GraphLayers(graph_json.read(model.graph) if model.graph else build(model, shape, classes, form))
    check_fed(made, Value("input", tuple(shape), _dtype(form)), target)
    return made


def _dtype(form: InputFormat) -> str:
    """Return the type of the values that arrive in the format `form`."""
    return "byte" if form.bytes else "integer" if form.dtype.startswith("int") else "float"


def _levels(form: InputFormat) -> Levels:
    """Return the levels of the bytes of `form`."""
    if not form.mean:
        return Levels()
    top = BYTES - 1
    return Levels(tuple(m / top for m in form.mean), tuple(1 / (f * top) for f in form.factor))


def is_stack(model: ModelSection) -> bool:
    """Return whether `model` is a stack, or a list that is wrong in a way that a stack's reader explains."""
    if model.losses or model.graph:
        return False
    return not isinstance(model.layers, list | tuple) or not any(_beyond(entry) for entry in model.layers)


def _beyond(entry: object) -> bool:
    """Return whether `entry` is something that only a graph has."""
    if isinstance(entry, str):
        return entry not in layers.FUNCTIONS and entry in REGISTRY
    if not isinstance(entry, dict):
        return False
    kind = entry.get("kind")
    if {"name", "inputs", "shared", "repeat", "layers"} & set(entry):
        return True
    if not isinstance(kind, str) or kind not in layers.KINDS:
        return kind in REGISTRY
    if kind not in REGISTRY:
        return False
    known = {field.name for field in dataclass_fields(layers.KINDS[kind])}
    allowed = set(fields.settable(REGISTRY[kind]))
    lists = any(isinstance(value, list | tuple) for value in entry.values())
    return lists or any(name in allowed - known for name in entry)


def build(model: ModelSection, shape: Sequence[int], classes: int, form: InputFormat) -> Graph:
    """Return the graph of the layers and losses of `model`."""
    tape = GraphBuilder()
    fed = tape.input(Value("input", tuple(shape), _dtype(form)))
    first = tape.add(_levels(form), fed) if form.bytes else fed
    scope = layer_list.Scope("", {"input": first})
    last = layer_list.build(tape, layer_list.read(model.layers), first, scope)
    outputs = [last.name]
    losses = []
    sums: list[tuple[str, str]] = []
    for number, entry in enumerate(model.losses or [DEFAULT_LOSS]):
        term = _term(tape, scope, last, f"model.losses[{number}]", entry)
        losses.append(term.loss)
        if isinstance(term.op, SoftmaxCrossEntropy) and not sums:
            _check_classes(term.scores, classes)
            sums.append(("correct", tape.add(Correct(ignore=term.op.ignore), term.scores, tape.values[TARGET]).name))
            outputs = [tape.values[f"{term.loss.value}:1"].name] if term.scores is last else outputs
    return simplify(tape.graph(outputs, losses, sums))


@dataclass(frozen=True)
class Term:
    """A loss of the objective, and what it is computed of."""

    loss: Loss
    op: Operator
    scores: Value


def _term(tape: GraphBuilder, scope: layer_list.Scope, last: Value, key: str, entry: object) -> Term:
    """Add the loss that `entry` describes: a kind, or a table with kind, weight, input, and fields of the kind."""
    given = {"kind": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or given.get("kind") not in REGISTRY:
        raise UserError(f"{key} is {entry!r}; give the kind of a loss, or a table with a kind")
    kind = str(given["kind"])
    weight = given.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise UserError(f"{key}.weight is {weight!r}; give a number")
    scores = last if "input" not in given else scope.find(str(given["input"]))
    if scores is None:
        raise UserError(f"{key}.input is {given['input']!r}; there are {', '.join(scope.values)}")
    own = {name: value for name, value in given.items() if name not in ("kind", "weight", "input")}
    op = fields.make(REGISTRY[kind], key, kind, own)
    inputs = [scores] if op.data_inputs == 1 else [scores, _target(tape, op, scores)]
    made = tape.layer(op, inputs)[0]
    return Term(Loss(made.name, float(weight)), op, scores)


def _target(tape: GraphBuilder, op: Operator, scores: Value) -> Value:
    """Return the target of a loss: classes for cross-entropy, else floats in the shape of what it is compared with."""
    if TARGET in tape.values:
        return tape.values[TARGET]
    if isinstance(op, SoftmaxCrossEntropy):
        return tape.input(Value(TARGET, scores.shape[:-1], "integer"))
    return tape.input(Value(TARGET, scores.shape))


def _check_classes(scores: Value, classes: int) -> None:
    """Raise UserError unless there is one score per class."""
    if scores.shape[-1] != classes:
        raise UserError(
            f"{scores} has {scores.shape[-1]} scores for {classes} classes; let the last layer be dense with {classes}"
            " units"
        )
