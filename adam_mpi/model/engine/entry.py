"""The function that Python calls: the whole network, forward and backward, for a batch of any size."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from adam_mpi.model.engine.memory import Buffer, Call, Phase, lay_out
from adam_mpi.model.engine.segments import Part
from adam_mpi.model.engine.source import Source

Timed = Callable[[], float]
ARGUMENTS = (
    "part, training, overwrite, later, kept, weights, shared, gradient, memory, levels, pixels, labels, keys, "
    "probabilities, count"
)


def emit(
    source: Source,
    parts: Sequence[Part],
    settling: Sequence[Call],
    pass_blocks: int,
    own_blocks: int,
    lanes: int,
    added: list[tuple[int, int]],
) -> tuple[str, int, int, dict[Buffer, int]]:
    """Emit `run` and, if there are such calls, `settle`; return all that was emitted, the floats of memory that they
    work in and would if no buffers shared any, and the place of each buffer.

    A gradient to be overwritten is made zero in its spans `added`, before sums are added there. Where there are ports,
    `run` computes one part only.
    """
    cut = any(part.port for part in parts)
    lasting = [phase for part in parts for phase in part.lasting(own_blocks)]
    places, floats, apart = lay_out([*lasting, Phase(False, tuple(settling))], pass_blocks)
    if settling:
        _settle(source, settling, places)
    source("")
    source("")
    source("@entry")
    with source.inside(f"def run({ARGUMENTS}):"):
        source('"""Sum of losses and number correct; in training gradients are added to `gradient`."""')
        source("before = flush_to_zero()")
        source("loss, correct = 0.0, 0")
        with source.inside("if training and overwrite and part == 0:"):
            for start, stop in added:
                source(f"gradient[{start}:{stop}] = 0")
        source(f"all_blocks = (count + {lanes - 1}) // {lanes}")
        with source.inside(f"for start in range(0, all_blocks, {pass_blocks}):"):
            source(f"blocks = min({pass_blocks}, all_blocks - start)")
            source("fresh = overwrite and start == 0")
            for number, part in enumerate(parts):
                when = f"part == {number}" if cut else "training" if part.training else ""
                with source.inside(f"if {when}:") if when else nullcontext():
                    for phase in part.phases:
                        _phase(source, phase, places, lanes)
                    if not part.phases:
                        source("pass")
        source("restore(before)")
        source("return loss, correct")
    return source.text, floats, apart, places


def _settle(source: Source, calls: Sequence[Call], places: dict[Buffer, int]) -> None:
    source("")
    source("")
    source("@entry")
    with source.inside("def settle(shared, contribution, memory, blocks, factor, unit_value):"):
        source('"""Step on the large layers\' weights with what the last batches left in so many blocks of images."""')
        source("before = flush_to_zero()")
        source("kept, first = 0, 0")
        for call in calls:
            _call(source, call, [_place(argument, places, "") for argument in call.arguments])
        source("restore(before)")


def emit_timed(source: Source, phases: Sequence[Phase]) -> tuple[str, int]:
    """Emit `timed`, which runs the phases for one block again and again; return the text and the floats."""
    places, floats, _ = lay_out(phases, 1)
    source("")
    source("")
    source("@entry")
    with source.inside("def timed(weights, gradient, memory, repeat):"):
        source("before = flush_to_zero()")
        source("start, blocks = 0, 1")
        with source.inside("for _ in range(repeat):"):
            for phase in phases:
                _phase(source, phase, places, 1)
        source("restore(before)")
    return source.text, floats


def _phase(source: Source, phase: Phase, places: dict[Buffer, int], lanes: int) -> None:
    if not phase.by_block:
        source(f"first = start * {lanes}")
        for call in phase.calls:
            _call(source, call, [_place(argument, places, "") for argument in call.arguments])
        return
    with source.inside("for block in range(blocks):"):
        source(f"first = (start + block) * {lanes}")
        for call in phase.calls:
            _call(source, call, [_place(argument, places, "block") for argument in call.arguments])


def _place(argument: Buffer | str, places: dict[Buffer, int], block: str) -> str:
    if isinstance(argument, str):
        return argument
    if argument.images:
        return f"{places[argument]} + (kept + first) * {argument.floats}"
    moving = f" + {block} * {argument.floats}" if block and argument.each_block else ""
    return f"{places[argument]}{moving}"


def _call(source: Source, call: Call, arguments: list[str]) -> None:
    if call.when:
        with source.inside(f"if {call.when}:"):
            _call(source, replace(call, when=""), arguments)
        return
    source(f"{'more = ' if call.kernel == 'cross_entropy' else ''}{call.kernel}({', '.join(arguments)})")
    if call.kernel == "cross_entropy":
        source("loss, correct = loss + more[0], correct + more[1]")
