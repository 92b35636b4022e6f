"""What a run directory knows about divergences: when weights were spoiled, and the learning rate that followed."""

import json
from dataclasses import dataclass
from pathlib import Path

from adam_mpi.base.files import write_json

NAME = "divergences.json"


@dataclass(frozen=True)
class Divergences:
    """The divergences of a run."""

    spoiled: tuple[tuple[float, float], ...] = ()
    """From when to when weights were spoiled, in seconds since 1970."""
    number: int = 0
    """How often the run has gone back to an earlier state."""
    rate_scale: float = 1.0
    """The factor of the configured learning rate since then."""

    def spoils(self, at: float) -> bool:
        """Return whether weights of the time `at` were spoiled."""
        return any(since < at <= until for since, until in self.spoiled)

    @property
    def last(self) -> float:
        """Return when the last divergence of the run was noticed; 0 without one."""
        return max((until for _, until in self.spoiled), default=0.0)


def read(run: Path) -> Divergences:
    """Return the divergences that `run` has recorded; none where the file is missing or cannot be read."""
    try:
        content = json.loads((run / NAME).read_text())
        spoiled = tuple((float(since), float(until)) for since, until in content["spoiled"])
        return Divergences(spoiled, int(content["number"]), float(content["rate_scale"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Divergences()


def add(run: Path, span: tuple[float, float], *, number: int, rate_scale: float) -> None:
    """Add to the run's divergences the `span` of time in which weights were spoiled, with `number` and `rate_scale`."""
    spoiled = [*read(run).spoiled, span]
    write_json(run / NAME, {"spoiled": spoiled, "number": number, "rate_scale": rate_scale})
