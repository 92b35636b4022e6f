"""How well the simulation predicts real jobs on this machine."""

import os
from functools import partial
from typing import Any

from _search import MODES
from _study import Found, Points, Scale, job

from adam_mpi import config
from adam_mpi.simulate.cluster import Cluster
from adam_mpi.simulate.prediction import predict

TITLE = "The simulation against real jobs"
KIND = "measured and simulated"
PAPER = "What is simulated in other figures is worth what the simulation is worth here."
RANKS, WITHIN = (1, 2, 3, 4), 0.15


def points(scale: Scale) -> Points:
    return {f"{mode}, {ranks} ranks": partial(measure, scale, mode, ranks) for mode in MODES for ranks in RANKS}


def measure(scale: Scale, mode: str, ranks: int) -> dict[str, Any] | None:
    settings = ["data.set=mnist", f"consistency.staleness={MODES[mode]}"]
    found = job(scale, settings, epochs=2, ranks=ranks)
    if found is None:
        return None
    cluster = Cluster()
    cluster.hosts.count, cluster.hosts.ranks, cluster.hosts.cores = 1, ranks, os.cpu_count() or 1
    told = predict(cluster, config.load(None, [*settings, *scale.settings]))
    return {
        "mode": mode, "ranks": ranks, "measured": found["images_per_second"], "simulated": told.images_per_second,
        "ratio": told.images_per_second / found["images_per_second"],
        "delay_measured": found["delay"], "delay_simulated": told.staleness_mean,
    }  # fmt: skip


def paint(axes: Any, found: Found) -> None:
    for mode in MODES:
        own = {point["ranks"]: point["ratio"] for point in found.values() if point["mode"] == mode}
        axes.plot(own.keys(), own.values(), "o-", label=mode)
    axes.axhspan(1 - WITHIN, 1 + WITHIN, alpha=0.15)
    axes.set(xlabel="ranks", ylabel="simulated / measured images/s", xticks=RANKS)
    axes.legend()


def verdict(found: Found) -> str:
    told = "; ".join(f"{name} {point['ratio']:.2f}" for name, point in found.items())
    good = sum(abs(point["ratio"] - 1) <= WITHIN for point in found.values())
    delays = "; ".join(
        f"{point['ranks']} ranks {point['delay_simulated']:.1f} and {point['delay_measured']:.1f}"
        for point in found.values()
        if point["mode"] == "async"
    )
    return (
        f"Simulated over measured images/s: {told}; {good} of {len(found)} within {WITHIN:.0%}, as is wanted. "
        f"Mean delay of a push when asynchronous, simulated and measured: {delays}. Jobs over TCP were not compared."
    )
