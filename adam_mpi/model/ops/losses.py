"""Losses of vectors of floats, made of element-wise operators and means: one number per sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adam_mpi.model.expression import Expression, apply, exp, symbol
from adam_mpi.model.graph import Value, shape_text
from adam_mpi.model.ops.elementwise import Elementwise
from adam_mpi.model.ops.fields import number
from adam_mpi.model.ops.operator import Composite, register
from adam_mpi.model.ops.reduce import Mean


@dataclass(frozen=True)
class MeanLoss(Composite):
    """Average a function of prediction (first input) and target (second one) over a sample's numbers."""

    data_inputs = 2

    def expression(self) -> Expression:
        """Return the function: symbol 0 is the prediction, symbol 1 the target."""
        self.missing("expression")

    def build(self, tape: Any, inputs: Sequence[Value], parameters: Sequence[Value]) -> Sequence[Value]:
        prediction, target = inputs
        if prediction.shape != target.shape:
            given = f"prediction {shape_text(prediction.shape)} and target {shape_text(target.shape)}"
            raise ValueError(f"{given} do not meet")
        each = tape.add(Elementwise(self.expression(), "difference"), prediction, target)
        return [tape.add(Mean(), each)]


@register("mean_squared_error")
@dataclass(frozen=True)
class MeanSquaredError(MeanLoss):
    """Average the squared difference."""

    def expression(self) -> Expression:
        difference = symbol(0) - symbol(1)
        return difference * difference


def _absolute(x: Expression) -> Expression:
    return apply("greater", x, 0.0, x, 0.0 - x)


@register("mean_absolute_error")
@dataclass(frozen=True)
class MeanAbsoluteError(MeanLoss):
    """Average the absolute difference."""

    def expression(self) -> Expression:
        return _absolute(symbol(0) - symbol(1))


@register("huber")
@dataclass(frozen=True)
class Huber(MeanLoss):
    """Average half the squared difference up to `delta`, and a straight line from there."""

    delta: float = number(0, default=1.0)

    def expression(self) -> Expression:
        difference = symbol(0) - symbol(1)
        size = _absolute(difference)
        line = self.delta * (size - 0.5 * self.delta)
        return apply("greater", size, float(self.delta), line, 0.5 * (difference * difference))


@register("binary_cross_entropy")
@dataclass(frozen=True)
class BinaryCrossEntropy(MeanLoss):
    """Average the cross-entropy of a sigmoid of each score with a target from 0 to 1: several labels at once."""

    def expression(self) -> Expression:
        score = symbol(0)
        target = symbol(1)
        # Without overflow: log(1 + exp(-|x|)) + max(x, 0) - x * target.
        return apply("log", 1.0 + exp(0.0 - _absolute(score))) + apply("relu", score) - score * target
