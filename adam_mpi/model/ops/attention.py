"""Scaled dot-product attention with several heads; scores of a few queries at a time are all that is kept.

forward:   for each head and tile of queries: scores with all keys, their softmax, and the sums of values
backward:  for each head and panel of queries: probabilities again, from the logarithm of the sum that the way forward
           kept; errors of scores; what the panel adds to the errors of queries, keys and values
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adam_mpi.model.engine import attention_kernels
from adam_mpi.model.graph import Value, shape_text
from adam_mpi.model.ops.fields import flag, hidden, whole
from adam_mpi.model.ops.operator import Operator, Run, Span, register
from adam_mpi.model.ops.softmax import softmax


@dataclass(frozen=True)
class Heads:
    """Describe attention: how many heads, whether queries see later keys, and the sizes of everything."""

    heads: int
    causal: bool
    queries: int
    keys: int
    depth: int
    """Numbers of a query or key in one head."""
    width: int
    """Numbers of a value in one head."""

    @property
    def scale(self) -> float:
        """Return what products of queries and keys are multiplied by."""
        return 1 / math.sqrt(self.depth)

    def split(self, array: np.ndarray) -> np.ndarray:
        """Return (samples, places, numbers) as (samples, heads, places, numbers of a head)."""
        return array.reshape(*array.shape[:2], self.heads, -1).swapaxes(1, 2)

    def joined(self, array: np.ndarray) -> np.ndarray:
        """Return the inverse of `split`."""
        return array.swapaxes(1, 2).reshape(len(array), array.shape[2], -1)

    def scores(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return the scores (samples, heads, queries, keys); -inf where a query does not see a key."""
        made = self.split(queries) @ self.split(keys).swapaxes(2, 3) * queries.dtype.type(self.scale)
        if self.causal:
            made[:, :, np.triu(np.ones((self.queries, self.keys), bool), 1)] = -np.inf
        return made


@register("attention")
@dataclass(frozen=True)
class Attention(Operator):
    """Average values (third input) by softmax of the scaled products of queries (first) and keys (second).

    Each input has one row per place; its columns are cut into `heads`. With `causal` no query sees later keys. The
    second output has the logarithm of each softmax's sum.
    """

    data_inputs: ClassVar[int] = 3
    heads: int = whole(default=1)
    causal: bool = flag(False)

    def sizes(self, inputs: Sequence[Value]) -> Heads:
        """Return what attention over `inputs` is; raise ValueError if they do not meet."""
        shapes = [value.shape for value in inputs]
        given = ", ".join(map(shape_text, shapes))
        if any(len(shape) != 2 for shape in shapes):
            raise ValueError(f"queries, keys and values {given} have to have two axes: places and numbers")
        (queries, depth), (keys, other), (values, width) = shapes
        if depth != other or keys != values or (self.causal and queries != keys):
            raise ValueError(f"queries, keys and values {given} do not meet")
        if depth % self.heads or width % self.heads:
            raise ValueError(f"{given} do not divide into {self.heads} heads")
        return Heads(self.heads, self.causal, queries, keys, depth // self.heads, width // self.heads)

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        sizes = self.sizes(inputs)
        made = Value("", (sizes.queries, inputs[2].shape[1]), axes=(inputs[0].axes[0], inputs[2].axes[1]))
        return [made, Value("", (sizes.heads, sizes.queries))]

    def gradient(
        self, tape: Any, inputs: Sequence[Value], outputs: Sequence[Value], errors: Sequence[Value | None]
    ) -> Sequence[Value | None]:
        return tape.apply(AttentionBack(self.sizes(inputs)), [*inputs, *outputs, errors[0]])

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        queries, keys, values = arrays
        sizes = self.sizes([Value("", array.shape[1:]) for array in arrays])
        scores = sizes.scores(queries, keys)
        best = scores.max(axis=-1)
        sums = np.exp(scores - best[..., None]).sum(axis=-1)
        return [sizes.joined(softmax(scores, -1) @ sizes.split(values)), best + np.log(sums)]

    def emit(self, kernel: Any) -> None:
        attention_kernels.emit_forward(kernel, self.sizes([operand.value for operand in kernel.inputs]))

    def needs(self, axis: str, span: Span, inputs: Sequence[Value]) -> Sequence[Span | None]:
        of_queries = axis == inputs[0].axes[0] and not self.causal
        return [span if of_queries else None, None, None]

    def onnx(self, export: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        sizes = self.sizes([export.value(name) for name in inputs])
        split = export.constant(np.array([0, 0, self.heads, -1], np.int64))
        queries, keys, values = (
            export.node("Transpose", [export.node("Reshape", [name, split])], perm=order)
            for name, order in zip(inputs, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        factor = export.constant(np.array(sizes.scale, np.float32))
        scores = export.node("Mul", [export.node("MatMul", [queries, keys]), factor])
        if self.causal:
            hidden_keys = np.triu(np.full((sizes.queries, sizes.keys), -1e30, np.float32), 1)
            scores = export.node("Add", [scores, export.constant(hidden_keys)])
        made = export.node("MatMul", [export.node("Softmax", [scores], axis=-1), values])
        flat = export.constant(np.array([0, 0, sizes.heads * sizes.width], np.int64))
        export.node("Reshape", [export.node("Transpose", [made], perm=[0, 2, 1, 3]), flat], outputs[:1])


@dataclass(frozen=True)
class AttentionBack(Operator):
    """Return the errors of queries, keys and values; further inputs: both outputs, and errors of the first one."""

    sizes: Heads = hidden()
    data_inputs = 6

    def outputs(self, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value("", value.shape, axes=value.axes) for value in inputs[:3]]

    def reference(self, run: Run, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        queries, keys, values, made, logarithms, errors = arrays
        sizes = self.sizes
        probabilities = np.exp(sizes.scores(queries, keys) - logarithms[..., None])
        error = sizes.split(errors)
        own = (error * sizes.split(made)).sum(axis=-1, keepdims=True)
        to_scores = probabilities * (error @ sizes.split(values).swapaxes(2, 3) - own)
        to_scores *= errors.dtype.type(sizes.scale)
        return [
            sizes.joined(to_scores @ sizes.split(keys)),
            sizes.joined(to_scores.swapaxes(2, 3) @ sizes.split(queries)),
            sizes.joined(probabilities.swapaxes(2, 3) @ error),
        ]

    def emit(self, kernel: Any) -> None:
        attention_kernels.emit_backward(kernel, self.sizes)
