"""Figures of a whole job and how they follow from reports and histograms. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypedDict

from adam_mpi.cluster.statistics import LayerStatistics, ServerStatistics


class BytesMoved(TypedDict):
    """Bytes that the job has moved so far."""

    pushed: int
    pulled: int
    served: int


class Gauges(TypedDict):
    """What `metrics.jsonl` says besides the figures of a phase: about the whole job so far, and about the moment."""

    rate: float
    bytes: BytesMoved
    staleness_histogram: dict[str, int]
    apply_batch: float
    store_lag: float
    busy: dict[str, float]
    layers: dict[str, LayerStatistics]


class WorkerTimes(TypedDict):
    """Images that a worker has trained on, and seconds in which its threads computed or waited."""

    images: float
    busy: float
    starved: float
    clock_wait: float
    waits: dict[str, float]


class Distribution(TypedDict):
    """A histogram with its maximum and mean."""

    max: int
    mean: float
    histogram: dict[str, int]


def distribution(histogram: Counter[int]) -> Distribution:
    """Return `histogram` with its maximum and mean."""
    return {
        "max": max(histogram, default=0),
        "mean": round(mean(histogram), 4),
        "histogram": {str(value): histogram[value] for value in sorted(histogram)},
    }


def coarse(histogram: Counter[int]) -> dict[int, int]:
    """Return `histogram` exact up to 8, then by powers of two: it stays short however far replicas drift apart."""
    total: Counter[int] = Counter()
    for value, count in histogram.items():
        total[value if value <= 8 else 1 << value.bit_length() - 1] += count
    return dict(sorted(total.items()))


def mean(histogram: Counter[int]) -> float:
    """Return the mean value of `histogram`; 0 for an empty one."""
    return sum(value * count for value, count in histogram.items()) / max(histogram.total(), 1)


def average(values: Collection[float]) -> float:
    """Return the mean of `values`; 0 for none."""
    return sum(values) / max(len(values), 1)


def applied_pushes(servers: Sequence[ServerStatistics]) -> dict[str, int]:
    """Return, by pusher, the last of its pushes that every shard of the strip has that it had last."""
    tables = [{(pusher, strip): number for pusher, strip, number in report["tables"]} for report in servers]
    strips = [report["strips"] for report in servers]
    last: dict[str, int] = {}
    for pusher, strip in {key for table in tables for key in table}:
        # A server of that strip without an entry for the pusher has none of its pushes.
        has = [table.get((pusher, strip), 0) for table, own in zip(tables, strips, strict=True) if strip in own]
        last[pusher] = max(last.get(pusher, 0), min(has))
    return last
