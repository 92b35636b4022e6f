"""Seed: the error of a loss, which the way back begins with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.model.graph import Value
from adam_mpi.model.ops.fields import hidden
from adam_mpi.model.ops.operator import Operator, Run, Span


@dataclass(frozen=True)
class Seed(Operator):
    """Make `weight` for each sample of a loss; executors make 0 for lanes that have no sample."""

    weight: float = hidden(1.0)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", inputs[0].shape)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return [np.full_like(arrays[0], self.weight)]

    def emit(self, kernel: Any) -> None:
        with kernel.inside(f"for lane in range({kernel.lanes}):"):
            kernel(f"memory[{kernel.outputs[0].at(0)} + lane] = {self.weight!r} if first + lane < count else 0.0")

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        return [span]
