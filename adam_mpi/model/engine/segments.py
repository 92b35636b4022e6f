"""Put steps in order: forward, loss, backward. Those of a strip are cut into parts where strips exchange something."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adam_mpi.model.engine.memory import Buffer, Call, Phase, Step
from adam_mpi.model.exchange import Assembly, Exchange
from adam_mpi.model.exchange_buffers import BACK, FORWARD, Port


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
