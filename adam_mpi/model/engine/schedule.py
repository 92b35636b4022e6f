"""Schedule a program: put its steps in order, and place buffers whose lifetimes do not meet in the same memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from adam_mpi.model.exchange import BACK, FORWARD, Assembly, Exchange, Port

ALIGNMENT = 16
"""Floats in a cache line."""


@dataclass(frozen=True)
class Buffer:
    """`floats` for each block of a pass; or once, for one block at a time or, if it is `lasting`, for all of them.

    With `images` it has `floats` for each of that many images, and what is in it stays until that is written again.
    """

    name: str
    floats: int
    each_block: bool = True
    lasting: bool = False
    images: int = 0


@dataclass(frozen=True)
class Call:
    """A kernel call: arguments are buffers or text; made only where the expression `when` is true, if there is one."""

    kernel: str
    arguments: tuple[Buffer | str, ...]
    when: str = ""


@dataclass
class Step:
    """What one layer, or several fused ones, call: forward and backward, by block or for all blocks at once.

    `prepare` comes before all blocks' forward, `clear` before and `finish` after their backward; what is `later`, after
    all blocks' backward. `interior`: of the way forward, what no other strip waits for.
    """

    by_block: bool
    forward: list[Call]
    backward: list[Call] = field(default_factory=list)
    prepare: list[Call] = field(default_factory=list)
    clear: list[Call] = field(default_factory=list)
    finish: list[Call] = field(default_factory=list)
    later: list[Call] = field(default_factory=list)
    interior: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Phase:
    """Calls in order: all of them for one block after the other, or each for all blocks."""

    by_block: bool
    calls: tuple[Call, ...]
    blocks: int = 0
    """How many blocks there are at the most; 0: as many as in all phases."""


@dataclass(frozen=True)
class Lifetime:
    """First and last call that touches a buffer."""

    buffer: Buffer
    first: int
    last: int


@dataclass(frozen=True)
class BufferPlan:
    """The offset of each buffer in memory, in floats, and how many floats there are."""

    places: dict[Buffer, int]
    floats: int
    unshared: int
    """Floats that there would be if no buffers shared memory."""


def lifetimes(phases: Sequence[Phase]) -> list[Lifetime]:
    """Return how long each buffer lives; one that outlives a block lives through the whole phase."""
    found: dict[Buffer, tuple[int, int]] = {}
    clock = 0
    whole = (0, sum(len(phase.calls) for phase in phases))
    for phase in phases:
        in_phase = (clock, clock + len(phase.calls))
        for call in phase.calls:
            for buffer in [argument for argument in call.arguments if isinstance(argument, Buffer)]:
                span = in_phase if phase.by_block and (buffer.each_block or buffer.lasting) else (clock, clock)
                old = found.get(buffer, whole if buffer.images else span)
                found[buffer] = min(old[0], span[0]), max(old[1], span[1])
            clock += 1
    return [Lifetime(buffer, *span) for buffer, span in found.items()]


def lay_out(phases: Sequence[Phase], blocks: int) -> BufferPlan:
    """Return the plan of the buffers of passes of up to `blocks` blocks: largest first, each as low as it fits."""
    places: dict[Buffer, int] = {}
    placed: list[Lifetime] = []
    sizes = _sizes(phases, blocks)
    for lifetime in sorted(lifetimes(phases), key=lambda lifetime: -sizes[lifetime.buffer]):
        met = [other for other in placed if other.first <= lifetime.last and lifetime.first <= other.last]
        taken = [(places[other.buffer], sizes[other.buffer]) for other in met]
        places[lifetime.buffer] = _lowest(sizes[lifetime.buffer], taken)
        placed.append(lifetime)
    floats = max((places[buffer] + sizes[buffer] for buffer in places), default=0)
    return BufferPlan(places, floats, unshared=sum(sizes.values()))


def _sizes(phases: Sequence[Phase], blocks: int) -> dict[Buffer, int]:
    """Return the size of each buffer: room for as many blocks as the phases have that touch it."""
    found: dict[Buffer, int] = {}
    for phase in phases:
        for buffer in (a for call in phase.calls for a in call.arguments if isinstance(a, Buffer)):
            found[buffer] = max(found.get(buffer, 0), size(buffer, phase.blocks or blocks))
    return found


def size(buffer: Buffer, blocks: int) -> int:
    """Return the floats that `buffer` takes in passes of `blocks` blocks, in whole cache lines."""
    floats = buffer.floats * (buffer.images or (blocks if buffer.each_block else 1))
    return -(-floats // ALIGNMENT) * ALIGNMENT


def _lowest(wanted: int, taken: list[tuple[int, int]]) -> int:
    """Return the lowest offset of `wanted` free floats between those that are `taken`: (offset, length) each."""
    place = 0
    for start, length in sorted(taken):
        if place + wanted <= start:
            break
        place = max(place, start + length)
    return place


@dataclass(frozen=True)
class Crossing:
    """An exchange, and the buffers on both sides of it."""

    exchange: Exchange
    owned: Buffer
    needed: Buffer
    owned_errors: Buffer
    needed_errors: Buffer
    learning: bool
    """Whether errors go back through it."""


@dataclass(frozen=True)
class Part:
    """Phases with no exchange between them."""

    phases: tuple[Phase, ...]
    training: bool = False
    """Whether it runs only in training."""
    port: Port | None = None
    """The exchange that begins when it ends."""
    meanwhile: bool = False
    """Whether it may run while the exchange that the part before it began is under way."""
    handed: tuple[Buffer, ...] = ()
    """Buffers of the exchange that is complete before the next part begins."""
    own: bool = False
    """Whether it computes only this rank's own images, in a hybrid replica."""

    def lasting(self, own_blocks: int) -> tuple[Phase, ...]:
        """Return all calls that touch buffers, to see how long they live; `own_blocks` hold this rank's own images."""
        phases = [replace(phase, blocks=own_blocks) for phase in self.phases] if self.own else self.phases
        # Both sides of the exchange; the larger one is larger in its own phases.
        return (*phases, Phase(False, (Call("exchange", self.handed),), own_blocks))


def assemble(groups: Sequence[list[Step]], crossings: Sequence[Crossing], load: Call, end: Call) -> tuple[Part, ...]:
    """Return the parts of a program; `groups` are steps between exchanges, `load` comes first, `end` is the loss."""
    found: list[Part] = []
    own = any(isinstance(crossing.exchange, Assembly) for crossing in crossings)
    for number, steps in enumerate(groups):
        begin = [Phase(False, _calls(steps, "prepare")), Phase(True, (load,) if number == 0 else ())]
        phases = merged([*begin, *(Phase(step.by_block, tuple(step.forward)) for step in steps)])
        if number < len(crossings):
            interior = merged([Phase(step.by_block, tuple(step.interior)) for step in steps])
            between = crossings[number].owned, crossings[number].needed
            handed = () if interior else between
            found.append(Part(phases, port=Port(number, FORWARD), handed=handed, own=own and number == 0))
            found += [Part(interior, meanwhile=True, handed=between)] if interior else []
        else:
            found.append(Part((*phases, Phase(False, (end,))), **_back(number, crossings)))
    last = next((number for number, crossing in enumerate(crossings) if crossing.learning), len(crossings))
    # Behind the exchange before the loss there is nothing to go back through.
    for number in range(len(groups) - 1 - bool(crossings), last - 1, -1):
        found += _backward(groups[number], number, crossings if number > last else ())
    # An assembly is the first exchange, and only its own group goes back behind it.
    return (*found[:-1], replace(found[-1], own=own and last == 0))


def _backward(steps: list[Step], number: int, crossings: Sequence[Crossing]) -> list[Part]:
    """Return the way back of group `number`; without `crossings` it is the last one on the way back."""
    clear = Phase(False, _calls(steps, "clear"))
    finish = Phase(False, _calls(steps, "finish"))
    phases = [clear, *(Phase(step.by_block, tuple(step.backward)) for step in reversed(steps))]
    if not crossings:
        return [Part(merged([*phases, finish]), training=True)]
    later = merged([*(Phase(step.by_block, tuple(step.later)) for step in reversed(steps)), finish])
    back = _back(number, crossings)
    return [
        Part(merged(phases), training=True, port=back["port"]),
        Part(later, training=True, meanwhile=True, handed=back["handed"]),
    ]


def _back(number: int, crossings: Sequence[Crossing]) -> dict:
    """Return the exchange before group `number` on the way back, as arguments of `Part`."""
    if not crossings:
        return {}
    crossing = crossings[number - 1]
    errors = (crossing.needed_errors, crossing.owned_errors) if crossing.learning else ()
    return {"port": Port(number - 1, BACK), "handed": errors}


def _calls(steps: Sequence[Step], when: str) -> tuple[Call, ...]:
    return tuple(call for step in steps for call in getattr(step, when))


def merged(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Return `phases` with neighbors of one kind made one, and without those that call nothing."""
    found: list[Phase] = []
    for phase in [phase for phase in phases if phase.calls]:
        if found and found[-1].by_block == phase.by_block:
            phase = Phase(phase.by_block, found.pop().calls + phase.calls)
        found.append(phase)
    return tuple(found)
