"""Run a sweep, from the values to the table, for the command `adam_mpi sweep`."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.sweep import jobs
from adam_mpi.sweep import table as tables
from adam_mpi.sweep.jobs import Point, points


@dataclass(frozen=True)
class Sweep:
    """The arguments of a sweep."""

    config: str | None
    """TOML file, or the name of a ready model."""
    settings: Sequence[str]
    """`section.key=value` of keys that are the same in all runs."""
    over: Sequence[str]
    """`section.key=value,value` of keys to sweep over."""
    seeds: int
    """Runs of each combination of values."""
    ranks: int
    """Ranks of each job."""
    folder: Path | None
    target: float | None
    """Value of the monitored figure of validation whose time is compared."""
    launch: str | None
    """Command that starts a job."""
    only_table: bool
    """Whether to train nothing, and show the table of the finished runs."""


def sweep(wanted: Sweep) -> Iterator[str]:
    """Train what is missing of a sweep; yield the lines to print, as jobs end, and the table at the end."""
    if wanted.seeds < 1 or wanted.ranks < 1:
        raise UserError("--seeds and -n: give at least 1")
    base = [wanted.config] if wanted.config else []
    base += [word for pair in wanted.settings for word in ("--set", pair)]
    folder = wanted.folder or _sweep_folder(wanted, base)
    planned = points(wanted.over, wanted.seeds, folder)
    for point in planned:
        # A value that is not allowed is refused before the first job starts.
        config.load(wanted.config, [*wanted.settings, *point.values])
    if not wanted.only_table:
        line = jobs.prepare_sweep(folder, planned, base, wanted.ranks)
        yield f"{len(planned)} runs, {sum(map(jobs.done, planned))} of them done; as a Slurm array: {line}"
        try:
            yield from jobs.run_jobs(planned, base, wanted.ranks, wanted.launch)
        except KeyboardInterrupt:
            progress = f"interrupted; {sum(map(jobs.done, planned))} of {len(planned)} runs are done"
            raise KeyboardInterrupt(f"{progress}; run the same command to resume") from None
    yield from _table_of_results(planned, wanted)


def _sweep_folder(wanted: Sweep, base: Sequence[str]) -> Path:
    """Return the first folder named after the keys of the sweep that does not hold other jobs."""
    name = f"sweep-{'-'.join(text.partition('=')[0] for text in wanted.over)}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if jobs.other(path, base, wanted.ranks) is None)


def _table_of_results(planned: Sequence[Point], wanted: Sweep) -> Iterator[str]:
    """Yield the table of the finished runs of the sweep; raise UserError if none is finished."""
    outcomes = {point: tables.read_outcome(point.run) for point in planned if jobs.done(point)}
    if not outcomes:
        raise UserError("no run of this sweep is done; run it without --table")
    goal = wanted.target or config.load(wanted.config, wanted.settings).train.target
    target = goal or tables.usual_target(list(outcomes.values()))
    yield from tables.table_lines(tables.table_rows(planned, outcomes, target), target)
    if not goal:
        monitor = next(iter(outcomes.values())).monitor
        name = monitor.name.replace("_", " ")
        yield f"Half of the runs reach {monitor.text(target)} of validation; --target sets another {name}."
    if missing := len(planned) - len(outcomes):
        yield f"{missing} of {len(planned)} runs are not done; run the same command to resume."
