"""The paper's testbed, and a thousand machines: simulated."""

from functools import partial
from typing import Any

from _study import Found, Points, Scale, Table

from adam_mpi import config
from adam_mpi.data.sets import describe
from adam_mpi.planning.plan import model
from adam_mpi.simulate.hosts import Cluster
from adam_mpi.simulate.prediction import Progress, predict_job

TITLE = "The paper's testbed and a cluster of 1,000 machines"
KIND = "simulated"
PAPER = (
    "The paper's testbed has 120 machines of 16 cores at 1.8 GHz with 10 Gb/s links: 90 that train, 20 servers, 10 for "
    "images; it reports hardly any loss from 4 to 22 replicas of 4 machines."
)
MACHINES, CORES, STRIPS, GOOD = (24, 60, 120, 240, 1000), 16, 4, 0.9
CORE, IMAGES, BATCH = 14e9, 256, 64
"""Operations per second of such a core, half of its peak; images of a push, and of a batch."""


def points(scale: Scale) -> Points:
    return {f"{count} machines": partial(measure, count, scale) for count in MACHINES}


def measure(count: int, scale: Scale) -> dict[str, Any]:
    """Roles in the paper's proportions. What a machine does with bytes is measured here."""
    servers, data = max(1, count // 6), max(1, count // 12)
    settings = config.load(
        "adam-imagenet",
        [
            f"layout.partitions={STRIPS}",
            f"layout.servers={servers}",
            f"layout.data={data}",
            f"push.images={IMAGES}",
            f"pull.images={IMAGES}",
            f"worker.threads={CORES}",
            f"train.batch={BATCH}",
            *scale.settings,
        ],
    )
    shapes = model(settings, describe(settings.data))
    cluster = Cluster()
    cluster.hosts.count, cluster.hosts.ranks, cluster.hosts.cores = count, 1, CORES
    cluster.costs.image = 6 * sum(shape.connections for shape in shapes) / CORE
    # Two pushes of every thread.
    told = predict_job(cluster, settings, batches=2 * CORES * IMAGES // settings.train.batch, report=Progress())
    return {
        "machines": count,
        "replicas": told.replicas,
        "images_per_second": told.images_per_second,
        "delay": told.staleness_mean,
        "server_busy": told.server_busy,
        "link_busy": told.link_busy,
    }


def paint(axes: Any, found: Found) -> None:
    rates = {point["machines"]: point["images_per_second"] for point in found.values()}
    axes.plot(rates.keys(), rates.values(), "o-", label="images/s")
    first = min(rates)
    axes.plot(rates.keys(), [rates[first] / first * count for count in rates], "k:", linewidth=0.8, label="linear")
    axes.set(xlabel="machines", ylabel="images/s", xscale="log", yscale="log")
    axes.legend()


def table(found: Found) -> Table:
    """Return a row for each size of cluster."""
    rows = [
        [
            f"{point['machines']:,}",
            str(point["replicas"]),
            f"{point['images_per_second']:,.0f}",
            f"{point['delay']:.0f}",
            f"{point['server_busy']:.0%}",
            f"{point['link_busy']:.0%}",
        ]
        for point in found.values()
    ]
    return [["machines", "replicas", "images/s", "delay", "busiest server", "busiest link"], *rows]


def verdict(found: Found) -> str:
    first = min(found.values(), key=_machines)
    last = max(found.values(), key=_machines)
    kept = (last["images_per_second"] / last["replicas"]) / (first["images_per_second"] / first["replicas"])
    agreement = "linear, as the paper finds up to 120" if kept >= GOOD else "less than the paper finds up to 120"
    return (
        f"From {first['machines']} to {last['machines']} machines, {STRIPS} to a replica, {kept:.0%} of the "
        "images/s of a "
        f"replica are kept: {agreement}. The time of an image is arithmetic (half of such a core's peak), and "
        "exchanges "
        "between strips are taken to be hidden."
    )


def _machines(point: dict[str, Any]) -> int:
    return point["machines"]
