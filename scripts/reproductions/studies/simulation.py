"""How well the simulation predicts real jobs on this machine."""

import os
import shutil
from functools import partial
from typing import Any

from _search import MODES
from _study import Found, Points, Scale, job
from _training import Hosts

from adam_mpi import config
from adam_mpi.simulate.cluster import Cluster
from adam_mpi.simulate.prediction import predict

TITLE = "The simulation against real jobs"
KIND = "measured and simulated"
PAPER = "What is simulated in other figures is worth what the simulation is worth here."
RANKS, WITHIN = (1, 2, 3, 4), 0.15
HOSTS, BANDWIDTH, BURST = (2, "1gbit"), 1e9 / 8, 1 << 20
"""Of the jobs over TCP, as scripts/hosts makes them."""


def points(scale: Scale) -> Points:
    """On this machine; and over TCP where test hosts can be made."""
    named: Points = {
        f"{mode}, {ranks} ranks": partial(measure, scale, mode, ranks, None) for mode in MODES for ranks in RANKS
    }
    if os.geteuid() == 0 and shutil.which("ip"):
        named |= {f"{mode}, TCP": partial(measure, scale, mode, 4, HOSTS) for mode in MODES}
    return named


def measure(scale: Scale, mode: str, ranks: int, hosts: Hosts | None) -> dict[str, Any] | None:
    settings = ["data.set=mnist", f"consistency.staleness={MODES[mode]}"]
    found = job(scale, settings, epochs=2, ranks=ranks, hosts=hosts)
    if found is None:
        return None
    cluster, cores = Cluster(), os.cpu_count() or 1
    cluster.hosts.ranks, cluster.hosts.cores = ranks, cores
    if hosts is not None:
        cluster.hosts.count, cluster.hosts.ranks, cluster.hosts.cores = hosts[0], ranks // hosts[0], cores // hosts[0]
        cluster.links.bandwidth, cluster.links.burst = BANDWIDTH, BURST
    told = predict(cluster, config.load(None, [*settings, *scale.settings]))
    # Ranks on test hosts are not our children, and would be taken for others.
    unknown = {"others": None} if hosts else {}
    return unknown | {
        "mode": mode, "ranks": ranks, "hosts": hosts, "measured": found["images_per_second"],
        "simulated": told.images_per_second, "ratio": told.images_per_second / found["images_per_second"],
        "delay_measured": found["delay"], "delay_simulated": told.staleness_mean,
    }  # fmt: skip


def paint(axes: Any, found: Found) -> None:
    for mode in MODES:
        own = [point for point in found.values() if point["mode"] == mode]
        here = {point["ranks"]: point["ratio"] for point in own if not point["hosts"]}
        far = {point["ranks"]: point["ratio"] for point in own if point["hosts"]}
        axes.plot(here.keys(), here.values(), "o-", label=mode)
        axes.plot(far.keys(), far.values(), "^", label=f"{mode}, {HOSTS[0]} hosts, TCP at {HOSTS[1]}")
    axes.axhspan(1 - WITHIN, 1 + WITHIN, alpha=0.15)
    axes.set(xlabel="ranks", ylabel="simulated / measured images/s", xticks=RANKS)
    axes.legend()


def verdict(found: Found) -> str:
    told = "; ".join(f"{name} {point['ratio']:.2f}" for name, point in found.items())
    good = sum(abs(point["ratio"] - 1) <= WITHIN for point in found.values())
    delays = "; ".join(
        f"{name} {point['delay_simulated']:.1f} and {point['delay_measured']:.1f}"
        for name, point in found.items()
        if point["mode"] == "async"
    )
    return (
        f"Simulated over measured images/s: {told}; {good} of {len(found)} within {WITHIN:.0%} (wanted: all). "
        f"Mean delay of a push when asynchronous, simulated and measured: {delays}. Over TCP: {HOSTS[0]} hosts with "
        f"links of {HOSTS[1]}, network namespaces that share this machine's cores."
    )
