"""Figures of several seeds."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import stats

CONFIDENCE = 0.95


def spread(values: Sequence[float], digits: int = 2, factor: float = 1.0) -> str:
    """Mean and standard deviation, for people."""
    deviation = f" ± {factor * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{factor * fmean(values):.{digits}f}{deviation}"


def difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float] | None:
    """first - second with its 95 % interval, by Welch's t-test; None where one of them has a single value."""
    if min(len(first), len(second)) < 2:
        return None
    found = stats.ttest_ind(first, second, equal_var=False).confidence_interval(CONFIDENCE)
    return fmean(first) - fmean(second), float(found.low), float(found.high)


def sentence(text: str) -> str:
    """With a capital at the start, and names as they are."""
    return text[:1].upper() + text[1:]


def chance(first: float, second: float, images: int) -> float:
    """Half the 95 % interval of the difference of two accuracies in %, each of so many images drawn anew."""
    variance = sum(accuracy * (100 - accuracy) / images for accuracy in (first, second))
    return float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * math.sqrt(variance)


class Difference(NamedTuple):
    """A difference of accuracies in %, with its 95 % interval and how that was found."""

    name: str
    value: str
    interval: str
    how: str


def difference_row(
    one: str, other: str, first: Sequence[float], second: Sequence[float], images: int = 0
) -> Difference:
    """Return the difference of two accuracies in %; with `images`, one seed of each gives an interval too."""
    name = f"{one} - {other}"
    found = difference(first, second)
    if found is not None:
        value, low, high = found
        return Difference(
            name, f"{value:+.3f}", f"{low:+.3f} to {high:+.3f}", f"Welch, {len(first)} and {len(second)} seeds"
        )
    if not (images and first and second):
        return Difference(name, "", "", "needs two seeds of each")
    value = first[0] - second[0]
    off = chance(first[0], second[0], images)
    return Difference(name, f"{value:+.3f}", f"{value - off:+.3f} to {value + off:+.3f}", f"of {images:,} images")


def compared(one: str, other: str, first: Sequence[float], second: Sequence[float], images: int = 0) -> str:
    """A sentence about a difference of accuracies, in %; with `images` one seed of each says a little too."""
    found = difference(first, second)
    if found is None and not (images and first and second):
        return f"The difference of {one} and {other} needs two seeds of each."
    if found is None:
        value, off = first[0] - second[0], chance(first[0], second[0], images)
        low, high, how = value - off, value + off, f"of {images:,} images; seeds may differ more"
    else:
        (value, low, high), how = found, f"Welch, {len(first)} and {len(second)} seeds"
    told = "cannot be told from zero" if low <= 0 <= high else "is not zero"
    return (
        f"{sentence(one)} - {other}: {value:+.3f} %, 95 % interval {low:+.3f} to {high:+.3f} % ({how}): "
        f"the difference {told}."
    )
