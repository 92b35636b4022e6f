"""Accuracy against the bound on staleness."""

from statistics import fmean
from typing import Any

from _study import Found, Points, Scale, accuracies, bars, by_variant, column, contrast, jobs, mean

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


def verdict(found: Found) -> str:
    groups = by_variant(found)
    rates = ", ".join(f"{name} {fmean(column(own, 'images_per_second')):,.0f}" for name, own in groups.items())
    delays = ", ".join(f"{name} {fmean(column(own, 'delay')):.1f}" for name, own in groups.items())
    ends = [mean(found, name) for name in ("inf", "0")]
    agreement = "Not both ends are there yet."
    if ends[0] is not None and ends[1] is not None:
        agreement = (
            "As in the paper, training without a bound is more accurate."
            if ends[0] > ends[1]
            else "Unlike in the paper, training without a bound is not more accurate after so few epochs."
        )
    return (
        f"{accuracies(found)} {contrast(found, 'inf', '0')} {agreement} Images/s by bound: {rates}. Delay of a push in "
        f"steps: {delays}. The learning rate is the same for all: this is what delay does, not what is best for each."
    )
