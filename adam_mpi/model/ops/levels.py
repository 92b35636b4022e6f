"""Levels: bytes become numbers through a table of 256 levels per channel, which normalizes them at no cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.engine import loads
from adam_mpi.model.graph import Node, Value
from adam_mpi.model.ops.fields import hidden
from adam_mpi.model.ops.operator import Operator, Run, Span

FLOAT = 1
"""The number of float32 among the types of ONNX."""


@dataclass(frozen=True)
class Levels(Operator):
    """Turn byte b of a channel into (b / 255 - mean) / deviation; one number, or one per channel, each."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    mean: tuple[float, ...] = hidden((0.0,))
    deviation: tuple[float, ...] = hidden((1.0,))

    def table(self) -> np.ndarray:
        """Return the levels, (channels or 1, 256) float64."""
        levels = np.arange(256) / 255
        return (levels[None] - np.array(self.mean)[:, None]) / np.array(self.deviation)[:, None]

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        if value.dtype != "byte":
            raise ValueError(f"levels are looked up for bytes, not for numbers of type {value.dtype}")
        for numbers in (self.mean, self.deviation):
            if len(numbers) not in (1, value.shape[0]):
                raise ValueError(
                    f"{len(numbers)} levels are given for {value.shape[0]} channels; give one, or one each"
                )
        return [Value("", value.shape, axes=value.axes)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        channels = arrays[0].shape[1]
        table = np.broadcast_to(self.table(), (channels, 256)).astype(run.dtype)
        return [np.stack([table[c][arrays[0][:, c]] for c in range(channels)], axis=1)]

    def lower(self, lowering: Any, node: Node) -> None:
        loads.add_levels(lowering, node, self.table())

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [span]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        sides = (-1, *(1,) * (export.rank(inputs[0]) - 1))
        mean = np.array(self.mean, np.float32).reshape(sides)
        factor = (1 / np.array(self.deviation)).astype(np.float32).reshape(sides)
        numbers = export.node("Cast", inputs, to=FLOAT)
        scaled = export.node("Mul", [numbers, export.constant(np.float32(1 / 255))])
        centered = export.node("Sub", [scaled, export.constant(mean)])
        export.node("Mul", [centered, export.constant(factor)], outputs)
