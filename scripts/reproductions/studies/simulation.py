"""How well the simulation predicts real jobs on this machine."""

import os
import shutil
from functools import partial
from statistics import median
from typing import Any

from _search import MODES
from _study import POOL, Found, Points, Scale, Table, conv, dense, job, toml
from _training import Hosts

from adam_mpi import config
from adam_mpi.config.training_sections import LAYERS
from adam_mpi.simulate.hosts import Cluster, Costs
from adam_mpi.simulate.prediction import predict_job

TITLE = "The simulation against real jobs"
KIND = "measured and simulated"
PAPER = "What is simulated in other figures is worth what the simulation is worth here."
RANKS, WITHIN, TRIES = (1, 2, 3, 4), 0.15, 3
EPOCHS = {"large": 1, "small": 3}
"""The first half second of a job is slower than the rest, and is not simulated: it should be a small part."""
MODELS = {
    "large": [conv(64, 5), "relu", POOL, conv(128, 5), "relu", POOL, dense(100), "relu", dense(10)],
    "small": LAYERS,
}
"""A batch of the large one is 13 ms of one core, of the small one 1 ms: of it Python is as large a part."""
CORES = os.cpu_count() or 1
HOSTS, BANDWIDTH, BURST = (2, "1gbit", CORES // 2), 1e9 / 8, 1 << 20
"""Of the jobs over TCP, as scripts/hosts makes them: each has its part of this machine's cores."""


def points(scale: Scale) -> Points:
    """On this machine; and over TCP where test hosts can be made."""
    named: Points = {}
    for name in MODELS:
        for mode in MODES:
            named |= {f"{name}, {mode}, {ranks} ranks": partial(measure, scale, name, mode, ranks) for ranks in RANKS}
            if os.geteuid() == 0 and shutil.which("ip") and CORES > 1:
                named[f"{name}, {mode}, TCP"] = partial(measure, scale, name, mode, 4, HOSTS)
    return named


def measure(scale: Scale, name: str, mode: str, ranks: int, hosts: Hosts | None = None) -> dict[str, Any] | None:
    """A job and its prediction in turns: this machine is not always equally fast."""
    tries = []
    for seed in range(1, TRIES + 1):
        if (told := compare(scale, name, mode, [f"run.seed={seed}"], ranks, hosts)) is None:
            return None
        tries.append(told)
    # Ranks on test hosts are not our children, and would be taken for others.
    unknown = {"others": None} if hosts else {}
    middle = {key: median(told[key] for told in tries) for key in tries[0]}
    return unknown | {"model": name, "mode": mode, "ranks": ranks, "hosts": hosts, "tries": tries, **middle}


def compare(
    scale: Scale, name: str, mode: str, more: list[str], ranks: int, hosts: Hosts | None
) -> dict[str, float] | None:
    layers = f"model.layers={toml(MODELS[name])}"
    settings = ["data.set=mnist", layers, f"consistency.staleness={MODES[mode]}", *more]
    found = job(scale, settings, EPOCHS[name], ranks, hosts)
    if found is None:
        return None
    wanted = config.load(None, [*settings, *scale.settings])
    cluster = Cluster()
    cluster.hosts.ranks, cluster.hosts.cores = ranks, CORES
    told = predict_job(cluster, wanted)
    if hosts is not None:
        # Test hosts get in each other's way like threads of one host do: an image takes as long as it did there.
        cluster.costs = Costs(image=cluster.costs.image)
        cluster.hosts.count, cluster.hosts.ranks, cluster.hosts.cores = hosts[0], ranks // hosts[0], hosts[2]
        cluster.links.bandwidth, cluster.links.burst = BANDWIDTH, BURST
        told = predict_job(cluster, wanted)
    return {
        "measured": found["images_per_second"],
        "simulated": told.images_per_second,
        "ratio": told.images_per_second / found["images_per_second"],
        "delay_measured": found["delay"],
        "delay_simulated": told.staleness_mean,
    }


def paint(axes: Any, found: Found) -> None:
    for name, style in zip(MODELS, ("-", ":"), strict=True):
        for color, mode in enumerate(MODES):
            own = [point for point in found.values() if (point["model"], point["mode"]) == (name, mode)]
            here = {point["ranks"]: point["ratio"] for point in own if not point["hosts"]}
            far = {point["ranks"]: point["ratio"] for point in own if point["hosts"]}
            axes.plot(here.keys(), here.values(), f"o{style}", color=f"C{color}", label=f"{name}, {mode}")
            label = f"{name}, {mode}, {HOSTS[0]} hosts, TCP at {HOSTS[1]}"
            axes.plot(far.keys(), far.values(), "^" if name == "large" else "v", color=f"C{color}", label=label)
    axes.axhspan(1 - WITHIN, 1 + WITHIN, alpha=0.15)
    axes.set(xlabel="ranks", ylabel="simulated / measured images/s", xticks=RANKS)
    axes.legend(fontsize="x-small")


def table(found: Found) -> Table:
    """Return simulated over measured figures of each job."""
    rows = []
    for point in found.values():
        low, high = (pick(tried["ratio"] for tried in point["tries"]) for pick in (min, max))
        where = "TCP" if point["hosts"] else f"{point['ranks']} ranks"
        delays = f"{point['delay_simulated']:.1f}, {point['delay_measured']:.1f}" if point["mode"] == "async" else ""
        rows.append(
            [f"{point['model']}, {point['mode']}, {where}", f"{point['ratio']:.2f}", f"{low:.2f} to {high:.2f}", delays]
        )
    return [["job", "simulated / measured images/s", "single tries", "mean delay, simulated, measured"], *rows]


def verdict(found: Found) -> str:
    by_model = {name: [point for point in found.values() if point["model"] == name] for name in MODELS}
    told = ", ".join(_within(name, own) for name, own in by_model.items() if own)
    return (
        f"Within {WITHIN:.0%} (wanted: all): {told}; medians of {TRIES} jobs and predictions in turns. The "
        "simulation was worked "
        "out on jobs like these, on this machine; a batch of the small model is 1 ms of computing and as much of "
        "Python."
    )


def _within(name: str, own: list[dict[str, Any]]) -> str:
    good = sum(abs(point["ratio"] - 1) <= WITHIN for point in own)
    return f"{good} of {len(own)} of the {name} model"
