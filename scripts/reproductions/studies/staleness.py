"""Accuracy against the bound on staleness."""

from statistics import fmean
from typing import Any

from _study import (
    Difference,
    Found,
    Points,
    Scale,
    Table,
    accuracy_table,
    bars,
    by_variant,
    column,
    contrast,
    jobs,
    mean,
)

TITLE = "Accuracy against staleness"
KIND = "measured, 4 replicas"
PAPER = "The paper has the two ends, synchronous and without a bound, and finds the second better (Table 1)."
BOUNDS = ("0", "1", "2", "4", "8", "16", "inf")
BASE = ["data.set=mnist", "worker.threads=1", "train.batch=64"]


def points(scale: Scale) -> Points:
    variants = {bound: [f"consistency.staleness={bound}"] for bound in BOUNDS}
    return jobs(scale, variants, BASE, epochs=3, ranks=6)


def paint(axes: Any, found: Found) -> None:
    bars(axes, found)
    axes.set_xlabel("bound on staleness, clocks")


def table(found: Found) -> Table:
    """Return accuracy, speed and delay of each bound."""
    groups = by_variant(found)
    return accuracy_table(
        found,
        {
            "images/s": lambda name: f"{fmean(column(groups[name], 'images_per_second')):,.0f}",
            "delay of a push, steps": lambda name: f"{fmean(column(groups[name], 'delay')):.1f}",
        },
    )


def differences(found: Found) -> list[Difference]:
    """Return how the two ends differ."""
    return [contrast(found, "inf", "0")]


def verdict(found: Found) -> str:
    asynchronous = mean(found, "inf")
    synchronous = mean(found, "0")
    if asynchronous is None or synchronous is None:
        return "Not both ends are there yet."
    agreement = (
        "As in the paper, training without a bound is more accurate."
        if asynchronous > synchronous
        else "Unlike in the paper, training without a bound is not more accurate after so few epochs."
    )
    return f"{agreement} The learning rate is the same for all: this shows what delay does, not what is best for each."
