"""Aggregate the reports of all ranks into statistics of the job: sums, distributions, and warnings about them. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from adam_mpi.cluster.role_statistics import LayerStatistics, ServerStatistics
from adam_mpi.monitor.divergence import AT_CHANCE


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
    """Return the job's `histogram` with its maximum and mean, as a distribution."""
    return {
        "max": max(histogram, default=0),
        "mean": round(histogram_mean(histogram), 4),
        "histogram": {str(value): histogram[value] for value in sorted(histogram)},
    }


def coarse_histogram(histogram: Counter[int]) -> dict[int, int]:
    """Return a job's `histogram` exact up to 8, then by powers of two: it stays short however far replicas drift."""
    total: Counter[int] = Counter()
    for value, count in histogram.items():
        total[value if value <= 8 else 1 << value.bit_length() - 1] += count
    return dict(sorted(total.items()))


def histogram_mean(histogram: Counter[int]) -> float:
    """Return the mean value of `histogram`, one of the statistics of the job; 0 for an empty one."""
    return sum(value * count for value, count in histogram.items()) / max(histogram.total(), 1)


def mean_of_ranks(values: Collection[float]) -> float:
    """Return the mean of `values` of all ranks; 0 for none."""
    return sum(values) / max(len(values), 1)


def applied_pushes(servers: Sequence[ServerStatistics]) -> dict[str, int]:
    """Return, by pusher, the last push that every shard of its strip has, aggregated from the servers' reports."""
    tables = [{(pusher, strip): number for pusher, strip, number in report["tables"]} for report in servers]
    strips = [report["strips"] for report in servers]
    last: dict[str, int] = {}
    for pusher, strip in {key for table in tables for key in table}:
        # A server of that strip without an entry for the pusher has none of its pushes.
        has = [table.get((pusher, strip), 0) for table, own in zip(tables, strips, strict=True) if strip in own]
        last[pusher] = max(last.get(pusher, 0), min(has))
    return last


NOISE = 3.0
"""Standard deviations by which an accuracy must be above the one of guessing."""
FIRST_BATCHES = 10
"""Batches of a phase before its losses are judged."""


def diverged(figures: Mapping[str, float], batch: int, done: bool) -> bool:
    """Return whether most losses in a phase's statistics are not finite: then nothing is learned any more.

    `figures`: those of the phase so far; `batch`: images per batch; `done`: whether the phase is over.
    """
    enough = figures["images"] >= FIRST_BATCHES * batch or done
    return enough and 2 * figures["images_not_finite"] > figures["images"]


def guessed(accuracy: float, labels: np.ndarray) -> float | None:
    """Return the share of the largest class if the job's `accuracy` is not above it by more than chance, else None."""
    share = float(np.bincount(labels).max()) / len(labels)
    spread = (share * (1 - share) / len(labels)) ** 0.5
    return share if share < 1 and accuracy <= share + NOISE * spread else None


def at_chance(results: Mapping[str, Any], part: str, labels: np.ndarray) -> bool:
    """Return whether the statistics of `part` show that the network guesses: by its accuracy and its loss."""
    if not len(labels) or guessed(results[f"{part}_accuracy"], labels) is None:
        return False
    shares = np.bincount(labels) / len(labels)
    entropy = -float(np.sum(shares[shares > 0] * np.log(shares[shares > 0])))
    return not results[f"{part}_loss"] < AT_CHANCE * entropy


def dead(layers: Mapping[str, LayerStatistics]) -> list[str]:
    """Return the layers all of whose units are dead in the statistics, unless there was no gradient at all."""
    last = list(layers.values())[-1] if layers else LayerStatistics()
    if not last.get("gradient_norm"):
        return []
    return [name for name, row in layers.items() if row.get("dead") == 1]


def weight_norm(layers: Mapping[str, LayerStatistics]) -> float | None:
    """Return the norm of the weights of all `layers` in the statistics; None where no worker has looked at them."""
    return sum(row["weight_norm"] ** 2 for row in layers.values()) ** 0.5 if layers else None


def warnings(
    results: Mapping[str, Any], labels: Mapping[str, np.ndarray], layers: Mapping[str, LayerStatistics]
) -> list[str]:
    """Return why the statistics of a job that has ended show no success, one sentence per reason.

    `labels`: those of the parts that were evaluated, the one that counts first; `layers`: as the workers saw them last.
    """
    found = []
    for part, known in list(labels.items())[:1]:
        accuracy = results[f"{part}_accuracy"]
        if len(known) and (share := guessed(accuracy, known)) is not None:
            found.append(
                f"nothing was learned: {part} accuracy {accuracy:.2%}, and always the largest class is {share:.2%}; "
                "try a lower optimizer.learning_rate, or less momentum"
            )
    found.extend(f"all units of {name} are dead: no image makes one of them answer" for name in dead(layers))
    return found
