"""Lower a convolution of a graph to the fast kernels: direct, or by Winograd's transforms.

Forward and backward of a convolution are one step, with relu, max-pooling, and the mask of a relu before it fused.
Kernels are shared by convolutions of equal shape: they see the weights from the layer's own offset on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adam_mpi.model.engine import conv_choice
from adam_mpi.model.engine.conv_step import ConvSpec
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.schedule import Buffer, Call, Step
from adam_mpi.model.engine.source import Source
from adam_mpi.model.graph import Value

if TYPE_CHECKING:
    from adam_mpi.model.engine.lowering import Lowering


@dataclass(frozen=True)
class FusedConv:
    """A convolution of a graph, with the values at its edges after fusion; backward ones are None without training."""

    name: str
    shape: Shape
    offset: int
    """Where its weights begin in the flat vector; its bias follows them."""
    bias: bool
    inputs: Value
    outputs: Value
    relu: bool = False
    window: int = 1
    errors: Value | None = None
    """The error of `outputs`, or of what is before a relu that is not pooled."""
    input_errors: Value | None = None
    masked: bool = False
    """Whether a relu made the inputs, and `input_errors` are those before it."""
    backward_at: str = ""
    """The node in whose place the backward calls are made."""


def add(lowering: "Lowering", conv: FusedConv) -> None:
    """Add the forward calls of `conv` here, and the backward ones in their place."""
    step = _step(lowering, conv)
    for call in step.prepare:
        lowering.prepare.append(_at(call, conv.offset))
    for call in step.forward:
        lowering.add(_at(call, conv.offset), by_block=True, training=False)
    if not conv.backward_at:
        return
    lowering.clear += [_at(call, conv.offset) for call in step.clear]
    lowering.finish += [_at(call, conv.offset) for call in step.finish]
    lowering.later[conv.backward_at] = [_at(call, conv.offset) for call in step.backward]


def _step(lowering: "Lowering", conv: FusedConv) -> Step:
    """Return the step of `conv`; its kernels are emitted unless a convolution of equal shape has them already."""
    size = conv.shape.maps * conv.shape.channels * conv.shape.kernel**2
    key = ("conv", conv.shape, conv.bias, conv.relu, conv.window, conv.masked, conv.input_errors is None)
    known = lowering.shared.get(key)
    name = known or f"conv_{len(lowering.shared) + 1}"
    lowering.shared[key] = name
    scratch = Source()
    scratch.made = lowering.source.made
    spec = ConvSpec(
        source=scratch if known else lowering.source,
        name=name,
        place=conv.name,
        shape=conv.shape,
        lanes=lowering.lanes,
        registers=lowering.registers,
        relu=conv.relu,
        window=conv.window,
        masked=conv.masked,
        weight=0,
        bias=size if conv.bias else None,
        inputs=lowering.buffer(conv.inputs),
        outputs=lowering.buffer(conv.outputs),
        errors=lowering.buffer(conv.errors or replace(conv.outputs, name=f"{conv.name}/unused errors")),
        input_errors=lowering.buffer(conv.input_errors) if conv.input_errors else None,
    )
    choice = lowering.choices.get(conv.name)
    choice = choice or conv_choice.choices(spec.shape, spec.window, spec.registers)[0]
    return conv_choice.step(spec, choice)


def _at(call: Call, offset: int) -> Call:
    """Return `call` with the weights and the gradient from `offset` on."""
    return replace(call, arguments=tuple(at_offset(call.arguments, offset)))


def at_offset(arguments: Sequence[Buffer | str], offset: int) -> list[Buffer | str]:
    """Return `arguments` with the weights and the gradient from `offset` on."""
    return [f"{a}[{offset}:]" if isinstance(a, str) and a in ("weights", "gradient") else a for a in arguments]
