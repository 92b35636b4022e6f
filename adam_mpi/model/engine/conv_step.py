"""The step of a convolution, with relu and max-pooling where they follow it."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from adam_mpi.model.engine import conv_data, conv_forward, conv_weights, pool, tiles, winograd1d, winograd2d
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.memory import Buffer, Call, Step
from adam_mpi.model.engine.source import Source
from adam_mpi.model.exchange import Span


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
    spans: tuple[Span, ...] = ()
    """Columns of the outputs one after the other: all but the last are what other strips wait for.

    None: all at once."""

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

    def forward(self, calls: list[Call]) -> dict[str, list[Call]]:
        """Of each span, as a step has them."""
        return {"forward": calls[:-1], "interior": calls[-1:]} if self.spans else {"forward": calls}


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
    transformed = [("winograd", winograd2d.fits(shape, window)), ("lines", winograd1d.fits(shape))]
    return [*({"algorithm": name} for name, fits in transformed if fits), *found]


LARGEST_TILE = 1024
TILES = {"forward": 2, "data": 2, "weights": 3}
"""What a direct convolution is told, and how many numbers that is."""


def check(choice: object, shape: Shape, window: int) -> str:
    """What is wrong with a choice for a convolution that was read from a file, before it becomes source; else nothing.

    Tiles may be those of another machine, with other registers.
    """
    fitting = {"direct": True, "winograd": winograd2d.fits(shape, window), "lines": winograd1d.fits(shape)}
    algorithm = choice.get("algorithm") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(algorithm, str) or not fitting.get(algorithm):
        return f"algorithm is none of {', '.join(name for name, fits in fitting.items() if fits)}"
    wanted = TILES if algorithm == "direct" else {}
    if set(choice) != {"algorithm", *wanted}:
        return f"{algorithm} wants {', '.join(wanted) or 'nothing'} besides"
    wrong = [name for name, count in wanted.items() if not _is_tile(choice[name], count)]
    return f"{wrong[0]} wants {wanted[wrong[0]]} whole numbers from 1 to {LARGEST_TILE}" if wrong else ""


def _is_tile(sizes: object, count: int) -> bool:
    return (
        isinstance(sizes, list)
        and len(sizes) == count
        and all(type(size) is int and 1 <= size <= LARGEST_TILE for size in sizes)
    )


def direct(job: Job, choice: Choice) -> Step:
    shape, name, lanes = job.shape, job.name, job.lanes
    sums = conv_weights.Tile(*choice["weights"])
    conv_weights.emit(job.source, f"{name}_weights", shape, job.weight, job.bias, lanes, sums)
    back, errors, winners = unpool(job)
    forward = _forward(job, tiles.Tile(*choice["forward"]), winners)
    to_weights, to_data = [Call(f"{name}_weights", ("memory", "gradient", errors, job.inputs))], []
    if job.input_errors:
        tile = tiles.Tile(*choice["data"])
        conv_data.emit(job.source, f"{name}_data", shape, job.weight, lanes, tile, job.masked)
        to_data = [Call(f"{name}_data", ("memory", "weights", errors, job.inputs, job.input_errors))]
    return Step(True, **job.forward(forward), **job.backward(back, to_weights, to_data))


def _forward(job: Job, tile: tiles.Tile, winners: Buffer | None) -> list[Call]:
    """A call for all columns, or for each span of them."""
    shape, calls = job.shape, []
    for number, span in enumerate(job.spans or (None,)):
        name = f"{job.name}_forward{number if span else ''}"
        if span:
            tile = tiles.choose(shape.maps, span[1] - span[0], job.registers, slide=2)
        conv_forward.emit(job.source, name, shape, job.weight, job.bias, job.lanes, tile, job.relu, job.window, span)
        arguments: tuple[Buffer | str, ...] = ("memory", "weights", job.inputs, job.outputs)
        if winners:
            room = conv_forward.strip_floats(shape, job.window, tile, job.lanes)
            arguments += (winners, job.buffer(f"strip{number if span else ''}", room))
        calls.append(Call(name, arguments))
    return calls


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
