"""Timing contenders side by side: A, B, A, B, ... in one run, medians of thread CPU time and of wall time."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple


class Times(NamedTuple):
    """Median seconds of one call."""

    cpu: float
    wall: float


def interleaved(contenders: dict[str, Callable[[], object]], seconds: float) -> dict[str, Times]:
    """Run every contender in turn until `seconds` are over, at least five rounds; quick ones several times a round."""
    calls = {}
    for name, run in contenders.items():
        run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, min(50, int(0.02 / (time.perf_counter() - start))))
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(cpu.values()))) < 5:
        for name, run in contenders.items():
            start_wall, start_cpu = time.perf_counter(), time.thread_time()
            for _ in range(calls[name]):
                run()
            cpu[name].append((time.thread_time() - start_cpu) / calls[name])
            wall[name].append((time.perf_counter() - start_wall) / calls[name])
    return {name: Times(median(cpu[name]), median(wall[name])) for name in contenders}
