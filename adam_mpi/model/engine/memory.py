"""Place the buffers of a program in memory: those whose lifetimes do not meet share it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
