"""Cut a value into parts of equal or given sizes: one output per part."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.engine.kernel import strides_of
from adam_mpi.model.graph import Value
from adam_mpi.model.ops.elementwise import total
from adam_mpi.model.ops.fields import whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register
from adam_mpi.model.ops.shape import Concat, PadZeros, axis_of


@register("split")
@dataclass(frozen=True)
class Split(Operator):
    """Cut along an `axis` into so many equal `parts`, or into parts of the sizes in that list."""

    dtypes: ClassVar[tuple[str, ...]] = ()
    parts: int | tuple[int, ...] = whole(several=True)
    axis: int = whole(default=0, minimum=-9)

    def sizes(self, value: Value) -> tuple[int, ...]:
        """Return the sizes of the parts of `value` along the axis; raise ValueError if they do not add up."""
        width = value.shape[axis_of(value, self.axis)]
        if isinstance(self.parts, int):
            if width % self.parts:
                raise ValueError(f"{width} along axis {self.axis} do not divide into {self.parts} parts")
            return (width // self.parts,) * self.parts
        if sum(self.parts) != width:
            raise ValueError(f"parts of {', '.join(map(str, self.parts))} do not add up to {width}")
        return self.parts

    def starts(self, value: Value) -> list[int]:
        """Return where each part of `value` begins."""
        return [0, *accumulate(self.sizes(value)[:-1])]

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        value = inputs[0]
        axis = axis_of(value, self.axis)
        head = value.shape[:axis]
        tail = value.shape[axis + 1 :]
        return [Value("", (*head, size, *tail), value.dtype, value.axes) for size in self.sizes(value)]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        value = inputs[0]
        axis = axis_of(value, self.axis)
        known = [error for error in errors if error is not None]
        if len(known) == len(errors):
            return [tape.add(Concat(axis), *known)]
        width = value.shape[axis]
        padded = [
            tape.add(PadZeros(start, width - start - error.shape[axis], axis), error)
            for start, error in zip(self.starts(value), errors, strict=True)
            if error is not None
        ]
        return [padded[0] if len(padded) == 1 else tape.add(total(len(padded)), *padded)]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        value = Value("", arrays[0].shape[1:])
        return np.split(arrays[0], self.starts(value)[1:], axis=axis_of(value, self.axis) + 1)

    def emit(self, kernel: Any) -> None:
        value = kernel.inputs[0].value
        step = strides_of(value.shape)
        for start, result in zip(self.starts(value), kernel.outputs, strict=True):
            shape = result.value.shape
            first = start * step[axis_of(value, self.axis)]
            with kernel.nest(shape, [step, strides_of(shape)]) as (source, target):
                kernel(result.store(target, kernel.inputs[0].load(f"{source} + {first}")))

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        cut = inputs[0].axes[axis_of(inputs[0], self.axis)]
        return [None if axis == cut else span]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        value = export.value(inputs[0])
        sizes = export.constant(np.array(self.sizes(value), np.int64))
        export.node("Split", [inputs[0], sizes], outputs, axis=axis_of(value, self.axis) + 1)
