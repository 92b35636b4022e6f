"""Figure 9: one server, by its threads."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from _study import Found, Points, Scale, by_threads
from server import mailbox

from adam_mpi.server import apply

TITLE = "Figure 9: parameter server by threads"
KIND = "measured"
PAPER = (
    "The paper's server applies more updates with every thread as long as they come from its own memory, and is "
    "limited by the network interface when they come from other machines."
)
PATHS = {"memory": "", "mailbox": "shared", "messages": "send"}
"""Pushes that lie there already, that come through shared memory, that come as MPI messages."""
SIZE, ROUNDS = 16 << 20, 9


def points(scale: Scale) -> Points:
    return by_threads(measure, PATHS)


def measure(path: str, threads: int) -> dict[str, Any]:
    rate = _memory(threads) if path == "memory" else mailbox(threads, PATHS[path])["apply"]
    return {"path": path, "threads": threads, "gigabytes_per_second": rate}


def _memory(threads: int) -> float:
    """Each thread applies one push to parameters of its own."""
    size = SIZE // threads
    parts = [(np.zeros(size, np.float32), np.ones(size, np.float32)) for _ in range(threads)]
    starts, scales, one, none = np.zeros(1, np.int64), np.full(1, 1e-6, np.float32), np.float32(1), np.float32(0)

    def step(part: tuple[np.ndarray, np.ndarray]) -> None:
        weights, mail = part
        apply.step(apply.DESCENT, weights, mail, mail, starts, scales, one, one, none)

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


def verdict(found: Found) -> str:
    told = [f"{name} {point['gigabytes_per_second']:.1f}" for name, point in found.items()]
    gains = ", ".join(f"{path} {gain:.2f} x" for path in PATHS if (gain := _gain(found, path)))
    return (
        f"Here, in GB of pushed gradients per second: {'; '.join(told)}. Gained by all threads over one: "
        f"{gains or 'not measured yet'}. So the order is the paper's, memory before network path, but more threads "
        "gain little: one thread already takes most of what this machine's memory gives, and the pusher runs on the "
        "same cores. There is no network interface: what the network path costs here is copies and messages."
    )


def _gain(found: Found, path: str) -> float | None:
    own = {point["threads"]: point["gigabytes_per_second"] for point in found.values() if point["path"] == path}
    return own[max(own)] / own[1] if len(own) > 1 and 1 in own else None
