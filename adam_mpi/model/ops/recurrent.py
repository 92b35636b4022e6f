"""LSTM and GRU over sequences of a fixed length: unrolled, with the same weights in each step.

What the input contributes to all gates is one dense layer over the whole sequence. A step adds what the state
contributes, and a `Cell`, which is element-wise over the parts of its inputs; its way back is a `Cell` too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model import expression
from adam_mpi.model.expression import Expression, apply, symbol
from adam_mpi.model.graph import Parameter, Value
from adam_mpi.model.initialization import ZEROS
from adam_mpi.model.ops.dense import Dense
from adam_mpi.model.ops.elementwise import Elementwise
from adam_mpi.model.ops.fields import flag, hidden, whole
from adam_mpi.model.ops.operator import Composite, Operator, Run, Span, register
from adam_mpi.model.ops.reduce import SumTo
from adam_mpi.model.ops.shape import Concat, Reshape
from adam_mpi.model.ops.split import Split

Results = tuple[tuple[Expression, ...], ...]


@dataclass(frozen=True)
class Cell(Operator):
    """Compute the parts of each output from parts of the inputs, element by element.

    `parts` says how many parts each input has, one behind the other; symbols number them through. `results` has, per
    output, the expressions of its parts. All parts have equal size.
    """

    data_inputs: ClassVar[None] = None
    parts: tuple[int, ...] = hidden(())
    results: Results = hidden(())
    label: str = hidden("cell")

    def stem(self) -> str:
        return self.label

    def width(self, inputs: Sequence[Value]) -> int:
        """Return the size of a part; raise ValueError if inputs differ."""
        widths = {value.size / count for value, count in zip(inputs, self.parts, strict=True)}
        if len(widths) > 1 or any(len(value.shape) != 1 for value in inputs):
            raise ValueError(f"inputs do not have parts of one size, {', '.join(map(str, self.parts))} of them")
        return int(widths.pop())

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        width = self.width(inputs)
        return [Value("", (width * len(parts),)) for parts in self.results]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        given: list[Value] = list(inputs)
        counts = list(self.parts)
        back: dict[int, Expression] = {}
        for parts, error in zip(self.results, errors, strict=True):
            if error is None:
                continue
            for number, part in enumerate(parts):
                found = expression.gradient(part, symbol(sum(counts) + number))
                back |= {place: back[place] + own if place in back else own for place, own in found.items()}
            given.append(error)
            counts.append(len(parts))
        results = tuple(
            tuple(back.get(place, expression.constant(0)) for place in range(start, start + count))
            for start, count in zip(np.cumsum((0, *self.parts)).tolist(), self.parts, strict=False)
        )
        made = tape.apply(Cell(tuple(counts), results, f"{self.label}_back"), given)
        return [
            error if value.batched else tape.add(SumTo(value.shape, value.axes, False), error)
            for value, error in zip(inputs, made, strict=True)
        ]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        parts = [part for array, count in zip(arrays, self.parts, strict=True) for part in np.split(array, count, -1)]
        return [
            np.concatenate([np.broadcast_to(expression.evaluate(e, parts), parts[0].shape) for e in made], axis=-1)
            for made in self.results
        ]

    def emit(self, kernel: Any) -> None:
        width = self.width([operand.value for operand in kernel.inputs])
        with kernel.loop("i", width):
            names: list[str] = []
            for operand, count in zip(kernel.inputs, self.parts, strict=True):
                for part in range(count):
                    names.append(f"x{len(names)}_value")
                    kernel(f"{names[-1]} = {operand.load(f'i + {part * width}')}")
            lines, texts = expression.emit_all([part for made in self.results for part in made], names)
            for line in lines:
                kernel(line)
            given = iter(texts)
            for result, made in zip(kernel.outputs, self.results, strict=True):
                for part in range(len(made)):
                    kernel(result.store(f"i + {part * width}", next(given)))

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [None] * len(inputs)

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        names: list[str] = []
        for name, count in zip(inputs, self.parts, strict=True):
            own = [f"{outputs[0]}/part{len(names) + part}" for part in range(count)] if count > 1 else [name]
            if count > 1:
                sizes = np.full(count, export.value(name).size // count, np.int64)
                export.node("Split", [name, export.constant(sizes)], own, axis=-1)
            names += own
        for output, parts in zip(outputs, self.results, strict=True):
            made = [f"{output}/result{part}" for part in range(len(parts))] if len(parts) > 1 else [output]
            for part, name in zip(parts, made, strict=True):
                Elementwise(part).onnx(export, names, [name])
            if len(parts) > 1:
                export.node("Concat", made, [output], axis=-1)


def _sigmoid(x: Expression) -> Expression:
    return apply("sigmoid", x)


def _tanh(x: Expression) -> Expression:
    return apply("tanh", x)


def lstm_cell() -> Cell:
    """Return the cell of an LSTM: of the gates by input and by state (input, forget, cell, output), and the memory."""
    enter, keep, new, leave = (symbol(number) + symbol(number + 4) for number in range(4))
    memory = _sigmoid(keep) * symbol(8) + _sigmoid(enter) * _tanh(new)
    return Cell((4, 4, 1), ((_sigmoid(leave) * _tanh(memory),), (memory,)), "lstm_cell")


def first_lstm_cell() -> Cell:
    """Return the cell of the first step of an LSTM, whose state and memory are zero."""
    memory = _sigmoid(symbol(0)) * _tanh(symbol(2))
    return Cell((4,), ((_sigmoid(symbol(3)) * _tanh(memory),), (memory,)), "lstm_first")


def gru_cell() -> Cell:
    """Return the cell of a GRU: of the gates by input and by state (reset, update, new), and the state."""
    reset = _sigmoid(symbol(0) + symbol(3))
    update = _sigmoid(symbol(1) + symbol(4))
    new = _tanh(symbol(2) + reset * symbol(5))
    return Cell((3, 3, 1), ((new + update * (symbol(6) - new),),), "gru_cell")


def first_gru_cell() -> Cell:
    """Return the cell of the first step of a GRU, whose state is zero: its gates by state are their bias alone."""
    reset = _sigmoid(symbol(0) + symbol(3))
    update = _sigmoid(symbol(1) + symbol(4))
    new = _tanh(symbol(2) + reset * symbol(5))
    return Cell((3, 3), ((new - update * new,),), "gru_first")


@dataclass(frozen=True)
class Recurrent(Composite):
    """Run `depth` layers of cells with `units` along the first axis of (length, features).

    The output is (length, units), or the state after the `last` step alone. With `bidirectional` each layer runs in
    both directions, each with weights of its own, and what they make is joined: twice as many units.
    """

    gates: ClassVar[int] = 0
    units: int = whole()
    depth: int = whole(default=1)
    bidirectional: bool = flag(False)
    last: bool = flag(False)

    def own(self, features: int) -> tuple[Parameter, ...]:
        """Return the parameters of one direction of a layer that takes `features`."""
        rows = self.gates * self.units
        return (
            Parameter("weight", (rows, features)),
            Parameter("bias", (rows,), ZEROS, "bias"),
            Parameter("recurrent", (rows, self.units)),
        )

    def parameters(self, inputs: Sequence[Value]) -> tuple[Parameter, ...]:
        if len(inputs[0].shape) != 2:
            raise ValueError("takes (length, features) per sample; reshape or embed what it is given")
        features = inputs[0].shape[1]
        found: list[Parameter] = []
        for layer in range(1, self.depth + 1):
            for end in ("", "_back") if self.bidirectional else ("",):
                number = "" if layer == 1 else f"_{layer}"
                found += [replace(own, name=f"{own.name}{number}{end}") for own in self.own(features)]
            features = self.units * (1 + self.bidirectional)
        return tuple(found)

    def build(self, tape: Any, inputs: Sequence[Value], parameters: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        count = len(self.own(1))
        directions = 1 + self.bidirectional
        for layer in range(self.depth):
            runs = []
            for direction in range(directions):
                first = (layer * directions + direction) * count
                runs.append(self._states(tape, value, parameters[first : first + count], direction == 1))
            if self.last and layer == self.depth - 1:
                ends = [states[0 if direction else -1] for direction, states in enumerate(runs)]
                return [ends[0] if len(ends) == 1 else tape.add(Concat(), *ends)]
            made = [self._sequence(tape, states) for states in runs]
            value = made[0] if len(made) == 1 else tape.add(Concat(1), *made)
        return [value]

    def _states(self, tape: Any, value: Value, own: Sequence[Value], backward: bool) -> list[Value]:
        """Add the steps of one direction; return the state after each one, in the order of the sequence."""
        length = value.shape[0]
        entering = tape.call(Dense(self.gates * self.units), [value], own[:2])[0]
        rows = tape.apply(Split(length), [entering]) if length > 1 else [entering]
        steps = [tape.add(Reshape((row.size,)), row) for row in rows]
        states: list[Value] = []
        memory: tuple[Value, ...] = ()
        for step in reversed(steps) if backward else steps:
            memory = self.step(tape, step, memory, own[2:])
            states.append(memory[0])
        return states[::-1] if backward else states

    def step(self, tape: Any, gates: Value, memory: Sequence[Value], own: Sequence[Value]) -> tuple[Value, ...]:
        """Add one step, after which there is `memory`, nothing before the first one; return the state and the rest."""
        self.missing("step rule")

    def _sequence(self, tape: Any, states: Sequence[Value]) -> Value:
        rows = [tape.add(Reshape((1, self.units), ("token", "unit")), state) for state in states]
        return rows[0] if len(rows) == 1 else tape.add(Concat(), *rows)


@register("lstm")
@dataclass(frozen=True)
class Lstm(Recurrent):
    """Run layers of long short-term memory along the first axis; gates are in the order input, forget, cell, output."""

    gates: ClassVar[int] = 4

    def step(self, tape: Any, gates: Value, memory: Sequence[Value], own: Sequence[Value]) -> tuple[Value, ...]:
        if not memory:
            return tape.apply(first_lstm_cell(), [gates])
        state = tape.call(Dense(4 * self.units, bias=False), memory[:1], own)[0]
        return tape.apply(lstm_cell(), [gates, state, memory[1]])


@register("gru")
@dataclass(frozen=True)
class Gru(Recurrent):
    """Run layers of gated recurrent units along the first axis; gates are in the order reset, update, new."""

    gates: ClassVar[int] = 3

    def own(self, features: int) -> tuple[Parameter, ...]:
        return (*super().own(features), Parameter("recurrent_bias", (3 * self.units,), ZEROS, "bias"))

    def step(self, tape: Any, gates: Value, memory: Sequence[Value], own: Sequence[Value]) -> tuple[Value, ...]:
        if not memory:
            return tape.apply(first_gru_cell(), [gates, own[1]])
        state = tape.call(Dense(3 * self.units), memory, own)[0]
        return tape.apply(gru_cell(), [gates, state, memory[0]])
