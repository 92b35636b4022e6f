"""Four pushers feed three servers that keep 1, 2 or 3 copies, in turns; run by `bench.py replication` with seven ranks.

Prints JSON: GB/s pushed and acknowledged, and messages folded into a step, by number of copies; the 99th percentile of
the seconds until a push is acknowledged, with the store off and on.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
from mpi4py import MPI

from adam_mpi import ParameterServer
from adam_mpi.runtime.begin_generation import SWITCH_SECONDS

SERVERS, SIZE, ROUNDS, SECONDS = 3, 12 * 262_144, 5, 1.5
MOST = {"rates": 2, "waits": 1}
"""Pushes of one pusher under way: as many as keep the servers busy, or one at a time."""


def turn(server: ParameterServer, comm: MPI.Comm, under_way: int) -> list[float]:
    """Push, or serve, for a while; on a pusher the seconds that each push took."""
    comm.Barrier()
    ones, end = np.ones(SIZE, np.float32), time.perf_counter() + SECONDS
    begun: list[tuple[float, object]] = []
    took: list[float] = []
    while server.client and (begun or time.perf_counter() < end):
        while len(begun) < under_way and time.perf_counter() < end:
            begun.append((time.perf_counter(), server.push(ones)))
        server.step()
        took += [time.perf_counter() - start for start, handle in begun if handle.done]
        begun = [pair for pair in begun if not pair[1].done]
    finished = comm.Ibarrier()
    while not finished.Test():
        server.step()
    return took


def rates(made: dict[int, ParameterServer], comm: MPI.Comm) -> tuple[dict, dict]:
    """GB/s of all pushers, and messages in a step, by number of copies."""
    found: dict[int, list[float]] = {copies: [] for copies in made}
    for _ in range(ROUNDS):
        for copies, server in made.items():
            start = time.perf_counter()
            pushes = comm.allreduce(len(turn(server, comm, MOST["rates"])))
            found[copies].append(4e-9 * SIZE * pushes / (time.perf_counter() - start))
    folds = {}
    for copies, server in made.items():
        counts = server.server.counts if server.server else {"folded": 0, "steps": 0}
        folds[copies] = comm.allreduce(counts["folded"]) / max(comm.allreduce(counts["steps"]), 1)
    return {copies: median(values) for copies, values in found.items()}, folds


def waits(server: ParameterServer, comm: MPI.Comm, folder: Path) -> dict[str, float]:
    """The 99th percentile of the time until a push is acknowledged, with the store off and on in turns."""
    role, store = server.server, None
    if role is not None:
        sys.setswitchinterval(SWITCH_SECONDS)
        role.open_store(folder / f"server-{comm.rank}.h5", lambda: None)
        store = role.session.store
    found: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(ROUNDS):
        for name in found:
            if role is not None:
                role.session.store = store if name == "on" else None
            found[name] += [value for took in comm.allgather(turn(server, comm, MOST["waits"])) for value in took]
    return {name: float(np.percentile(values, 99)) for name, values in found.items()}


def main() -> None:
    comm = MPI.COMM_WORLD
    made = {copies: ParameterServer(comm, SIZE, SERVERS, copies=copies) for copies in (1, 2, 3)}
    speeds, folds = rates(made, comm)
    figures = {"rates": speeds, "folds": folds, "waits": waits(made[3], comm, Path(sys.argv[1]))}
    if comm.rank == 0:
        print(json.dumps(figures), flush=True)
    for server in made.values():
        server.serve()
        server.close()


if __name__ == "__main__":
    main()
