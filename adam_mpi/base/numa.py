"""NUMA nodes: which cores are near which memory, and which of them each of a server's threads keeps to."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

SYSTEM = Path("/sys/devices/system/node")


def nodes(system: Path = SYSTEM) -> list[frozenset[int]]:
    """The cores of each node that has some; nothing where the system does not tell."""
    paths = sorted(system.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    return [cores for path in paths if (cores := _cores(path.read_text()))]


def share(found: Sequence[Collection[int]], allowed: Collection[int], threads: int) -> list[frozenset[int]]:
    """The cores of each thread, neighbors on one node; none where there are not two nodes to choose from."""
    mine = [cores for node in found if (cores := frozenset(allowed).intersection(node))]
    if len(mine) < 2:
        return [frozenset()] * threads
    return [mine[thread * len(mine) // threads] for thread in range(threads)]


def threads_cores(threads: int) -> list[frozenset[int]]:
    """For so many threads of this process."""
    return share(nodes(), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else (), threads)


def bind(cores: Collection[int]) -> None:
    """Keep the thread that calls this on these cores, if any are named."""
    if cores:
        os.sched_setaffinity(0, cores)


def _cores(text: str) -> frozenset[int]:
    """From a list like 0-3,8,10-11."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(core for edges in ranges for core in range(int(edges[0]), int(edges[-1]) + 1))
