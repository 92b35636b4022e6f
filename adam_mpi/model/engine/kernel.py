"""Emit the kernel of an operator: its operands by index, loops, and what many operators have in common.

Samples lie innermost: number `index` of a value is a vector with one lane per sample of a block. Numbers that are not
batched (parameters, gradients of them) are the same in all lanes: they are broadcast when read, and summed over lanes
when added to.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from adam_mpi.model import expression
from adam_mpi.model.engine.source import Source
from adam_mpi.model.expression import Expression
from adam_mpi.model.graph import Shape, Value


@dataclass
class Operand:
    """An input or output of a kernel: `name` is the argument with its offset in `array`."""

    value: Value
    name: str
    array: str
    lanes: int
    block: str = ""
    """Text added to the offset, where a kernel goes through several blocks."""

    def at(self, index: int | str) -> str:
        """Return the expression of the offset of number `index`."""
        factor = self.lanes if self.value.batched else 1
        offset = str(index * factor) if isinstance(index, int) else f"({index}) * {factor}"
        return f"{self.name}{self.block} + {offset}"

    def load(self, index: int | str) -> str:
        """Return the expression of number `index` as a vector."""
        return f"{'load' if self.value.batched else 'broadcast'}({self.array}, {self.at(index)})"

    def scalar(self, index: int | str, lane: str = "lane") -> str:
        """Return the expression of number `index` of the sample in `lane`; it can be assigned to."""
        return f"{self.array}[{self.at(index)}{' + ' + lane if self.value.batched else ''}]"

    def store(self, index: int | str, vector: str) -> str:
        """Return the statement that stores `vector` as number `index`."""
        return f"store({self.array}, {self.at(index)}, {vector})"

    def add(self, index: int | str, vector: str) -> str:
        """Return the statement that adds `vector` to number `index`: lane by lane, or its total if not batched."""
        if self.value.batched:
            return self.store(index, f"add({self.load(index)}, {vector})")
        return f"{self.array}[{self.at(index)}] += total({vector})"


class Kernel:
    """The body of one kernel under construction; call it with a line of source.

    Names that a body may use: `memory`, `weights`, `gradient`, `keys`, `first` (number of the first sample), `count`
    (of all samples), `training`, and in a kernel for all blocks `blocks`.
    """

    def __init__(
        self, source: Source, lanes: int, registers: int, inputs: Sequence[Operand], outputs: Sequence[Operand]
    ) -> None:
        self.source = source
        self.lanes = lanes
        self.registers = registers
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.scratches: list[tuple[str, int]] = []

    def __call__(self, line: str) -> None:
        self.source(line)

    @contextmanager
    def inside(self, head: str) -> Iterator[None]:
        """Make the lines written meanwhile the body of `head`."""
        with self.source.inside(head):
            yield

    @contextmanager
    def loop(self, variable: str, stop: int | str, start: int | str = 0) -> Iterator[None]:
        """Emit a loop of `variable` over range(start, stop)."""
        with self.inside(
            f"for {variable} in range({start}, {stop}):" if start else f"for {variable} in range({stop}):"
        ):
            yield

    @contextmanager
    def each_lane(self) -> Iterator[None]:
        """Emit a loop over the lanes, for what can only be computed sample by sample."""
        with self.loop("lane", self.lanes):
            yield

    @contextmanager
    def each_block(self, stop: str = "blocks", start: str = "0") -> Iterator[None]:
        """Emit a loop over blocks, in the kernel of an operator with `whole_batch`; operands follow the block."""
        operands = [operand for operand in (*self.inputs, *self.outputs) if operand.value.batched]
        for operand in operands:
            operand.block = f" + block * {operand.value.size * self.lanes}"
        with self.loop("block", stop, start):
            yield
        for operand in operands:
            operand.block = ""

    def scratch(self, name: str, floats: int) -> str:
        """Return the name of an argument that is the offset in `memory` of `floats` floats for this kernel alone."""
        self.scratches.append((name, floats))
        return name

    def constants(self, values: np.ndarray) -> str:
        """Return the name of an array of float32 constants."""
        flat = ", ".join(repr(float(value)) for value in np.ravel(values))
        return self.source.make("np.array", f"[{flat}], np.float32")

    @contextmanager
    def nest(self, shape: Shape, strides: Sequence[Sequence[int]]) -> Iterator[list[str]]:
        """Emit loops over `shape`; yield, for each list of strides, the expression of the index that it leads to."""
        merged = _merged(shape, strides)
        with ExitStack() as stack:
            for axis, (size, _) in enumerate(merged):
                stack.enter_context(self.loop(f"i{axis}", size))
            yield [_index([steps[number] for _, steps in merged]) for number in range(len(strides))]

    def elementwise(self, function: Expression) -> None:
        """Emit outputs[0] = function(inputs) for each element, inputs broadcast to the output."""
        shape = self.outputs[0].value.shape
        steps = [broadcast_strides(operand.value.shape, shape) for operand in self.inputs]
        with self.nest(shape, [*steps, broadcast_strides(shape, shape)]) as indices:
            names = []
            for number, (operand, index) in enumerate(zip(self.inputs, indices, strict=False)):
                self(f"x{number}_value = {operand.load(index)}")
                names.append(f"x{number}_value")
            lines, whole = expression.emit(function, names)
            for line in lines:
                self(line)
            self(self.outputs[0].store(indices[-1], whole))

    def sum_to(self, shape: Shape, batched: bool = True, scale: float = 1.0) -> None:
        """Emit outputs[0] = scale times the sum of inputs[0] over the axes that `shape` lacks or has as 1."""
        operand = self.inputs[0]
        result = self.outputs[0]
        target = broadcast_strides(shape, operand.value.shape)
        kept = [axis for axis, step in enumerate(target) if step]
        gone = [axis for axis, step in enumerate(target) if not step]
        own = strides_of(operand.value.shape)
        sizes = operand.value.shape
        with self.nest(tuple(sizes[a] for a in kept), [[own[a] for a in kept], [target[a] for a in kept]]) as (a, b):
            self("sum_value = zero()")
            with ExitStack() as stack:
                terms = [a]
                for axis in gone:
                    stack.enter_context(self.loop(f"j{axis}", sizes[axis]))
                    terms.append(f"j{axis} * {own[axis]}")
                self(f"sum_value = add(sum_value, {operand.load(' + '.join(terms))})")
            value = "sum_value" if scale == 1 else f"mul(sum_value, splat({scale!r}))"
            self(result.store(b, value) if batched else result.add(b, value))

    def expand(self, scale: float = 1.0) -> None:
        """Emit outputs[0] = scale times inputs[0], broadcast."""
        shape = self.outputs[0].value.shape
        steps = [broadcast_strides(self.inputs[0].value.shape, shape), strides_of(shape)]
        with self.nest(shape, steps) as (a, b):
            value = self.inputs[0].load(a)
            self(self.outputs[0].store(b, value if scale == 1 else f"mul({value}, splat({scale!r}))"))

    def move(
        self, shape: Shape, source: Sequence[int], target: Sequence[int], number: int = 0, start: int = 0, to: int = 0
    ) -> None:
        """Emit a copy of `shape` numbers from inputs[number] to outputs[0], each with strides and a first index."""
        with self.nest(shape, [source, target]) as (a, b):
            self(self.outputs[0].store(f"{b} + {to}", self.inputs[number].load(f"{a} + {start}")))

    def clear(self, number: int = 0) -> None:
        """Emit outputs[number] = 0."""
        with self.loop("i", self.outputs[number].value.size):
            self(self.outputs[number].store("i", "zero()"))


def strides_of(shape: Shape) -> list[int]:
    """Return how far apart neighbors along each axis of `shape` are."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def broadcast_strides(shape: Shape, to: Shape) -> list[int]:
    """Return the strides of a value of `shape` that is broadcast `to` a shape: 0 where it is repeated."""
    padded = (1,) * (len(to) - len(shape)) + tuple(shape)
    return [0 if size == 1 else step for size, step in zip(padded, strides_of(padded), strict=True)]


def _merged(shape: Shape, strides: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Return (size, strides) of as few loops as go over `shape` in order."""
    found: list[tuple[int, list[int]]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        steps = [own[axis] for own in strides]
        if found and all(outer == inner * size for outer, inner in zip(found[-1][1], steps, strict=True)):
            found[-1] = (found[-1][0] * size, steps)
        else:
            found.append((size, steps))
    return found


def _index(steps: Sequence[int]) -> str:
    terms = [f"i{axis} * {step}" if step != 1 else f"i{axis}" for axis, step in enumerate(steps) if step]
    return " + ".join(terms) or "0"
