"""Figure 11: throughput by the number of replicas, with the same server."""

from functools import partial
from typing import Any

from _study import Found, Points, Scale, Table, job

from adam_mpi import config
from adam_mpi.simulate.hosts import Cluster
from adam_mpi.simulate.prediction import predict_job

TITLE = "Figure 11: throughput by replicas"
KIND = "measured up to 4 replicas, all on this machine; simulated with a machine of two cores for each"
PAPER = "The paper goes from 4 to 22 replicas with the same 20 servers and finds hardly any loss of efficiency."
MEASURED, SIMULATED, EPOCHS, GOOD = (1, 2, 3, 4), (1, 2, 4, 8, 16), 2, 0.9
SETTINGS = [
    "data.set=mnist",
    "layout.data=1",
    "layout.servers=1",
    "worker.threads=1",
    "push.images=128",
    "pull.images=128",
]


def points(scale: Scale) -> Points:
    real = {f"measured, {count} replicas": partial(_measured, scale, count) for count in MEASURED}
    return real | {f"simulated, {count} replicas": partial(_simulated, count) for count in SIMULATED}


def _measured(scale: Scale, count: int) -> dict[str, Any] | None:
    found = job(scale, SETTINGS, EPOCHS, ranks=2 + count)
    return None if found is None else found | {"kind": "measured"}


def _simulated(count: int) -> dict[str, Any]:
    """Costs are measured here; every rank has a machine of its own, with 10 Gb/s between them."""
    cluster = Cluster()
    cluster.hosts.count, cluster.hosts.ranks, cluster.hosts.cores = 2 + count, 1, 2
    told = predict_job(cluster, config.load(None, SETTINGS))
    return {
        "kind": "simulated",
        "replicas": count,
        "images_per_second": told.images_per_second,
        "delay": told.staleness_mean,
        "server_busy": told.server_busy,
        "link_busy": told.link_busy,
    }


def _rates(found: Found, kind: str) -> dict[int, float]:
    return {point["replicas"]: point["images_per_second"] for point in found.values() if point["kind"] == kind}


def paint(axes: Any, found: Found) -> None:
    for kind in ("measured", "simulated"):
        rates = _rates(found, kind)
        axes.plot(rates.keys(), [rate / 1000 for rate in rates.values()], "o-", label=kind)
        if 1 in rates:
            axes.plot(rates.keys(), [rates[1] * count / 1000 for count in rates], "k:", linewidth=0.8)
    axes.set(xlabel="replicas (dotted: linear)", ylabel="thousand images/s")
    axes.legend()


def table(found: Found) -> Table:
    """Return images per second and efficiency by the number of replicas, measured and simulated."""
    measured = _rates(found, "measured")
    simulated = _rates(found, "simulated")

    def cell(rates: dict[int, float], count: int) -> str:
        if count not in rates or 1 not in rates:
            return ""
        return f"{rates[count]:,.0f} ({rates[count] / count / rates[1]:.0%})"

    counts = sorted({*measured, *simulated})
    rows = [[str(count), cell(measured, count), cell(simulated, count)] for count in counts]
    return [["replicas", "measured images/s (efficiency)", "simulated images/s (efficiency)"], *rows]


def verdict(found: Found) -> str:
    return f"Measured replicas share this machine's two cores with server and data rank. {_agreement(found)}"


def _agreement(found: Found) -> str:
    """As far as it is simulated: up to where one server is enough."""
    rates = _rates(found, "simulated")
    if 1 not in rates:
        return "It has not been simulated yet."
    good = [count for count, rate in rates.items() if rate >= GOOD * count * rates[1]]
    if max(rates) == max(good):
        return "As in the paper, hardly anything is lost."
    busy, link = (found[f"simulated, {max(rates)} replicas"][key] for key in ("server_busy", "link_busy"))
    return (
        f"Hardly anything is lost up to {max(good)} replicas, as in the paper; with {max(rates)} the one server is "
        f"busy {busy:.0%} of the time and the busiest link {link:.0%}: the paper has 20 servers, and larger models "
        "that compute longer for every byte they push."
    )
