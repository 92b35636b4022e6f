"""One pusher feeds one server through the real mailbox; run by `bench.py server` with two ranks.

    mpirun -n 2 python _server_mail.py [THREADS [TRANSPORT]]

Prints JSON: pushed bytes applied per second, and what `a += b` and a copy do in the same process, in turns; and the
share of a core that the server takes while nobody asks it anything.
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI

from adam_mpi import ParameterServer

SHARDS, SHARD, PUSHES, ROUNDS = 64, 262_144, 4, 21
SIZE, REST = SHARDS * SHARD, 3.0


def median_rate(seconds: list[float], size: int) -> float:
    return size / float(np.median(seconds)) / 1e9


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def serve(server: ParameterServer, comm: MPI.Comm) -> dict[str, float]:
    """In turns: what numpy does here, what the pusher makes us do, what its pulls make us do."""
    a, b = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
    plain, copied, applied = [], [], []
    for _ in range(ROUNDS):
        plain.append(timed(lambda: np.add(a, b, out=a)))
        copied.append(timed(lambda: np.copyto(a, b)))
        wanted = server.server.counts["applied"] + PUSHES * SHARDS
        comm.Barrier()
        applied.append(timed(lambda wanted=wanted: step_until(server, wanted)) / PUSHES)
        finished = comm.Ibarrier()
        while not finished.Test():
            server.server.step()
    values = server.server.session.published.weights[0]
    assert np.all(values == values[0]) and values[0] == ROUNDS * PUSHES, "a push was lost or torn"
    return {
        "apply": median_rate(applied, 4 * SIZE),
        "add": median_rate(plain, 4 * SIZE),
        "copy": median_rate(copied, 4 * SIZE),
    }


def rest(server: ParameterServer) -> dict[str, float]:
    """Serve while the pusher sleeps: seconds on a core per second."""
    if server.client:
        time.sleep(REST)
        server.close()
        return {}
    start, used = time.perf_counter(), time.process_time()
    server.serve()
    share = (time.process_time() - used) / (time.perf_counter() - start)
    server.close()
    return {"idle": share}


def step_until(server: ParameterServer, wanted: int) -> None:
    while server.server.counts["applied"] < wanted:
        server.server.step()


def feed(server: ParameterServer, comm: MPI.Comm) -> dict[str, float]:
    ones, weights, pulled = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32), []
    for _ in range(ROUNDS):
        comm.Barrier()
        for _ in range(PUSHES):
            server.push(ones)
        while not server.idle:
            server.step()
        pulled.append(timed(lambda: server.wait(server.pull(into=weights))))
        comm.Ibarrier().Wait()
    sender = next(iter(server._client.transfers.ring_senders.values()))
    return {"pull": median_rate(pulled, 4 * SIZE), "past": sender.memcpy.way}


def main() -> None:
    comm = MPI.COMM_WORLD
    threads, transport = (*sys.argv[1:], *("1", "shared")[len(sys.argv) - 1 :])
    server = ParameterServer(comm, size=SIZE, shard=SHARD, threads=int(threads), transport=transport)
    figures = serve(server, comm) if not server.client else feed(server, comm)
    gathered = comm.gather(figures | rest(server))
    if comm.rank == 0:
        print(json.dumps(gathered[0] | gathered[1]), flush=True)


if __name__ == "__main__":
    main()
