"""`adam_mpi report RUN [RUN...] -o report.html`: runs side by side on one page that needs nothing but a browser."""

from collections.abc import Sequence
from pathlib import Path

from adam_mpi.errors import UserError
from adam_mpi.observe.report import page, sections
from adam_mpi.observe.report.run import Run, read


def report(paths: Sequence[Path], output: Path) -> str:
    """Write the page; returns a line about it."""
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
    output.write_text(page.page(title, parts))
    return f"{output}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {output.stat().st_size / 1e6:.1f} MB"


def names(paths: Sequence[Path]) -> list[str]:
    """What the runs are called: as their folders, or by the whole path where two have the same name."""
    short = [path.resolve().name for path in paths]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"report {' '.join(map(str, paths))}: a run is given twice")
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _of(runs: Sequence[Run], run: Run) -> str:
    return f": {run.name}" if len(runs) > 1 else ""
