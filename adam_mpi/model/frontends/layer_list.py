"""Read a graph from the list of layers in a configuration.

Each entry is a kind, like "relu", or a table with a `kind` and its fields. It takes the value of the entry before it,
or those that `inputs` names: earlier entries, or inputs of the model. `name` names it; `shared` names an earlier entry
whose parameters it uses. An entry with `repeat` and `layers` stands for its layers, that many times; among them
`input` is what the block takes, and names are known in their own repetition only, outside as `BLOCK1.NAME`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from adam_mpi.base.errors import UserError
from adam_mpi.model import ops  # noqa: F401
from adam_mpi.model.builder import GraphBuilder
from adam_mpi.model.graph import Value
from adam_mpi.model.ops import fields
from adam_mpi.model.ops.operator import REGISTRY, Operator

COMMON = ("kind", "name", "inputs", "shared")
"""Keys that every layer may have."""
BLOCK = ("repeat", "layers", "name")


@dataclass(frozen=True)
class Entry:
    """A layer in the list: its place in the configuration, what it is, and the names of what it takes."""

    key: str
    op: Operator
    name: str
    inputs: tuple[str, ...]
    shared: str


@dataclass(frozen=True)
class Block:
    """Layers that are repeated `count` times; their names begin with `name` and the number of the repetition."""

    key: str
    name: str
    count: int
    layers: "tuple[Entry | Block, ...]"


def read(entries: object, key: str = "model.layers") -> tuple[Entry | Block, ...]:
    """Return the entries of a list; raise UserError for one that is wrong, with its place in the configuration."""
    if not isinstance(entries, list | tuple):
        raise UserError(f"{key} is {entries!r}; give a list of layers")
    return tuple(_read(f"{key}[{index}]", index, given) for index, given in enumerate(entries))


def _read(key: str, index: int, given: object) -> Entry | Block:
    if isinstance(given, str):
        given = {"kind": given}
    if not isinstance(given, dict):
        raise UserError(f"{key} is {given!r}; give the kind of a layer, or a table with a kind")
    if "repeat" in given or "layers" in given:
        return _block(key, index, given)
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in REGISTRY:
        shown = repr(kind) if "kind" in given else "missing"
        raise UserError(f"{key}.kind is {shown}; allowed are {', '.join(REGISTRY)}")
    own = {name: value for name, value in given.items() if name not in COMMON}
    op = fields.make(REGISTRY[kind], key, kind, own)
    inputs = given.get("inputs", [])
    if not isinstance(inputs, list | tuple) or not all(isinstance(name, str) for name in inputs):
        raise UserError(f"{key}.inputs is {inputs!r}; give a list of names of layers or inputs")
    return Entry(key, op, _name(key, "name", given), tuple(inputs), str(given.get("shared", "")))


def _name(key: str, part: str, given: dict) -> str:
    value = given.get(part, "")
    if not isinstance(value, str) or set(value) & set("/:. "):
        raise UserError(f"{key}.{part} is {value!r}; give a name without spaces, dots, colons and slashes")
    return value


def _block(key: str, index: int, given: dict) -> Block:
    for name in given:
        if name not in BLOCK:
            raise UserError(f"{key}.{name} is not known; a block has {', '.join(BLOCK)}")
    count = given.get("repeat", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(f"{key}.repeat is {count!r}; give a whole number, 1 or more")
    layers = read(given.get("layers"), f"{key}.layers")
    if not layers:
        raise UserError(f"{key}.layers is empty; give the layers of the block")
    return Block(key, _name(key, "name", given) or f"block{index}_", count, layers)


@dataclass
class Scope:
    """Names that entries may take: own ones, then those of the list around; `prefix` precedes names in the graph."""

    prefix: str
    values: dict[str, Value]
    outer: "Scope | None" = None

    def find(self, name: str) -> Value | None:
        """Return the value `name`, or None."""
        return self.values.get(name) or (self.outer.find(name) if self.outer else None)


def build(tape: GraphBuilder, entries: Sequence[Entry | Block], value: Value, scope: Scope) -> Value:
    """Add the layers to `tape`, beginning with `value`, and to the names in `scope`; return the value of the last one.

    Raises UserError for a layer that takes what no layer before it makes.
    """
    for entry in entries:
        if isinstance(entry, Block):
            value = _repeat(tape, entry, value, scope)
        else:
            value = _add(tape, entry, value, scope)
    tape.prefix = ""
    return value


def _repeat(tape: GraphBuilder, block: Block, value: Value, scope: Scope) -> Value:
    for number in range(1, block.count + 1):
        stem = f"{block.name}{number}"
        inner = Scope(f"{scope.prefix}{stem}.", {"input": value}, scope)
        value = build(tape, block.layers, value, inner)
        scope.values |= {f"{stem}.{name}": made for name, made in inner.values.items() if name != "input"}
        scope.values[stem] = value
    return value


def _add(tape: GraphBuilder, entry: Entry, before: Value, scope: Scope) -> Value:
    inputs = [_taken(entry, name, scope) for name in entry.inputs] or [before]
    shared = None
    if entry.shared:
        owner = _taken(entry, entry.shared, scope)
        shared = [name for name in tape.parameters if name.startswith(f"{owner.name}/")]
    tape.prefix = scope.prefix
    outputs = tape.layer(entry.op, inputs, entry.name and scope.prefix + entry.name, shared)
    for value in outputs:
        scope.values[value.name.removeprefix(scope.prefix)] = value
    return outputs[0]


def _taken(entry: Entry, name: str, scope: Scope) -> Value:
    found = scope.find(name)
    if found is None:
        allowed = ", ".join(scope.values)
        raise UserError(
            f"{entry.key} ({entry.name or entry.op.kind}) takes {name!r}, which is no input and no layer before it "
            f"(layers cannot take each other in a cycle); there are {allowed}"
        )
    return found
