"""Accuracy when replicas see different shares of the data."""

from typing import Any

from _study import Difference, Found, Points, Scale, Table, accuracy_table, bars, contrast, jobs, mean

TITLE = "Accuracy against skew of the data"
KIND = "measured, 4 replicas, asynchronous"
PAPER = "The paper shuffles everything; this asks what that is worth."
SKEWS = ("none", "dirichlet:10", "dirichlet:1", "dirichlet:0.1", "by_class")
LITTLE = 0.01
BASE = ["data.set=mnist", "worker.threads=1", "epoch.assignment=static"]


def points(scale: Scale) -> Points:
    return jobs(scale, {skew: [f"data.skew={skew}"] for skew in SKEWS}, BASE, epochs=4, ranks=6)


def paint(axes: Any, found: Found) -> None:
    bars(axes, found)
    axes.set_xlabel("how classes are dealt out to replicas")


def table(found: Found) -> Table:
    """Return the accuracy of each way to share the data out."""
    return accuracy_table(found)


def differences(found: Found) -> list[Difference]:
    """Return how the most uneven shares differ from even ones."""
    return [contrast(found, SKEWS[-1], SKEWS[0])]


def verdict(found: Found) -> str:
    return _agreement(found)


def _agreement(found: Found) -> str:
    best, worst = mean(found, SKEWS[0]), mean(found, SKEWS[-1])
    if best is None or worst is None:
        return "Not both ends are there yet."
    if best - worst > LITTLE:
        return f"So shuffling is worth {100 * (best - worst):.1f} %, and the paper does well to do it."
    return (
        f"Shuffling over replicas is worth {100 * (best - worst):.1f} % here, which is little. A guess why, not "
        "measured: they pull every few batches, hold nearly the same weights, and what the server adds up is a mixture "
        "of all of them."
    )
