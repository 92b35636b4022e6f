"""Dropout: the mask is a function of seed, epoch, sample, the node's name and the unit alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adam_mpi.model.graph import Value
from adam_mpi.model.initialization import name_key
from adam_mpi.model.ops.fields import hidden, number
from adam_mpi.model.ops.operator import Operator, Run, Span, register

# 2**64 divided by the golden ratio: multiples of it are spread evenly over the 64-bit numbers.
SPREAD = np.uint64(0x9E3779B97F4A7C15)


def mix(numbers: np.ndarray) -> np.ndarray:
    """Scramble 64 bits so that each bit of the input changes half of the output's (the finalizer of splitmix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@register("dropout")
@dataclass(frozen=True)
class Dropout(Operator):
    """Zero a share `rate` of the units in training, and scale the others by 1 / (1 - rate)."""

    rate: float = number(0, below=1)
    name: str = hidden("")

    @property
    def salt(self) -> int:
        """Return what tells the layer's units from those of others: 24 bits of its name, above 40 of a unit."""
        return name_key(self.name) >> 40 << 40

    def bound(self, name: str, inputs: Sequence[Value]) -> Operator:
        return self if self.name else replace(self, name=name)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape, axes=inputs[0].axes)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return [tape.add(self, errors[0])]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        array = arrays[0]
        if not run.training:
            return [array]
        assert run.keys is not None
        units = np.arange(array[0].size, dtype=np.uint64) ^ np.uint64(self.salt)
        draws = mix(run.keys[:, None] + units[None] * SPREAD) >> np.uint64(32)
        kept = (draws >= np.uint64(self.rate * 2**32)).reshape(array.shape)
        return [np.where(kept, array * array.dtype.type(1 / (1 - self.rate)), array.dtype.type(0))]

    def emit(self, kernel: Any) -> None:
        kernel(f"limit = np.uint64({int(self.rate * 2**32)} if training else 0)")
        kernel(f"scale = np.float32({1 / (1 - self.rate)!r} if training else 1.0)")
        with kernel.loop("unit", kernel.inputs[0].value.size):
            kernel(f"counter = (np.uint64({self.salt}) ^ np.uint64(unit)) * SPREAD")
            with kernel.each_lane():
                kernel("draw = mix(keys[first + lane] + counter) >> np.uint64(32)")
                kept = f"{kernel.inputs[0].scalar('unit')} * scale"
                kernel(f"{kernel.outputs[0].scalar('unit')} = np.float32(0) if draw < limit else {kept}")

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [span]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        export.node("Identity", inputs, outputs)
