"""What a timeline costs: the same job with and without `observe.trace`, in turns, and one span by itself.

`throughput_with_trace`: images per second of CPU time of the worker's rank, the only one whose work sets the pace, with
the timeline against without it; `wall` is the same by the clock. Of each pair now the one, now the other is first.
`recording`: events of a job times what one costs, as a share of the CPU time of all its ranks.
"""

import argparse
import gzip
import json
import tempfile
import timeit
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import _jobs

from adam_mpi.observe import trace

SETTINGS = ("train.epochs=2", "worker.threads=1", "layout.data=1", "layout.servers=1")
WORKER = 2
SPANS = 100_000


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=5, help="jobs of each kind")


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    rates: dict[str, list[tuple[float, float]]] = {"true": [], "false": []}
    for pair in range(arguments.pairs):
        for traced in ("true", "false") if pair % 2 else ("false", "true"):
            rates[traced].append(_run(traced))
    cpu, wall = (
        median(rate[way] for rate in rates["true"]) / median(rate[way] for rate in rates["false"]) for way in (0, 1)
    )
    yield {"name": "throughput_with_trace", "value": round(cpu, 4), "unit": "x", "target": 0.97, "wall": round(wall, 4)}
    yield {"name": "spread_without", "value": round(_spread(rates["false"]), 4), "unit": "x"}
    cost = _span(on=True)
    yield {"name": "recording", "value": round(_recording(cost), 5), "unit": "share", "target": 0.03, "most": True}
    yield {"name": "span_on", "value": round(cost), "unit": "ns"}
    yield {"name": "span_off", "value": round(_span(on=False)), "unit": "ns"}


def _spread(rates: list[tuple[float, float]]) -> float:
    """The least against the greatest, by CPU time: what differs between equal jobs."""
    return min(rate[0] for rate in rates) / max(rate[0] for rate in rates)


def _run(traced: str) -> tuple[float, float]:
    """Images per second: of CPU time of the worker's rank, and of the clock in the last epoch."""
    summary, phases = _jobs.run(3, *SETTINGS, f"observe.trace={traced}")
    last = [phase for phase in phases if phase["part"] == "train"][-1]
    return summary["images"] / summary["cpu_seconds"][str(WORKER)], last["images_per_second"]


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
