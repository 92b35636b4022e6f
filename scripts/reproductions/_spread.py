"""Figures of several seeds."""

from collections.abc import Sequence
from statistics import fmean, stdev

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


def compared(one: str, other: str, first: Sequence[float], second: Sequence[float]) -> str:
    """A sentence about a difference, in %."""
    found = difference(first, second)
    if found is None:
        return f"The difference of {one} and {other} needs two seeds of each."
    value, low, high = found
    told = "cannot be told from zero" if low <= 0 <= high else "is not zero"
    seeds = f"{len(first)} and {len(second)} seeds"
    return (
        f"{one.capitalize()} - {other}: {value:+.3f} %, 95 % interval {low:+.3f} to {high:+.3f} % (Welch, {seeds}): "
        f"the difference {told}."
    )
