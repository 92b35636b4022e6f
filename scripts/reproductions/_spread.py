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
