"""The results of a sweep: the monitored figure and the time to a target for each value, and the value to take."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from adam_mpi.checkpoint.run_directory import read_metrics
from adam_mpi.model.metrics import ACCURACY, Monitor, read_monitor
from adam_mpi.sweep.jobs import Point


@dataclass(frozen=True)
class Outcome:
    """One finished run: its monitored figure over time, and figures of its summary."""

    curve: list[tuple[float, float]]
    """(seconds, monitored figure) of each pass over the validation part."""
    images_per_second: float
    staleness: float
    monitor: Monitor = ACCURACY.monitor

    @property
    def best(self) -> float:
        """Return the best value of the monitored figure of a run of the sweep; NaN without any."""
        found = [value for _, value in self.curve if not math.isnan(value)]
        return (max if self.monitor.mode == "max" else min)(found, default=math.nan)

    def seconds_to(self, target: float) -> float | None:
        """Return the seconds until the monitored figure of a run of the sweep reaches `target`, or None."""
        return next((seconds for seconds, value in self.curve if self.monitor.reaches(value, target)), None)


@dataclass(frozen=True)
class Row:
    """The finished runs of one value."""

    value: str
    outcomes: list[Outcome]
    times: list[float]
    """Seconds to the target, of the runs that reached it."""

    @property
    def mean(self) -> float:
        """Return the mean time to the target of the runs in a row of the sweep's table."""
        return fmean(self.times)

    @property
    def reliable(self) -> bool:
        """Return whether every run in a row of the sweep's table reached the target."""
        return len(self.times) == len(self.outcomes) > 0


def read_outcome(run: Path) -> Outcome:
    """Return the outcome of a sweep's run in a directory; the seconds of a resumed run are added up."""
    summary = json.loads((run / "summary.json").read_text())
    monitor = read_monitor(summary)
    curve = []
    before = 0.0
    last = 0.0
    for entry in read_metrics(run):
        if entry["seconds"] < last:
            before += last
        last = entry["seconds"]
        if entry["part"] == "validation" and entry["done"]:
            curve.append((before + last, entry[monitor.name]))
    return Outcome(curve, summary["images_per_second"], summary["staleness"].get("mean") or 0.0, monitor)


def table_rows(points: Sequence[Point], outcomes: dict[Point, Outcome], target: float) -> list[Row]:
    """Return a row of the sweep's table for each value, with its finished runs."""
    found: list[Row] = []
    for values in dict.fromkeys(point.values for point in points):
        own = [outcome for point, outcome in outcomes.items() if point.values == values]
        times = [time for outcome in own if (time := outcome.seconds_to(target)) is not None]
        found.append(Row(" ".join(values), own, times))
    return found


def usual_target(outcomes: Sequence[Outcome]) -> float:
    """Return the value of the monitored figure that half of the sweep's runs reach."""
    return median(outcome.best for outcome in outcomes)


def table_lines(found: Sequence[Row], target: float) -> Iterator[str]:
    """Yield the lines of the sweep's table, and the advice."""
    width = max(len(row.value) for row in found)
    monitor = _monitor(found)
    best = f"best {monitor.name.replace('_', ' ')}"
    yield f"{'':{width}}  runs  {'seconds to ' + monitor.text(target):>20}  {best:>16}  images/s  staleness"
    for row in found:
        yield f"{row.value:{width}}  {len(row.outcomes):4}  {_figures(row) if row.outcomes else ''}".rstrip()
    yield advice(found, target)


def _figures(row: Row) -> str:
    """Return the columns of a row of the sweep's table that has finished runs."""
    reached = _mean_and_deviation(row.times) if row.reliable else f"{len(row.times)} of {len(row.outcomes)} reached it"
    values = [outcome.best for outcome in row.outcomes]
    percent = row.outcomes[0].monitor.percent
    best = (
        _mean_and_deviation([100 * value for value in values], 2) + " %" if percent else _mean_and_deviation(values, 4)
    )
    speed = fmean(outcome.images_per_second for outcome in row.outcomes)
    staleness = fmean(outcome.staleness for outcome in row.outcomes)
    return f"{reached:>20}  {best:>16}  {speed:8,.0f}  {staleness:9.2f}"


def advice(found: Sequence[Row], target: float) -> str:
    """Return a sentence about the sweep's value that reaches the target first, and those as good."""
    monitor = _monitor(found)
    shown = monitor.text(target)
    ranked = sorted((row for row in found if row.reliable), key=lambda row: row.mean)
    if not ranked:
        easier = "a lower" if monitor.mode == "max" else "a higher"
        return f"No value reached {shown} in all its runs; train longer, or give {easier} --target."
    best, *others = ranked
    close = [row.value for row in others if row.mean - best.mean <= _deviation(best.times) + _deviation(row.times)]
    text = f"Take {best.value}: {best.mean:.1f} s to {shown} on average"
    if close:
        text += f"; within the spread of the seeds as good: {', '.join(close)}"
    if any(len(row.times) == 1 for row in ranked):
        text += "; one seed is no evidence, give --seeds 3 or more"
    return text + "."


def _monitor(found: Sequence[Row]) -> Monitor:
    """Return the monitored figure of the sweep's runs, which is that of the first one."""
    return next((outcome.monitor for row in found for outcome in row.outcomes), ACCURACY.monitor)


def _mean_and_deviation(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and standard deviation as text for the sweep's table."""
    return f"{fmean(values):.{digits}f} ± {_deviation(values):.{digits}f}"


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of `values` of a sweep's row; 0 if there is one only."""
    return stdev(values) if len(values) > 1 else 0.0
