"""Emitted source: its lines at the current depth, and the functions in it that Python calls."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from adam_mpi.model.engine.schedule import Buffer, BufferPlan, Call, Part, Phase, lay_out

BROADCAST = repr("broadcast")
"""First factor of `multiply_adds`: the same number in all lanes."""
LOAD = repr("load")
"""First factor of `multiply_adds`: a vector."""


class Source:
    """Emitted source: `head` comes first, then the functions that are made, then the lines."""

    def __init__(self) -> None:
        self.head: list[str] = []
        self.lines: list[str] = []
        self.depth = 0
        self.made: dict[str, str] = {}

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def inside(self, head: str) -> Iterator[None]:
        """Make the lines written meanwhile the body of `head`."""
        self(head)
        self.depth += 1
        yield
        self.depth -= 1

    @contextmanager
    def kernel(self, head: str, nest: str) -> Iterator[None]:
        """Make the lines written meanwhile the body of a compiled function; `nest` says what its loops do."""
        self("")
        self("")
        self("@kernel")
        with self.inside(f"def {head}:"):
            self(f'"""{nest}"""')
            yield

    def make(self, function: str, *arguments: object) -> str:
        """Return the name of a function that `function(arguments)` makes; it is made once, before all kernels."""
        call = f"{function}({', '.join(map(str, arguments))})"
        # Kernels have names of operators, some of which are names of functions too: none of those begins like this.
        return self.made.setdefault(call, f"made_{function.replace('.', '_')}_{len(self.made) + 1}")

    @property
    def text(self) -> str:
        """Return all source text that was emitted."""
        made = [f"{name} = {call}" for call, name in self.made.items()]
        return "\n".join(self.head + made + self.lines) + "\n"


Timed = Callable[[], float]
ARGUMENTS = (
    "part, training, overwrite, later, kept, weights, shared, gradient, memory, levels, pixels, labels, keys, "
    "probabilities, count"
)


@dataclass(frozen=True)
class Entry:
    """What the functions of a program compute."""

    parts: tuple[Part, ...]
    """What `run` computes; where parts have ports, it computes one of them per call."""
    fused_calls: tuple[Call, ...]
    """The fused updates of large dense layers."""
    blocks: int
    """Blocks of a pass."""
    own_blocks: int
    """Blocks of a rank's own images, in a hybrid replica."""
    lanes: int
    summed: tuple[tuple[int, int], ...]
    """Spans of the gradient that sums are added to: a gradient to be overwritten is made zero there first."""

    @property
    def cut(self) -> bool:
        """Return whether exchanges cut the emitted function into parts."""
        return any(part.port for part in self.parts)


def emit_entry(source: Source, entry: Entry) -> BufferPlan:
    """Emit `run` and, if there are fused updates, the function that applies them; return where the buffers lie."""
    lasting = [phase for part in entry.parts for phase in part.lasting(entry.own_blocks)]
    plan = lay_out([*lasting, Phase(False, entry.fused_calls)], entry.blocks)
    if entry.fused_calls:
        _emit_fused(source, entry.fused_calls, plan)
    source("")
    source("")
    source("@entry")
    with source.inside(f"def run({ARGUMENTS}):"):
        source('"""Sum of losses and number correct; in training gradients are added to `gradient`."""')
        source("before = flush_to_zero()")
        source("loss, correct = 0.0, 0")
        with source.inside("if training and overwrite and part == 0:"):
            for start, stop in entry.summed:
                source(f"gradient[{start}:{stop}] = 0")
        source(f"all_blocks = (count + {entry.lanes - 1}) // {entry.lanes}")
        with source.inside(f"for start in range(0, all_blocks, {entry.blocks}):"):
            source(f"blocks = min({entry.blocks}, all_blocks - start)")
            source("fresh = overwrite and start == 0")
            _emit_parts(source, entry, plan)
        source("restore(before)")
        source("return loss, correct")
    return plan


def _emit_parts(source: Source, entry: Entry, plan: BufferPlan) -> None:
    for number, part in enumerate(entry.parts):
        when = f"part == {number}" if entry.cut else "training" if part.training else ""
        with source.inside(f"if {when}:") if when else nullcontext():
            for phase in part.phases:
                emit_phase(source, phase, plan, entry.lanes)
            if not part.phases:
                source("pass")


def _emit_fused(source: Source, calls: Sequence[Call], plan: BufferPlan) -> None:
    source("")
    source("")
    source("@entry")
    with source.inside("def apply_fused(shared, contribution, memory, blocks, factor, unit_value):"):
        source('"""Update the large layers\' weights with what the last `blocks` blocks of images left in memory."""')
        source("before = flush_to_zero()")
        source("kept, first = 0, 0")
        for call in calls:
            _call(source, call, [_place(argument, plan, "") for argument in call.arguments])
        source("restore(before)")


def emit_timed(source: Source, phases: Sequence[Phase]) -> BufferPlan:
    """Emit `timed`, which runs `phases` for one block `repeat` times; return where the buffers lie."""
    plan = lay_out(phases, 1)
    source("")
    source("")
    source("@entry")
    with source.inside("def timed(weights, gradient, memory, repeat):"):
        source("before = flush_to_zero()")
        source("start, blocks = 0, 1")
        with source.inside("for _ in range(repeat):"):
            for phase in phases:
                emit_phase(source, phase, plan, 1)
        source("restore(before)")
    return plan


def emit_phase(source: Source, phase: Phase, plan: BufferPlan, lanes: int) -> None:
    """Emit the calls of `phase`; `start` is the first block, and `blocks` their number."""
    if not phase.by_block:
        source(f"first = start * {lanes}")
        for call in phase.calls:
            _call(source, call, [_place(argument, plan, "") for argument in call.arguments])
        return
    with source.inside("for block in range(blocks):"):
        source(f"first = (start + block) * {lanes}")
        for call in phase.calls:
            _call(source, call, [_place(argument, plan, "block") for argument in call.arguments])


def _place(argument: Buffer | str, plan: BufferPlan, block: str) -> str:
    """Return the expression of an argument: text as it is, of a buffer its offset, at `block` if that is not ""."""
    if isinstance(argument, str):
        return argument
    place = plan.places[argument]
    if argument.images:
        return f"{place} + (kept + first) * {argument.floats}"
    moving = f" + {block} * {argument.floats}" if block and argument.each_block else ""
    return f"{place}{moving}"


def _call(source: Source, call: Call, arguments: list[str]) -> None:
    if call.when:
        with source.inside(f"if {call.when}:"):
            _call(source, replace(call, when=""), arguments)
        return
    source(f"{'more = ' if call.kernel == 'cross_entropy' else ''}{call.kernel}({', '.join(arguments)})")
    if call.kernel == "cross_entropy":
        source("loss, correct = loss + more[0], correct + more[1]")
