"""What a timeline costs: the same job with and without `observe.trace`, in turns, and one span by itself.

`throughput_with_trace`: images per second of CPU time of the worker's rank, the only one whose work sets the pace, with
the timeline against without it, median of the pairs; `wall` is the same by the clock.
"""

import argparse
import timeit
from collections.abc import Iterator
from statistics import median

import _jobs

from adam_mpi.observe import trace

SETTINGS = ("train.epochs=2", "worker.threads=1", "layout.data=1", "layout.servers=1")
WORKER = 2
SPANS = 100_000


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=5, help="jobs of each kind")


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    pairs = [(_run("true"), _run("false")) for _ in range(arguments.pairs)]
    cpu = median(on[0] / off[0] for on, off in pairs)
    wall = median(on[1] / off[1] for on, off in pairs)
    yield {"name": "throughput_with_trace", "value": round(cpu, 4), "unit": "x", "target": 0.97, "wall": round(wall, 4)}
    yield {"name": "span_on", "value": round(_span(on=True)), "unit": "ns"}
    yield {"name": "span_off", "value": round(_span(on=False)), "unit": "ns"}


def _run(traced: str) -> tuple[float, float]:
    """Images per second: of CPU time of the worker's rank, and of the clock in the last epoch."""
    summary, phases = _jobs.run(3, *SETTINGS, f"observe.trace={traced}")
    last = [phase for phase in phases if phase["part"] == "train"][-1]
    return summary["images"] / summary["cpu_seconds"][str(WORKER)], last["images_per_second"]


def _span(on: bool) -> float:
    def one() -> None:
        with trace.span("kernels"):
            pass

    if on:
        trace.start(room=SPANS)
    seconds = min(timeit.repeat(one, number=SPANS, repeat=5)) / SPANS
    trace.stop()
    return 1e9 * seconds
