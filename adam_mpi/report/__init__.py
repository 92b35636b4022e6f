"""`adam_mpi report RUN [RUN...] -o report.html`: runs side by side on one page that needs nothing but a browser."""

from collections.abc import Sequence
from pathlib import Path

from adam_mpi.base.errors import UserError
from adam_mpi.report import sections
from adam_mpi.report import sections as page
from adam_mpi.report.run_data import Run, read
from adam_mpi.sweep.jobs import ABOUT


def report(paths: Sequence[Path], output: Path) -> str:
    """Write the page; returns a line about it."""
    if not output.parent.is_dir():
        raise UserError(f"report -o {output}: there is no folder {output.parent}; make it, or give another file")
    paths = [run for path in paths for run in _runs(path)]
    runs = [read(path, name) for path, name in zip(paths, names(paths), strict=True)]
    parts = [
        ("Runs", sections.figures(runs) + sections.differences(runs)),
        ("Curves", sections.curves(runs)),
        ("Throughput by role", sections.throughput(runs)),
        ("Staleness", sections.staleness(runs)),
        ("Traffic by layer and protocol", sections.traffic(runs)),
        ("Balance of workers and strips", sections.balance(runs)),
        ("Recoveries", sections.recoveries(runs)),
        ("Layers", sections.layers(runs)),
        *((f"What it learned{_of(runs, run)}", sections.learned(run)) for run in runs),
    ]
    title = "adam_mpi: " + ", ".join(run.name for run in runs)
    try:
        output.write_text(page.page(title, parts))
    except OSError as error:
        raise UserError(f"report -o {output}: {error.strerror}; give another file") from None
    return f"{output}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {output.stat().st_size / 1e6:.1f} MB"


def _runs(path: Path) -> list[Path]:
    """The run itself; of a sweep's folder, its runs that have finished an epoch."""
    if (path / "config.toml").exists() or not (path / ABOUT).exists():
        return [path]
    found = sorted(file.parent for file in path.glob("*/summary.json") if (file.parent / "metrics.jsonl").exists())
    if not found:
        raise UserError(f"{path}: no run of this sweep has finished an epoch; the same sweep command goes on with it")
    return found


def names(paths: Sequence[Path]) -> list[str]:
    """What the runs are called: as their folders, or by the whole path where two have the same name."""
    short = [path.resolve().name for path in paths]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"report {' '.join(map(str, paths))}: a run is given twice")
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _of(runs: Sequence[Run], run: Run) -> str:
    return f": {run.name}" if len(runs) > 1 else ""
