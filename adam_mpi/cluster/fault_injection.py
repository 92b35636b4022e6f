"""Faults injected at named points of the program, for studies of stragglers and failures, and for tests.

A fault is a line `KIND key=value ...` with `rank=N` or `role=NAME` for the ranks that have it.
docs/explanation/failures.md lists the kinds and the points.
"""

import logging
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.cluster.layout import Place

POINTS = (
    "start",
    "batch",
    "compute",
    "push",
    "pull",
    "apply",
    "applied",
    "prepare",
    "rebuild",
    "evaluate",
    "store",
    "write",
    "snapshot",
    "rename",
    "recover",
    "exchange",
)
KEYS: dict[str, dict[str, type]] = {
    "slow": {"factor": float},
    "delay": {"at": str, "seconds": float},
    "kill": {"at": str, "step": str},
    "stop": {"at": str, "step": str},
    "raise": {"at": str, "step": str},
    "rate": {"factor": float, "step": str, "steps": int},
    "labels": {"step": str, "steps": int},
}
LASTING = {"rate": "apply", "labels": "batch"}
"""Kind of a fault that lasts for several visits -> the only point where it can be."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """A fault of the ranks with `rank` or `role`, at the visits `first` to `last` of the point `at`."""

    kind: str
    rank: int | None
    role: str | None
    at: str = "compute"
    first: int = 1
    last: int = 1
    factor: float = 1.0
    seconds: float = 0.0
    steps: int = 0
    """For how many visits it lasts; 0 is until the end."""

    def applies_to(self, place: Place) -> bool:
        """Return whether the rank at `place` has this injected fault."""
        return place.rank == self.rank or self.role in place.roles


class InjectedFault(Exception):
    """Raised by a `raise` fault."""


def parse_faults(lines: Sequence[str]) -> list[Fault]:
    """Return the injected faults that `inject.faults` lists; raise UserError for a line that is none."""
    return [_parse_line(f"inject.faults[{index}]", line) for index, line in enumerate(lines)]


def check_faults(faults: Sequence[Fault], places: Sequence[Place]) -> None:
    """Raise UserError for an injected fault that applies to no rank of `places`."""
    for index, fault in enumerate(faults):
        if any(fault.applies_to(place) for place in places):
            continue
        if fault.rank is not None:
            what = f"inject.faults[{index}]: there is no rank {fault.rank}"
            raise UserError(f"{what}; give one of 0 to {len(places) - 1}")
        roles = sorted({role for place in places for role in place.roles})
        raise UserError(f"inject.faults[{index}]: no rank has the role {fault.role}; give one of {', '.join(roles)}")


def _parse_line(name: str, line: str) -> Fault:
    """Return the injected fault that the `line` of the configuration key `name` describes."""
    kind, *words = line.split() or [""]
    if kind not in KEYS:
        raise UserError(f"{name} = {line!r}: unknown fault; allowed: {', '.join(KEYS)}")
    allowed: dict[str, type] = {"rank": int, "role": str, **KEYS[kind]}
    given: dict[str, Any] = {"rank": None, "role": None}
    for word in words:
        key, _, text = word.partition("=")
        try:
            given[key] = allowed[key](text)
        except (KeyError, ValueError):
            raise UserError(f"{name} = {line!r}: {word!r}: allowed for {kind}: {'=…, '.join(allowed)}=…") from None
    if (given["rank"] is None) == (given["role"] is None):
        raise UserError(f"{name} = {line!r}: give either rank=N or role=data|worker|server")
    if given.get("at", "compute") not in POINTS:
        raise UserError(f"{name} = {line!r}: unknown point; at= is one of {', '.join(POINTS)}")
    first, last = _steps(name, line, given.pop("step", "1"))
    if kind in LASTING:
        given["at"] = LASTING[kind]
    return Fault(kind, first=first, last=last, **given)


def _steps(name: str, line: str, text: str) -> tuple[int, int]:
    """Return the first and last visit at which a fault is injected, from `step=` `text`, a number or a range."""
    first, _, last = text.partition("..")
    if not first.isdigit() or not (last or "0").isdigit():
        raise UserError(f"{name} = {line!r}: step= is a number or a range like 10..50, drawn by run.seed")
    return int(first), int(last or first)


class Injector:
    """The faults of one rank, triggered at the points that the program visits, on trainer threads too."""

    def __init__(self, faults: Sequence[Fault], place: Place, seed: int) -> None:
        """Draw the steps of `faults` by `seed`, and keep those of the rank at `place`."""
        draw = np.random.Generator(np.random.Philox(key=seed))
        # Every rank draws for every fault, so that the step does not depend on the rank.
        drawn = [(fault, int(draw.integers(fault.first, fault.last + 1))) for fault in faults]
        self.faults = [(fault, step) for fault, step in drawn if fault.applies_to(place)]
        self.place = place
        self.visits: Counter[str] = Counter()
        self.lock = threading.Lock()

    def announce(self) -> None:
        """Log the faults that are injected into this rank, once its log is open."""
        for fault, step in self.faults:
            log.warning("this rank has an injected fault: %s (step %d)", fault, step)

    def at(self, point: str) -> None:
        """Count a visit of the fault injection `point`, and trigger the faults of this visit."""
        if not self.faults:
            return
        with self.lock:
            self.visits[point] += 1
            visit = self.visits[point]
        for fault, step in self.faults:
            if fault.at == point and fault.kind == "delay":
                time.sleep(fault.seconds)
            elif fault.at == point and fault.kind != "slow" and visit == step:
                self._trigger(fault.kind, point, visit)

    def rate_factor(self) -> float:
        """Return by what an injected fault multiplies the learning rate of this visit of `apply`."""
        return math.prod(fault.factor for fault in self._lasting("rate"))

    def target_order(self, images: int) -> np.ndarray | slice:
        """Return which image's target an injected fault gives each of `images` images: its own, or any."""
        if not self._lasting("labels"):
            return slice(None)
        draw = np.random.Generator(np.random.Philox(key=self.visits["batch"]))
        return draw.permutation(images)

    def _lasting(self, kind: str) -> list[Fault]:
        """Return the injected faults of `kind` that have begun and are not over."""
        if not self.faults:
            return []
        return [
            fault
            for fault, step in self.faults
            if fault.kind == kind and 0 <= self.visits[fault.at] - step < (fault.steps or math.inf)
        ]

    def latency(self, point: str) -> float:
        """Return the seconds that injected delays at `point` add to a transfer there, without blocking a thread."""
        return sum(fault.seconds for fault, _ in self.faults if fault.kind == "delay" and fault.at == point)

    def slow(self, seconds: float) -> None:
        """Make work that took `seconds` take `factor` times as long, as an injected straggler does."""
        for fault, _ in self.faults:
            if fault.kind == "slow":
                time.sleep(seconds * (fault.factor - 1))

    def _trigger(self, kind: str, point: str, visit: int) -> None:
        """Log the injected fault and trigger it: raise an error, or kill or stop this rank."""
        log.warning("injected %s at %s, step %d", kind, point, visit)
        if kind in LASTING:
            return
        if kind == "raise":
            raise InjectedFault(f"injected at {point}, step {visit}, on {self.place}")
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
