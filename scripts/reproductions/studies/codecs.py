"""Accuracy against the codec of pushes."""

from statistics import fmean
from typing import Any

from _study import Found, Points, Scale, accuracies, bars, by_variant, jobs

TITLE = "Accuracy against codec"
KIND = "measured, 2 replicas"
PAPER = "The paper does not compress; these are the codecs of its neighbors."
CODECS = ("none", "float16", "bfloat16", "onebit", "topk")


def points(scale: Scale) -> Points:
    variants = {codec: [f"push.codec={codec}"] for codec in CODECS}
    return jobs(scale, variants, ["data.set=mnist", "push.protocol=delta"], epochs=4)


def paint(axes: Any, found: Found) -> None:
    bars(axes, found)


def verdict(found: Found) -> str:
    groups = by_variant(found)
    sent = {name: fmean(_bytes(point) for point in own) for name, own in groups.items()}
    told = ", ".join(f"{name} {sent['none'] / size:.1f}" for name, size in sent.items())
    return f"{accuracies(found)} Times fewer bytes pushed: {told}."


def _bytes(point: dict[str, Any]) -> float:
    """Pushed for one image."""
    return point["pushed_bytes"] / point["images"]
