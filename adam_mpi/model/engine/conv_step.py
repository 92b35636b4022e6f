"""Build the step of a convolution, with relu and max-pooling where they follow it; here by direct kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

from adam_mpi.model.engine import conv_kernels, pool_and_norm, tiles
from adam_mpi.model.engine.convolution import ConvKernel, Shape
from adam_mpi.model.engine.schedule import Buffer, Call, Step
from adam_mpi.model.engine.source import Source
from adam_mpi.model.exchange import Span
from adam_mpi.model.layers import Activation, LayerShape, MaxPool


@dataclass(frozen=True)
class ConvSpec:
    """Describe the convolution to emit, what is fused with it, and the buffers it works on."""

    source: Source
    name: str
    shape: Shape
    lanes: int
    registers: int
    relu: bool
    window: int
    """Size of the max-pooling that follows; 1: none."""
    masked: bool
    """Whether a relu made the inputs, so that their errors have to be masked."""
    weight: int
    bias: int | None
    inputs: Buffer
    outputs: Buffer
    errors: Buffer
    input_errors: Buffer | None
    """None when no layer before this one learns."""
    errors_first: bool = False
    """Whether another strip waits for the errors of the inputs: those of all blocks come first, then the gradient."""
    place: str = ""
    """What the names of buffers begin with, where several convolutions share kernels; empty: the name."""
    spans: tuple[Span, ...] = ()
    """Columns of the outputs in the order they are computed: all but the last are what other strips wait for.

    Empty: all columns at once."""

    def buffer(self, what: str, floats: int, lasting: bool = False) -> Buffer:
        """Return a buffer for one block at a time, or one that is `lasting` through all blocks."""
        return Buffer(f"{self.place or self.name}/{what}", floats, each_block=False, lasting=lasting)

    def errors_buffer(self, what: str, floats: int) -> Buffer:
        """Return a buffer that both the errors of the inputs and the gradient are computed from."""
        return Buffer(f"{self.place or self.name}/{what}", floats, each_block=self.errors_first)

    def kernel(self, suffix: str) -> ConvKernel:
        """Return the kernel called `suffix` of this convolution."""
        return ConvKernel(f"{self.name}_{suffix}", self.shape, self.weight, self.bias, self.lanes)

    def forward_kernel(self, suffix: str, tile: tiles.Tile, span: Span | None = None) -> conv_kernels.ForwardKernel:
        """Return the forward kernel called `suffix`, with the relu and the pooling that are fused with it."""
        return conv_kernels.ForwardKernel(
            name=f"{self.name}_{suffix}",
            shape=self.shape,
            weight=self.weight,
            bias=self.bias,
            lanes=self.lanes,
            tile=tile,
            relu=self.relu,
            window=self.window,
            span=span,
        )

    def backward(self, first: list[Call], to_weights: list[Call], to_data: list[Call]) -> dict[str, list[Call]]:
        """Return the calls backward as arguments of `Step`, in the order that `errors_first` asks for."""
        if self.errors_first:
            return {"backward": first + to_data, "later": to_weights}
        return {"backward": first + to_weights + to_data}

    def forward(self, calls: list[Call]) -> dict[str, list[Call]]:
        """Return the calls forward, one per span, as arguments of `Step`."""
        return {"forward": calls[:-1], "interior": calls[-1:]} if self.spans else {"forward": calls}


@dataclass(frozen=True)
class Fused:
    """What is fused with a convolution: whether a relu, which window of max-pooling, and how many layers that makes."""

    relu: bool = False
    window: int = 1
    layers: int = 1


def fused(shapes: Sequence[LayerShape], index: int) -> Fused:
    """Return what is fused with the convolution that is layer `index`.

    Relu before and after max-pooling is the same.
    """
    relu = False
    window = 1
    taken = 1
    for shape in shapes[index + 1 : index + 3]:
        layer = shape.layer
        if not relu and layer == Activation("relu"):
            relu = True
        elif window == 1 and type(layer) is MaxPool and layer.size == layer.stride > 1:
            window = layer.size
        else:
            break
        taken += 1
    return Fused(relu, window, taken)


def direct(
    spec: ConvSpec, forward_tile: tiles.Tile, data_tile: tiles.Tile, weights_tile: conv_kernels.WeightsTile
) -> Step:
    """Return the step of a convolution that multiplies directly, in these tiles."""
    conv_kernels.emit_weights(spec.source, spec.kernel("weights"), weights_tile)
    back, errors, winners = unpool(spec)
    forward = _forward(spec, forward_tile, winners)
    to_weights = [Call(f"{spec.name}_weights", ("memory", "gradient", errors, spec.inputs))]
    to_data = []
    if spec.input_errors:
        conv_kernels.emit_data(spec.source, spec.kernel("data"), data_tile, spec.masked)
        arguments = ("memory", "weights", errors, spec.inputs, spec.input_errors)
        to_data.append(Call(f"{spec.name}_data", arguments))
    return Step(True, **spec.forward(forward), **spec.backward(back, to_weights, to_data))


def _forward(spec: ConvSpec, tile: tiles.Tile, winners: Buffer | None) -> list[Call]:
    """Emit the direct forward kernels; return one call for all columns, or one for each span of them."""
    calls = []
    for number, span in enumerate(spec.spans or (None,)):
        suffix = f"{number if span else ''}"
        if span:
            tile = tiles.choose(spec.shape.maps, span[1] - span[0], spec.registers, slide=2)
        kernel = spec.forward_kernel(f"forward{suffix}", tile, span)
        conv_kernels.emit_forward(spec.source, kernel)
        arguments: tuple[Buffer | str, ...] = ("memory", "weights", spec.inputs, spec.outputs)
        if winners:
            floats = conv_kernels.pooled_rows_floats(spec.shape, spec.window, tile, spec.lanes)
            arguments += (winners, spec.buffer(f"unpooled{suffix}", floats))
        calls.append(Call(kernel.name, arguments))
    return calls


def unpool(spec: ConvSpec) -> tuple[list[Call], Buffer, Buffer | None]:
    """Emit the way back through the pooling.

    Returns its calls, the buffer of the errors before the pooling, and that of the winners, None without a pooling.
    """
    if spec.window == 1:
        return [], spec.errors, None
    shape = spec.shape
    windows = pool_and_norm.Windows((shape.maps, shape.rows, shape.columns), spec.window, spec.window, spec.lanes)
    pool_and_norm.emit_max_pool_backward(spec.source, f"{spec.name}_unpool", windows)
    winners = Buffer(f"{spec.place or spec.name}/winners", spec.outputs.floats)
    before = spec.errors_buffer("errors before pooling", shape.maps * shape.rows * shape.columns * spec.lanes)
    return [Call(f"{spec.name}_unpool", ("memory", spec.errors, winners, before))], before, winners
