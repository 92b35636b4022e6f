"""What a timeline costs: the same job with and without `observe.trace`, in turns, and one span by itself.

`throughput_with_trace`: images per second of CPU time of a job of one rank, which records the spans of all roles, with
the timeline against without it: the median of pairs in one process, now the one, now the other first. (Jobs of several
ranks on few cores differ by a quarter from each other, with or without.)
`writing`: CPU time that the file takes after training.
`recording`: events of a job of three ranks times what one costs, as a share of the CPU time of all its ranks.
"""

import argparse
import gzip
import json
import tempfile
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import _jobs

from adam_mpi import train
from adam_mpi.base import trace

SETTINGS = ("train.epochs=6", "worker.threads=1")
SPANS = 100_000


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=5, help="jobs of each kind")


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    _rate("false")
    pairs, writing = [], []
    for number in range(arguments.pairs):
        order = ("true", "false") if number % 2 else ("false", "true")
        figures = {traced: _rate(traced) for traced in order}
        pairs.append((figures["true"][0], figures["false"][0]))
        writing.append(figures["true"][1] - figures["false"][1])
    value, plain = median(traced / plain for traced, plain in pairs), [plain for _, plain in pairs]
    yield {"name": "throughput_with_trace", "value": round(value, 4), "unit": "x", "target": 0.97}
    yield {"name": "writing", "value": round(median(writing), 2), "unit": "s"}
    yield {"name": "spread_without", "value": round(min(plain) / max(plain), 4), "unit": "x"}
    cost = _span(on=True)
    yield {"name": "recording", "value": round(_recording(cost), 5), "unit": "share", "target": 0.03, "most": True}
    yield {"name": "span_on", "value": round(cost), "unit": "ns"}
    yield {"name": "span_off", "value": round(_span(on=False)), "unit": "ns"}


def _rate(traced: str) -> tuple[float, float]:
    """Images per second of CPU time until training is over, and the CPU time after it."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        train(overrides=[*SETTINGS, f"observe.trace={traced}"], run=Path(folder, "run"))
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        over = summary["cpu_seconds"]["0"]
        return summary["images"] / (over - began), time.process_time() - over


def _recording(cost: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        summary, _ = _jobs.run(3, *SETTINGS, "observe.trace=true", keep=folder)
        with gzip.open(Path(folder, "run", "trace.json.gz"), "rt") as file:
            events = len(json.load(file)["traceEvents"])
    return events * cost / 1e9 / sum(summary["cpu_seconds"].values())


def _span(on: bool) -> float:
    def one() -> None:
        with trace.span("kernels"):
            pass

    if on:
        trace.start(room=SPANS)
    seconds = min(timeit.repeat(one, number=SPANS, repeat=5)) / SPANS
    trace.stop()
    return 1e9 * seconds
