"""Figure 9: one server, by its threads."""

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
from _study import Found, Points, Scale, Table, by_threads
from server import mailbox

from adam_mpi.optimizer import kernels, rules
from adam_mpi.optimizer.settings import BatchCounts, Settings

TITLE = "Figure 9: parameter server by threads"
KIND = "measured"
PAPER = (
    "The paper's server applies more updates with every thread as long as they come from its own memory, and is "
    "limited by the network interface when they come from other machines."
)
PATHS = {"addition": "", "memory": "", "mailbox": "shared", "messages": "send"}
"""numpy's a += b; pushes that lie there already, that come through shared memory, that come as MPI messages."""
SIZE, ROUNDS = 16 << 20, 9
JOBS = 5
"""With a pusher, of which the median counts: cores of a virtual machine share a cache at times, and at others not."""


def points(scale: Scale) -> Points:
    return by_threads(measure, PATHS)


def measure(path: str, threads: int) -> dict[str, Any]:
    if not PATHS[path]:
        return {"path": path, "threads": threads, "gigabytes_per_second": _memory(threads, plain=path == "addition")}
    rates = [mailbox(threads, PATHS[path])["apply"] for _ in range(JOBS)]
    return {"path": path, "threads": threads, "gigabytes_per_second": median(rates), "jobs": rates}


def _memory(threads: int, plain: bool) -> float:
    """Each thread applies one push to parameters of its own, by the server's kernel or by numpy."""
    size = SIZE // threads
    parts = [(np.zeros(size, np.float32), np.ones(size, np.float32)) for _ in range(threads)]
    starts, scales = np.zeros(1, np.int64), np.full(1, 1e-6, np.float32)
    rule = rules.RULES["descent"]
    rows = rules.coefficients(rule, Settings(), 1.0, BatchCounts(0, 1, 1))
    states = np.zeros((0, size), np.float32)

    def step(part: tuple[np.ndarray, np.ndarray]) -> None:
        weights, mail = part
        if plain:
            np.add(weights, mail, out=weights)
        else:
            kernels.step(rule.kernel, weights, states, mail, starts, scales, rows)

    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS + 1):
            begun = time.perf_counter()
            list(pool.map(step, parts))
            times.append(time.perf_counter() - begun)
    return 4 * threads * size / min(times[1:]) / 1e9


def paint(axes: Any, found: Found) -> None:
    for path in PATHS:
        own = {point["threads"]: point["gigabytes_per_second"] for point in found.values() if point["path"] == path}
        axes.plot(own.keys(), own.values(), "o-", label=path)
    axes.set(xlabel="threads of the server", ylabel="GB/s of pushes applied")
    axes.set_xticks(sorted({point["threads"] for point in found.values()}))
    axes.legend()


def table(found: Found) -> Table:
    """Return the rate of each path, the range of its jobs, and what a second thread gains."""
    rows = []
    for name, point in found.items():
        jobs = point.get("jobs")
        spread = f"{min(jobs):.1f} to {max(jobs):.1f}" if jobs else ""
        gain = _gain(found, point["path"]) if point["threads"] > 1 else None
        rows.append([name, f"{point['gigabytes_per_second']:.1f}", spread, f"{gain:.2f} x" if gain else ""])
    return [["path", "GB of gradients/s", "jobs from, to", "gained over one thread"], *rows]


def verdict(found: Found) -> str:
    return (
        "Addition is numpy's `a += b` on arrays of that size: what this machine's memory gives. There is no network "
        "interface here: the network path costs copies and messages, and the pusher runs on the same cores."
    )


def _gain(found: Found, path: str) -> float | None:
    own = {point["threads"]: point["gigabytes_per_second"] for point in found.values() if point["path"] == path}
    return own[max(own)] / own[1] if len(own) > 1 and 1 in own else None
