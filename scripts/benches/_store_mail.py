"""One pusher feeds one server, with and without a store in turns; run by `bench.py store` with two ranks.

Prints JSON: pushes applied per second, turn by turn.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from adam_mpi import ParameterServer
from adam_mpi.runtime.begin_generation import SWITCH_SECONDS

SIZE, ROUNDS, SECONDS = 64 * 262_144, 6, 5.5


def serve(server: ParameterServer, comm: MPI.Comm, folder: Path) -> dict[str, list[float]]:
    """Rounds longer than it takes until everything is written once more."""
    sys.setswitchinterval(SWITCH_SECONDS)
    role = server.server
    role.open_store(folder / "server.h5", lambda: None)
    store = role.session.store
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(2 * ROUNDS):
        name = ("off", "on")[turn % 2]
        role.session.store = store if name == "on" else None
        comm.Barrier()
        start, before, written = time.perf_counter(), role.counts["applied"], store.written
        while time.perf_counter() - start < SECONDS:
            role.step()
        rates[name].append((role.counts["applied"] - before) / SECONDS)
        assert name == "off" or store.written > written, "nothing was written"
        finished = comm.Ibarrier()
        while not finished.Test():
            role.step()
    # In the first turns memory and file are new to the machine.
    return {name: found[1:] for name, found in rates.items()}


def feed(server: ParameterServer, comm: MPI.Comm) -> dict[str, list[float]]:
    ones = np.ones(SIZE, np.float32)
    for _ in range(2 * ROUNDS):
        comm.Barrier()
        end, handles = time.perf_counter() + SECONDS, []
        while time.perf_counter() < end:
            handles = [handle for handle in handles if not handle.done]
            if len(handles) < 2:
                handles.append(server.push(ones))
            server.step()
        while not server.idle:
            server.step()
        comm.Ibarrier().Wait()
    return {}


def main() -> None:
    comm = MPI.COMM_WORLD
    server = ParameterServer(comm, size=SIZE)
    figures = feed(server, comm) if server.client else serve(server, comm, Path(sys.argv[1]))
    gathered = comm.gather(figures)
    if comm.rank == 0:
        print(json.dumps(gathered[0] | gathered[1]), flush=True)
    if not server.client:
        server.serve()
    server.close()


if __name__ == "__main__":
    main()
