"""NUMA nodes: the cores of each node, and the cores that each thread of a server is bound to."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

SYSTEM = Path("/sys/devices/system/node")


def nodes(system: Path = SYSTEM) -> list[frozenset[int]]:
    """Return the cores of each node that has any; nothing where the `system` folder does not exist."""
    paths = sorted(system.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [cores for path in paths if (cores := _cores(path.read_text()))]


def assign(found: Sequence[Collection[int]], allowed: Collection[int], threads: int) -> list[frozenset[int]]:
    """Return the cores of each of `threads` threads, consecutive ones on one node.

    `found` has the cores of each node, of which only the `allowed` ones count. With fewer than two nodes no thread is
    bound.
    """
    mine = [cores for node in found if (cores := frozenset(allowed).intersection(node))]
    if len(mine) < 2:
        return [frozenset()] * threads
    return [mine[thread * len(mine) // threads] for thread in range(threads)]


def cores_of_threads(threads: int) -> list[frozenset[int]]:
    """Return the cores that each of `threads` threads of this process is to be bound to."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return assign(nodes(), allowed, threads)


def bind(cores: Collection[int]) -> None:
    """Bind the calling thread to `cores`, if there are any."""
    if cores:
        os.sched_setaffinity(0, cores)


def _cores(text: str) -> frozenset[int]:
    """Return the numbers in a list like 0-3,8,10-11."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(core for edges in ranges for core in range(int(edges[0]), int(edges[-1]) + 1))
