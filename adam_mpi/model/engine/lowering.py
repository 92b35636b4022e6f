"""Lower a graph to calls of emitted kernels over planned buffers: node by node, in the order of the graph.

Kernels are emitted once per operator and shapes; offsets of buffers and parameters are arguments of their calls. A call
is for one block of samples or, where an operator needs all samples that go through together, for all blocks of a pass.
A buffer has room for all blocks only if it is read or written in more than one run of calls by block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from adam_mpi.model.engine import loads
from adam_mpi.model.engine.conv_choice import Choice
from adam_mpi.model.engine.kernel import Kernel, Operand
from adam_mpi.model.engine.schedule import Buffer, Call, Phase, merged
from adam_mpi.model.engine.source import Source
from adam_mpi.model.graph import Graph, Node, Value

COMMON = ("memory", "weights", "gradient", "keys", "first", "count", "training")
"""Arguments that all kernels of operators have, before the offsets of their operands."""
Place = Buffer | str


@dataclass(frozen=True)
class Item:
    """A call with its kind: by block, or for all blocks; and whether it is made in training only."""

    call: Call
    by_block: bool
    training: bool


class Lowering:
    """Collects the calls of `graph`, which has its way back already; `lanes` samples make a block."""

    def __init__(
        self, graph: Graph, lanes: int, registers: int, pass_blocks: int, choices: dict[str, Choice] | None = None
    ) -> None:
        self.graph = graph
        self.pass_blocks = pass_blocks
        """Blocks that go through the graph together."""
        self.fresh: list[tuple[int, int]] = []
        """Spans of the gradient that are overwritten by the first pass, where it is not to be added to."""
        self.lanes = lanes
        self.registers = registers
        self.source = Source()
        self.choices = dict(choices or {})
        self.items: list[Item] = []
        self.prepare: list[Call] = []
        """Calls before all others of a pass: what is computed of the weights alone."""
        self.clear: list[Call] = []
        """Calls before the way back."""
        self.finish: list[Call] = []
        """Calls after it."""
        self.later: dict[str, list[Call]] = {}
        """Node -> calls by block that are made in its place."""
        self.claimed: set[str] = set()
        """Nodes that others compute."""
        self.shared: dict[tuple, str] = {}
        """What kernels compute -> the name that they begin with, for those that several nodes share."""
        self.places: dict[str, Place] = {}
        """Value -> its buffer, or the text of its offset in weights or gradient."""
        self.arrays: dict[str, str] = {}
        """Value that is not batched -> the array it lies in."""
        self.kernels: dict[tuple, tuple[str, list[tuple[str, int]]]] = {}
        self.tables: list[np.ndarray] = []
        """Levels of bytes."""
        self.roots = self._aliases()
        """Value that is another one in another shape -> that one."""
        self._place_parameters()
        self._place_gradients()

    def lower(self) -> None:
        """Add the calls of all nodes, then those that hand out outputs and sums."""
        for value in self.graph.inputs:
            loads.add(self, value)
        for node in self.graph.nodes:
            for call in self.later.get(node.name, ()):
                self.add(call, by_block=True, training=True)
            if node.name not in self.claimed and not node.op.alias:
                node.op.lower(self, node)
        loads.add_results(self)
        prepared = [Item(call, False, False) for call in self.prepare]
        cleared = [Item(call, False, True) for call in self.clear]
        self.items = [*prepared, *cleared, *self.items, *(Item(call, False, True) for call in self.finish)]

    def _aliases(self) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for node in self.graph.nodes:
            if node.op.alias:
                own = node.inputs[0]
                found[node.outputs[0].name] = found.get(own, self.graph.values[own])
        return found

    def _place_parameters(self) -> None:
        for parameter in self.graph.parameters:
            self.places[parameter.name] = str(self.graph.offsets[parameter.name])
            self.arrays[parameter.name] = "weights"

    def _place_gradients(self) -> None:
        """Let gradients of parameters be summed up where they belong; those that others read too are copied there."""
        read = {name for node in self.graph.nodes for name in node.inputs}
        times = [value for _, value in self.graph.gradients]
        for parameter, value in self.graph.gradients:
            offset = self.graph.offsets[parameter]
            if value not in read and times.count(value) == 1:
                self.places[value] = str(offset)
                self.arrays[value] = "gradient"
                continue
            loads.emit_add(self.source)
            arguments = (self.place(self.graph.values[value]), str(offset), str(self.graph.values[value].size))
            self.finish.append(Call("add_gradient", ("memory", "gradient", *arguments)))

    def place(self, value: Value) -> Place:
        """Return where `value` lies: a new buffer, if it has no place yet."""
        value = self.roots.get(value.name, value)
        if value.name not in self.places:
            if value.batched:
                self.places[value.name] = Buffer(value.name, value.size * self.lanes)
            else:
                self.places[value.name] = Buffer(value.name, value.size, each_block=False, lasting=True)
                self.arrays[value.name] = "memory"
        return self.places[value.name]

    def overwrites(self, start: int, size: int) -> bool:
        """Return whether one node alone computes the gradient of `size` parameters from `start` on, and note it."""
        places = [self.graph.offsets[parameter] for parameter, _ in self.graph.gradients]
        alone = places.count(start) == 1
        if alone:
            self.fresh.append((start, start + size))
        return alone

    def buffer(self, value: Value) -> Buffer:
        """Return the buffer of `value`, which is batched."""
        place = self.place(value)
        assert isinstance(place, Buffer)
        return place

    def training_only(self, node: Node) -> bool:
        """Return whether `node` belongs to the way back."""
        return node.name not in self.graph.evaluated

    def add(self, call: Call, by_block: bool, training: bool) -> None:
        """Add a call behind those that there are."""
        self.items.append(Item(call, by_block, training))

    def call_kernel(self, node: Node) -> None:
        """Add the call of the kernel that the operator of `node` emits."""
        values = [self.graph.values[name] for name in node.inputs]
        places = [self.place(value) for value in (*values, *node.outputs)]
        batched = any(value.batched for value in (*values, *node.outputs))
        for value in node.outputs:
            if batched and not value.batched and self.arrays[value.name] == "memory":
                self._clear(value)
        name, scratches = self._kernel(node, values)
        buffers = [Buffer(f"{node.name}/{scratch}", size, each_block=False) for scratch, size in scratches]
        by_block = batched and not node.op.whole_batch
        blocks = ("blocks",) if node.op.whole_batch else ()
        call = Call(name, (*COMMON, *blocks, *places, *buffers))
        self.add(call, by_block, self.training_only(node))

    def _clear(self, value: Value) -> None:
        """Clear a sum over samples that lies in memory, at the start of a pass."""
        loads.emit_clear(self.source)
        call = Call("clear_floats", ("memory", self.place(value), str(value.size)))
        self.prepare.append(call)

    def _kernel(self, node: Node, values: Sequence[Value]) -> tuple[str, list[tuple[str, int]]]:
        """Return the name of the kernel of `node`, emitted if it is the first of its kind, and its scratch buffers."""
        inputs = [self._operand(value, f"x{number}") for number, value in enumerate(values)]
        outputs = [self._operand(value, f"y{number}") for number, value in enumerate(node.outputs)]
        key = (node.op, *((o.value.shape, o.value.dtype, o.value.batched, o.array) for o in (*inputs, *outputs)))
        if key not in self.kernels:
            # Kernels of whole layers, which `shared` names, have names of operators too.
            name = f"{node.op.stem()}_op{len(self.kernels) + 1}"
            body = Source()
            body.made = self.source.made
            body.depth = 1
            kernel = Kernel(body, self.lanes, self.registers, inputs, outputs)
            node.op.emit(kernel)
            names = [operand.name for operand in (*inputs, *outputs)] + [scratch for scratch, _ in kernel.scratches]
            common = [*COMMON, *(["blocks"] if node.op.whole_batch else [])]
            with self.source.kernel(f"{name}({', '.join([*common, *names])})", _description(node, values)):
                pass
            self.source.lines += body.lines
            self.kernels[key] = (name, kernel.scratches)
        return self.kernels[key]

    def _operand(self, value: Value, name: str) -> Operand:
        return Operand(value, name, "memory" if value.batched else self.arrays[value.name], self.lanes)


def _description(node: Node, values: Sequence[Value]) -> str:
    shapes = ", ".join("x".join(map(str, value.shape)) or "scalar" for value in values)
    return f"{node.op.stem()} of {shapes}."


def phases(items: Sequence[Item]) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """Return the phases of evaluation, and those that training adds; buffers of one phase have room for one block."""
    parts = [
        merged([Phase(item.by_block, (item.call,)) for item in items if item.training == training])
        for training in (False, True)
    ]
    where: dict[Buffer, set[int]] = {}
    everything = [*parts[0], *parts[1]]
    for number, phase in enumerate(everything):
        for buffer in (a for call in phase.calls for a in call.arguments if isinstance(a, Buffer)):
            # Where all blocks are computed at once there has to be room for all.
            where.setdefault(buffer, set()).update({number} if phase.by_block else {number, -1})
    turns = {b: replace(b, each_block=False) for b, seen in where.items() if b.each_block and len(seen) == 1}
    forward, backward = (tuple(_with(phase, turns) for phase in part) for part in parts)
    return forward, backward


def _with(phase: Phase, turns: dict[Buffer, Buffer]) -> Phase:
    calls = [
        replace(call, arguments=tuple(turns.get(a, a) if isinstance(a, Buffer) else a for a in call.arguments))
        for call in phase.calls
    ]
    return replace(phase, calls=tuple(calls))
