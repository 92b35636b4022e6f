"""What studies share: how much of each is wanted, and points that are training jobs with several seeds."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import tomli_w
from _spread import Difference, difference_row, spread
from _training import Hosts, Training

from adam_mpi.base.errors import UserError

Points = dict[str, Callable[[], dict[str, Any] | None]]
"""Name -> what measures it; None when time was up first."""
Found = Mapping[str, dict[str, Any]]
Table = list[list[str]]
"""Rows of cells; the first is the header."""
HELD_OUT = 5000
"""Images of MNIST and Fashion-MNIST that judge: a twelfth of the training part."""


@dataclass(frozen=True)
class Scale:
    training: Training
    seeds: int
    epochs: int | None
    settings: tuple[str, ...]
    """Over those of the studies."""


def jobs(
    scale: Scale, variants: Mapping[str, Sequence[str]], base: Sequence[str], epochs: int, ranks: int = 4
) -> Points:
    """ "VARIANT, seed N" for each; seeds vary slowest, so that every variant has one first."""
    return {
        f"{variant}, seed {seed}": partial(job, scale, [*base, *settings, f"run.seed={seed}"], epochs, ranks)
        for seed in range(1, scale.seeds + 1)
        for variant, settings in variants.items()
    }


def by_threads(measure: Callable[[str, int], dict[str, Any]], names: Iterable[str]) -> Points:
    """ "NAME, N threads" for each, up to as many as there are cores."""
    threads = range(1, (os.cpu_count() or 1) + 1)
    return {f"{name}, {count} threads": partial(measure, name, count) for name in names for count in threads}


def job(
    scale: Scale, settings: Sequence[str], epochs: int, ranks: int = 4, hosts: Hosts | None = None
) -> dict[str, Any] | None:
    """Figures of a training job; it does not look at the test set."""
    words = [*settings, f"train.epochs={scale.epochs or epochs}", "train.test=false", *scale.settings]
    run = scale.training.run({}, words, ranks, hosts)
    if run is None:
        return None
    summary = run.summary
    if "validation_accuracy" not in summary:
        raise UserError("a study needs a validation part: data.validation above 0")
    return {
        "accuracy": summary["validation_accuracy"],
        "images_per_second": summary["images_per_second"],
        "images": summary["images"],
        "images_skipped": summary["images_skipped"],
        "epochs": summary["epochs"],
        "seconds": summary["seconds"],
        "delay": summary["delay"]["mean"],
        "lead": summary["staleness"]["mean"],
        "clock_wait": summary["staleness"]["clock_wait"],
        "pushes": summary["pushes"]["sent"],
        "pushed_bytes": summary["pushes"]["bytes"],
        "traffic": summary["traffic"],
        "replicas": summary["ranks"]["replicas"],
        "settings": list(words),
    }


POOL = {"kind": "max_pool", "size": 2}


def conv(maps: int, kernel: int, pad: int = 0) -> dict[str, Any]:
    return {"kind": "conv", "channels": maps, "kernel": kernel, "pad": pad}


def dense(units: int) -> dict[str, Any]:
    return {"kind": "dense", "units": units}


def toml(value: Any) -> str:
    """As `--set` wants it."""
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def by_variant(found: Found) -> dict[str, list[dict[str, Any]]]:
    """The seeds of each variant."""
    grouped = defaultdict(list)
    for name, point in found.items():
        grouped[name.rpartition(", seed ")[0]].append(point)
    return dict(grouped)


def column(points: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [point[key] for point in points]


def bars(axes: Any, found: Found, key: str = "accuracy", factor: float = 100.0, label: str = "held out, %") -> None:
    """Mean of each variant, and a dot for every seed."""
    groups = by_variant(found)
    for place, points in enumerate(groups.values()):
        values = [factor * value for value in column(points, key)]
        axes.bar(place, fmean(values), 0.6, color="C0", alpha=0.5)
        axes.plot([place] * len(values), values, "k.", markersize=4)
    low = min(factor * value for points in groups.values() for value in column(points, key))
    high = max(factor * value for points in groups.values() for value in column(points, key))
    axes.set_ylim(low - 0.3 * (high - low or 1), high + 0.1 * (high - low or 1))
    axes.set_xticks(range(len(groups)), list(groups), rotation=25 if len(groups) > 4 else 0)
    axes.set_ylabel(label)


def contrast(found: Found, one: str, other: str) -> Difference:
    """Return how two variants differ, as far as both are there."""
    groups = by_variant(found)
    values = [[100 * value for value in column(groups.get(name, []), "accuracy")] for name in (one, other)]
    return difference_row(one, other, *values, images=HELD_OUT)


def mean(found: Found, variant: str, key: str = "accuracy") -> float | None:
    """Over the seeds of a variant, if there is one."""
    return fmean(column(own, key)) if (own := by_variant(found).get(variant)) else None


def accuracy_table(found: Found, more: Mapping[str, Callable[[str], str]] | None = None) -> Table:
    """Return the held-out accuracy of each variant, and a further column for each entry of `more`."""
    columns = more or {}
    rows = [
        [
            name,
            spread(column(points, "accuracy"), 2, 100),
            str(len(points)),
            "/".join(map(str, sorted({point["epochs"] for point in points}))),
            *(cell(name) for cell in columns.values()),
        ]
        for name, points in by_variant(found).items()
    ]
    return [["variant", "held-out accuracy, %", "seeds", "epochs", *columns], *rows]
