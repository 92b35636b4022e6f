"""The runs of a sweep: every combination of the values, with every seed. Pure."""

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adam_mpi.base.errors import UserError


@dataclass(frozen=True)
class Point:
    """One run: its values and seed, and its run directory."""

    values: tuple[str, ...]
    """`section.key=value` of each key that is swept over."""
    seed: int
    run: Path

    @property
    def name(self) -> str:
        """The values and the seed as text."""
        return f"{' '.join(self.values)} seed={self.seed}"

    def arguments(self, base: Sequence[str]) -> list[str]:
        """Return the arguments of `train` for this run, after those that all runs have."""
        settings = [word for pair in (*self.values, f"run.seed={self.seed}") for word in ("--set", pair)]
        return [*base, *settings, "--run", str(self.run), "--resume"]


def points(over: Sequence[str], seeds: int, folder: Path) -> list[Point]:
    """Return the runs of all values with all seeds; seeds vary slowest, so that every value is soon tried once."""
    axes = [_axis(text) for text in over]
    return [
        Point(values, seed, folder / _file_name(values, seed))
        for seed in range(1, seeds + 1)
        for values in itertools.product(*axes)
    ]


def lines(points: Sequence[Point], base: Sequence[str]) -> str:
    """Return the arguments of each run as a line for the shell, which the tasks of a Slurm array read."""
    return "".join(shlex.join(point.arguments(base)) + "\n" for point in points)


def _axis(text: str) -> list[str]:
    """Return the settings of one key: "consistency.staleness=0,1" gives two; raise UserError for other text."""
    key, equals, values = text.partition("=")
    if not equals or "." not in key or not all(values.split(",")):
        raise UserError(f"--over {text}: expected section.key=value,value, e.g. --over consistency.staleness=0,4,inf")
    if key == "run.seed":
        raise UserError("--over run.seed: give the number of seeds, e.g. --seeds 3")
    return [f"{key}={value}" for value in values.split(",")]


def _file_name(values: Sequence[str], seed: int) -> str:
    """Return the name of the run directory of `values` and `seed`."""
    return re.sub(r"[^\w.=+-]+", "_", ",".join([*values, f"seed={seed}"]))
