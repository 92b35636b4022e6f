"""Epochs that end when three of four replicas are done, with one replica slowed down."""

from statistics import fmean
from typing import Any

from _study import Difference, Found, Points, Scale, Table, accuracy_table, by_variant, column, contrast, jobs

TITLE = "75 % quorum with a slow replica"
KIND = "measured"
PAPER = (
    "The paper ends an epoch when 75 % of the replicas are done with their share, so that it does not wait for the "
    "slowest, and sees no loss of accuracy."
)
SLOW = 'inject.faults=["slow rank=5 factor=4"]'
BASE = ["data.set=mnist", "worker.threads=1", SLOW]
VARIANTS = {
    "all replicas": ["epoch.assignment=static"],
    "75 % of them": ["epoch.assignment=static", "epoch.quorum=0.75"],
    "as asked for": ["epoch.assignment=dynamic"],
}


def points(scale: Scale) -> Points:
    return jobs(scale, VARIANTS, BASE, epochs=4, ranks=6)


def paint(axes: Any, found: Found) -> None:
    groups = by_variant(found)
    seconds = [fmean(_epoch(point) for point in own) for own in groups.values()]
    axes.bar(range(len(groups)), seconds, 0.6, color="C0", alpha=0.5)
    for place, own in enumerate(groups.values()):
        axes.text(place, seconds[place], f"{fmean(column(own, 'accuracy')):.2%}", ha="center", va="bottom")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel("seconds per epoch (above: accuracy, held out)")
    axes.margins(y=0.15)


def _epoch(point: dict[str, Any]) -> float:
    """Seconds of training for one epoch."""
    return point["images"] / point["images_per_second"] / point["epochs"]


def table(found: Found) -> Table:
    """Return accuracy and seconds of an epoch of each way to hand out batches."""
    seconds = {name: fmean(_epoch(point) for point in own) for name, own in by_variant(found).items()}
    return accuracy_table(found, {"seconds per epoch": lambda name: f"{seconds[name]:.2f}"})


def differences(found: Found) -> list[Difference]:
    """Return what the quorum costs in accuracy."""
    return [contrast(found, "75 % of them", "all replicas")]


def verdict(found: Found) -> str:
    seconds = {name: fmean(_epoch(point) for point in own) for name, own in by_variant(found).items()}
    waiting, quorum, dynamic = (seconds.get(name) for name in VARIANTS)
    if not (waiting and quorum and dynamic):
        return "Not all ways have been measured yet."
    return (
        f"One of four replicas takes four times as long; an epoch is {waiting / quorum:.1f} times as short with "
        "the quorum, "
        f"and {waiting / dynamic:.1f} times with batches handed out as asked for, which leaves nothing out."
    )
