"""The step of a convolution, with relu and max-pooling where they follow it."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from adam_mpi.model.engine import conv_data, conv_forward, conv_weights, lines, pool, tiles, winograd
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.memory import Buffer, Call, Step
from adam_mpi.model.engine.source import Source


@dataclass(frozen=True)
class Job:
    """What to emit, and the buffers it works on."""

    source: Source
    name: str
    shape: Shape
    lanes: int
    registers: int
    relu: bool
    window: int
    masked: bool
    """Whether the inputs are relu's, so that their errors have to be masked."""
    weight: int
    bias: int
    inputs: Buffer
    outputs: Buffer
    errors: Buffer
    input_errors: Buffer | None
    """None when nobody needs them."""
    apart: bool = False
    """Whether another strip waits for the errors of the inputs: those of all blocks come first, then the gradient."""

    def buffer(self, what: str, floats: int, lasting: bool = False) -> Buffer:
        """For one block's turn, or lasting for all."""
        return Buffer(f"{self.name}/{what}", floats, each_block=False, lasting=lasting)

    def errors_buffer(self, what: str, floats: int) -> Buffer:
        """What both the errors of the inputs and the gradient are computed from."""
        return Buffer(f"{self.name}/{what}", floats, each_block=self.apart)

    def backward(self, first: list[Call], to_weights: list[Call], to_data: list[Call]) -> dict[str, list[Call]]:
        """As a step has them."""
        if self.apart:
            return {"backward": first + to_data, "later": to_weights}
        return {"backward": first + to_weights + to_data}


Choice = dict[str, Any]
"""How a convolution is computed; JSON, as it is kept with the run: equal bits need equal choices."""


def choices(shape: Shape, window: int, registers: int, wanted: int = 1) -> list[Choice]:
    """The first is what arithmetic says; the others, up to `wanted` tiles of each kind, are worth a measurement."""
    columns = shape.columns // window * window
    forward = tiles.ranked(shape.maps, columns, registers, slide=2)[:wanted]
    data = tiles.ranked(shape.channels, shape.width, registers, 2, shape.stride)[:wanted]
    sums = conv_weights.choose(shape, registers)
    found: list[Choice] = [
        {
            "algorithm": "direct",
            "forward": [one.planes, one.columns],
            "data": [other.planes, other.columns],
            "weights": [sums.maps, sums.channels, sums.taps],
        }
        for one, other in zip_longest(forward, data, fillvalue=(forward if len(forward) < len(data) else data)[-1])
    ]
    transformed = [("winograd", winograd.fits(shape, window)), ("lines", lines.fits(shape))]
    return [*({"algorithm": name} for name, fits in transformed if fits), *found]


def direct(job: Job, choice: Choice) -> Step:
    shape, name, lanes = job.shape, job.name, job.lanes
    tile = tiles.Tile(*choice["forward"])
    conv_forward.emit(job.source, f"{name}_forward", shape, job.weight, job.bias, lanes, tile, job.relu, job.window)
    sums = conv_weights.Tile(*choice["weights"])
    conv_weights.emit(job.source, f"{name}_weights", shape, job.weight, job.bias, lanes, sums)
    back, errors, winners = unpool(job)
    forward: tuple[Buffer | str, ...] = ("memory", "weights", job.inputs, job.outputs)
    if winners:
        forward += (winners, job.buffer("strip", conv_forward.strip_floats(shape, job.window, tile, lanes)))
    to_weights, to_data = [Call(f"{name}_weights", ("memory", "gradient", errors, job.inputs))], []
    if job.input_errors:
        tile = tiles.Tile(*choice["data"])
        conv_data.emit(job.source, f"{name}_data", shape, job.weight, lanes, tile, job.masked)
        to_data = [Call(f"{name}_data", ("memory", "weights", errors, job.inputs, job.input_errors))]
    return Step(True, [Call(f"{name}_forward", forward)], **job.backward(back, to_weights, to_data))


def unpool(job: Job) -> tuple[list[Call], Buffer, Buffer | None]:
    """Calls that take errors back through the pooling, where those errors are, and where the winners."""
    if job.window == 1:
        return [], job.errors, None
    shape = job.shape
    pool.emit_backward(
        job.source, f"{job.name}_unpool", (shape.maps, shape.rows, shape.columns), job.window, job.window, job.lanes
    )
    winners = Buffer(f"{job.name}/winners", job.outputs.floats)
    before = job.errors_buffer("errors before pooling", shape.maps * shape.rows * shape.columns * job.lanes)
    return [Call(f"{job.name}_unpool", ("memory", job.errors, winners, before))], before, winners
