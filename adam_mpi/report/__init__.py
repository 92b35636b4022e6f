"""Write an HTML page about one run or several side by side, for the command `adam_mpi report`."""

from collections.abc import Sequence
from pathlib import Path

from adam_mpi.base.errors import UserError
from adam_mpi.report import sections
from adam_mpi.report.run_data import Run, read_run
from adam_mpi.sweep.jobs import ABOUT


def write_report(paths: Sequence[Path], output: Path) -> str:
    """Write the HTML report about the runs at `paths` to `output`; return a line about it."""
    if not output.parent.is_dir():
        raise UserError(f"report -o {output}: there is no folder {output.parent}; make it, or give another file")
    paths = [run for path in paths for run in _runs(path)]
    runs = [read_run(path, name) for path, name in zip(paths, names(paths), strict=True)]
    parts = [
        ("Runs", sections.figures(runs) + sections.differences(runs)),
        ("Curves", sections.curves(runs)),
        ("Throughput by role", sections.throughput(runs)),
        ("Staleness", sections.staleness(runs)),
        ("Traffic by layer and protocol", sections.traffic(runs)),
        ("Balance of workers and strips", sections.balance(runs)),
        ("Recoveries", sections.recoveries(runs)),
        ("Layers", sections.layers(runs)),
        *((f"What it learned{_suffix(runs, run)}", sections.learned(run)) for run in runs),
    ]
    title = "adam_mpi: " + ", ".join(run.name for run in runs)
    try:
        output.write_text(sections.page(title, parts))
    except OSError as error:
        raise UserError(f"report -o {output}: {error.strerror}; give another file") from None
    return f"{output}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {output.stat().st_size / 1e6:.1f} MB"


def _runs(path: Path) -> list[Path]:
    """Return `path` itself as a run to report, or the runs of a sweep's folder that have finished an epoch."""
    if (path / "config.toml").exists() or not (path / ABOUT).exists():
        return [path]
    found = sorted(file.parent for file in path.glob("*/summary.json") if (file.parent / "metrics.jsonl").exists())
    if not found:
        raise UserError(f"{path}: no run of this sweep has finished an epoch; run the same sweep command to resume")
    return found


def names(paths: Sequence[Path]) -> list[str]:
    """Return the runs' names in the report: those of their folders, or paths where two folders have the same name."""
    short = [path.resolve().name for path in paths]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"report {' '.join(map(str, paths))}: a run is given twice")
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _suffix(runs: Sequence[Run], run: Run) -> str:
    """Return the end of a report section's title about one of `runs`: its name, if there are several."""
    return f": {run.name}" if len(runs) > 1 else ""
