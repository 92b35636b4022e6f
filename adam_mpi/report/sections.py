"""Make the sections of the report: each function takes runs and returns HTML."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.base.log import format_bytes
from adam_mpi.config import Config
from adam_mpi.inference.trained import Trained, load
from adam_mpi.model.metrics import class_rows
from adam_mpi.monitor.aggregate_statistics import coarse_histogram
from adam_mpi.report import charts
from adam_mpi.report.run_data import Run, evaluate_run

WORST = 30
"""Images with the least probability of their class that are shown."""
MOST_FILTERS = 60
"""Filters of the first layer that are shown."""
FIGURES = {
    "status": ("status", ""),
    "train_loss": ("train loss", ".4f"),
    "epochs": ("epochs", ""),
    "images": ("images", ","),
    "images_per_second": ("images per second", ",.0f"),
    "seconds": ("seconds", ".1f"),
}
"""Key of the summary -> its name and its format."""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table of the report with the heads of its columns."""
    cells = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def note(text: str) -> str:
    """Return a paragraph of the report in place of what cannot be shown."""
    return f"<p class=note>{escape(text)}</p>"


def figures(runs: Sequence[Run]) -> str:
    """Return the section with the table of the main figures, a column for each run."""

    def shown(run: Run, key: str) -> str:
        value = run.summary.get(key)
        return "" if value is None else format(value, FIGURES[key][1])

    rows: list[list[object]] = [[FIGURES[key][0], *(shown(run, key) for run in runs)] for key in FIGURES]
    rows[1:1] = _monitored(runs)
    rows.append(["ranks", *(_rank_counts(run.summary["ranks"]) for run in runs)])
    rows.append(["staleness, mean", *(run.summary["staleness"]["mean"] for run in runs)])
    for name in ("pushes", "pulls"):
        rows.append([f"{name}, bytes", *(format_bytes(run.summary[name]["bytes"]) for run in runs)])
    rows.append(["hosts", *(", ".join(run.summary["provenance"]["hosts"]) for run in runs)])
    rows.append(["commit", *(run.summary["provenance"]["commit"] for run in runs)])
    return table(["", *(run.name for run in runs)], rows)


def _monitored(runs: Sequence[Run]) -> list[list[object]]:
    """Return the table rows of the report's monitored figures: of the test part, and the best validation."""

    def shown(run: Run, name: str, key: str) -> str:
        value = run.summary.get(key)
        return "" if value is None or run.monitor.name != name else run.monitor.text(value)

    rows: list[list[object]] = []
    for name in dict.fromkeys(run.monitor.name for run in runs):
        words = name.replace("_", " ")
        rows.append([f"test {words}", *(shown(run, name, f"test_{name}") for run in runs)])
        rows.append([f"best {words} of validation", *(shown(run, name, f"best_{name}") for run in runs)])
    return rows


def _rank_counts(ranks: Mapping[str, int]) -> str:
    """Return the numbers of ranks by role as text of the report."""
    return f"{ranks['total']}: {ranks['data']} data, {ranks['worker']} worker, {ranks['server']} server"


def differences(runs: Sequence[Run]) -> str:
    """Return the section with the table of the configuration keys in which the runs differ."""
    settings = [dict(_section_keys(run.config)) for run in runs]
    keys = [key for key in settings[0] if len({str(each[key]) for each in settings}) > 1 and key != "run.name"]
    if len(runs) == 1:
        return ""
    if not keys:
        return note("All have the same configuration.")
    return table(["differs", *(run.name for run in runs)], [[key, *(each[key] for each in settings)] for key in keys])


def _section_keys(section: Config | Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every key of a configuration section, with those of the sections in it, and its value, to report."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _section_keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def curves(runs: Sequence[Run]) -> str:
    """Return the section with charts of loss and monitored figures over images and time; dots: validation."""
    shown = []
    for axis, unit in (("images_trained", "images trained on"), ("seconds", "seconds")):
        for figure in dict.fromkeys(["loss", *(run.monitor.name for run in runs)]):
            series = {
                f"{run.name} {part}": _metric_series(run.lines(part, done=part != "train"), axis, figure)
                for run in runs
                for part in ("train", "validation")
            }
            dots = [name for name in series if name.endswith("validation")]
            title = f"{figure} by {axis.split('_')[0]}"
            shown.append(charts.lines(title, series, unit, figure, log=figure == "loss", dots=dots))
    return "".join(shown)


def _metric_series(lines: Sequence[Mapping[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the values of `x` and of `y` in all lines of metrics, for a chart of the report."""
    shown = [line for line in lines if y in line]
    return [line[x] for line in shown], [line[y] for line in shown]


def throughput(runs: Sequence[Run]) -> str:
    """Return the section with charts of training speed, busy share of each role and CPU time of each rank."""
    speeds = {run.name: _metric_series(run.lines(), "seconds", "images_per_second") for run in runs}
    shown = [charts.lines("training speed", speeds, "seconds", "images/s")]
    for run in runs:
        lines = run.lines()
        seconds = [line["seconds"] for line in lines]
        busy = {role: (seconds, [line["busy"][role] for line in lines]) for role in ("data", "worker", "server")}
        shown.append(charts.lines(f"busy: {run.name}", busy, "seconds", "share of the time"))
    cpu = {run.name: {f"rank {rank}": spent for rank, spent in run.summary["cpu_seconds"].items()} for run in runs}
    return "".join(shown) + charts.bars("CPU seconds", cpu, "seconds")


def staleness(runs: Sequence[Run]) -> str:
    """Return the section with charts of staleness and delay, and the table of the time that clocks cost."""
    shown = []
    for key, title in (("staleness", "clocks ahead of the slowest replica"), ("delay", "steps between pull and push")):
        heights = {run.name: _wide_bins(run.summary[key]["histogram"]) for run in runs}
        shown.append(charts.bars(title, heights, "pushes" if key == "staleness" else "messages"))
    clocks = [(run.name, run.summary["staleness"]) for run in runs]
    rows = [[name, found["max"], f"{found['clock_wait']:.1f}"] for name, found in clocks]
    return "".join(shown) + table(["run", "most clocks ahead", "seconds of waiting for clocks, all replicas"], rows)


def _wide_bins(histogram: Mapping[str, int]) -> dict[str, float]:
    """Return a histogram of the summary with wider bins for larger values, for a chart of the report."""
    counts = Counter({int(value): count for value, count in histogram.items()})
    return {str(value): float(count) for value, count in coarse_histogram(counts).items()}


def traffic(runs: Sequence[Run]) -> str:
    """Return the section with charts of the bytes that each layer pushed, by protocol."""
    shown = []
    for run in runs:
        heights: dict[str, dict[str, float]] = defaultdict(dict)
        for name, size in run.summary["traffic"].items():
            layer, protocol = name.split()
            heights[protocol][layer] = size / 2**20
        shown.append(charts.bars(f"{run.name}: bytes by layer", heights, "MB", stacked=True))
    return "".join(shown)


def balance(runs: Sequence[Run]) -> str:
    """Return the section with charts of the time that the threads of each worker were busy or waited."""
    shown = []
    for run in runs:
        seconds: dict[str, dict[str, float]] = defaultdict(dict)
        for rank, worker in run.summary["workers"].items():
            name = f"{rank} ({run.strips[rank]})" if rank in run.strips else rank
            for what, spent in {"busy": worker["busy"], **worker["waits"]}.items():
                seconds[what if what == "busy" else f"waits for {what}"][name] = spent
        shown.append(charts.bars(f"{run.name}: rank (replica.strip)", seconds, "seconds", stacked=True))
    return "".join(shown)


def recoveries(runs: Sequence[Run]) -> str:
    """Return the section with the table of the recoveries after lost ranks."""
    found = [(run.name, recovery) for run in runs for recovery in run.summary.get("recoveries", [])]
    if not found:
        return note("None: no rank was lost.")
    keys = list(dict.fromkeys(key for _, recovery in found for key in recovery))
    return table(
        ["run", *keys], [[name, *(_table_value(recovery.get(key)) for key in keys)] for name, recovery in found]
    )


def _table_value(value: object) -> object:
    """Return a value of the summary as a table of the report shows it."""
    return "; ".join(map(str, value)) if isinstance(value, list) else "" if value is None else value


def layers(runs: Sequence[Run]) -> str:
    """Return the section with charts of norms and dead units of each layer over time."""
    shown = []
    for run in runs:
        lines = [line for line in run.lines() if line["layers"]]
        for key, title in (("gradient_norm", "gradient norm"), ("weight_norm", "weight norm"), ("dead", "dead units")):
            names = [name for name in (lines[-1]["layers"] if lines else {}) if key in lines[-1]["layers"][name]]
            series = {}
            for name in names:
                having = [line for line in lines if name in line["layers"]]
                series[name] = [at["images_trained"] for at in having], [at["layers"][name][key] for at in having]
            if series:
                log = key == "gradient_norm"
                shown.append(charts.lines(f"{run.name}: {title}", series, "images trained on", title, log))
    return "".join(shown) or note("The run has no statistics of its layers.")


def learned(run: Run) -> str:
    """Return the section with first-layer filters, confusion matrix and worst images of a run."""
    try:
        model = load(run.path)
        found = evaluate_run(model, WORST)
    except UserError as error:
        return note(f"Not shown: {error}")
    names = model.names
    right = np.trace(found.confusion) / max(found.confusion.sum(), 1)
    title = f"test images: {right:.2%} of {found.confusion.sum():,} right"
    captions = [
        f"{names[label]} → {names[predicted]}\n{probability:.2g}"
        for label, predicted, probability in zip(found.labels, found.predicted, found.probabilities, strict=True)
    ]
    worst = "the worst images: class → predicted class, and the probability of the class"
    matrix = charts.matrix(title, found.confusion, names) + _class_table(found.confusion, names)
    return _filter_images(model) + matrix + charts.gallery(worst, found.images, captions)


def _class_table(confusion: np.ndarray, names: Sequence[str]) -> str:
    """Return the report's table of each class: its images, how many are right, and what others are taken for."""
    rows = [
        [name, images, "" if np.isnan(share) else f"{share:.2%}", other]
        for name, images, share, other in class_rows(confusion, names)
    ]
    return table(["class", "images", "right", "most often taken for"], rows)


def _filter_images(model: Trained) -> str:
    """Return the first layer's weights as images for the report: filters, or the inputs of dense units."""
    shape = next(shape for shape in model.shapes if shape.weight)
    weight = model.tensors[f"{shape.name}/weight"][:MOST_FILTERS]
    images = weight if weight.ndim == 4 else weight.reshape(len(weight), *shape.input)
    return charts.gallery(f"{shape.name}: {len(images)} of its {shape.output[0]} filters", images, ())


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
nav a { margin-right: 1rem; } a { color: #1f5fa8; text-decoration: none; }
table { border-collapse: collapse; margin: 0.8rem 0; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 0.2rem 0.9rem 0.2rem 0; border-bottom: 1px solid #eee; vertical-align: top; }
img { max-width: 100%; margin: 0.3rem 0.6rem 0.3rem 0; vertical-align: top; } .note { color: #666; }
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return the HTML page of the report with `sections`, each a title and its HTML."""
    links = "".join(f'<a href="#{place}">{escape(head)}</a>' for place, (head, _) in enumerate(sections))
    body = "".join(f'<h2 id="{place}">{escape(head)}</h2>{text}' for place, (head, text) in enumerate(sections))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1><nav>{links}</nav>{body}</body></html>\n"
    )
