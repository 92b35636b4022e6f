"""`adam_mpi sweep`: from the values to the table."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.sweep import jobs
from adam_mpi.sweep import table as tables
from adam_mpi.sweep.points import Point, points


@dataclass(frozen=True)
class Sweep:
    config: str | None
    settings: Sequence[str]
    over: Sequence[str]
    seeds: int
    ranks: int
    folder: Path | None
    target: float | None
    launch: str | None
    only_table: bool


def sweep(wanted: Sweep) -> Iterator[str]:
    """Winograd1D to print, as they come."""
    if wanted.seeds < 1 or wanted.ranks < 1:
        raise UserError("--seeds and -n: give at least 1")
    base = [*([wanted.config] if wanted.config else []), *(w for pair in wanted.settings for w in ("--set", pair))]
    folder = wanted.folder or _folder(wanted, base)
    planned = points(wanted.over, wanted.seeds, folder)
    for point in planned:
        # A value that is not allowed shows before the first job, not in the middle of the night.
        config.load(wanted.config, [*wanted.settings, *point.values])
    if not wanted.only_table:
        line = jobs.prepare(folder, planned, base, wanted.ranks)
        yield f"{len(planned)} runs, {sum(map(jobs.done, planned))} of them done; as a Slurm array: {line}"
        try:
            yield from jobs.run(planned, base, wanted.ranks, wanted.launch)
        except KeyboardInterrupt:
            told = f"interrupted; {sum(map(jobs.done, planned))} of {len(planned)} runs are done"
            raise KeyboardInterrupt(f"{told}; the same command goes on with the others") from None
    yield from _results(planned, wanted)


def _folder(wanted: Sweep, base: Sequence[str]) -> Path:
    """Return the first folder named after the keys that does not hold a sweep of other jobs."""
    name = f"sweep-{'-'.join(text.partition('=')[0] for text in wanted.over)}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if jobs.other(path, base, wanted.ranks) is None)


def _results(planned: Sequence[Point], wanted: Sweep) -> Iterator[str]:
    outcomes = {point: tables.read(point.run) for point in planned if jobs.done(point)}
    if not outcomes:
        raise UserError("no run of this sweep is done; run it without --table")
    goal = wanted.target or config.load(wanted.config, wanted.settings).train.target
    target = goal or tables.usual_target(list(outcomes.values()))
    yield from tables.table(tables.rows(planned, outcomes, target), target)
    if not goal:
        yield f"{target:.2%} of validation is what half of the runs reach; --target sets another."
    if missing := len(planned) - len(outcomes):
        yield f"{missing} of {len(planned)} runs are not done; the same command goes on with them."
