"""The ranks of the delay bench: run by it under MPI; the first prints milliseconds of a micro-batch, turn by turn."""

import json

from _halo_ranks import Replica, turns
from _models import MODELS
from mpi4py import MPI

SHAPES, IMAGES, BATCHES = MODELS["mnist"].shapes, 256, 48


def main() -> None:
    replicas = {in_flight: Replica(in_flight, IMAGES, shapes=SHAPES) for in_flight in (1, 4)}
    taken = turns(*(lambda replica=replica: replica.train(BATCHES) for replica in replicas.values()))
    compute = MPI.COMM_WORLD.allreduce(replicas[1].flow.busy / replicas[1].next, MPI.MAX)
    if MPI.COMM_WORLD.rank == 0:
        each = [[1e3 * seconds / BATCHES for seconds in times] for times in taken]
        found = {"ms": dict(zip(replicas, each, strict=True)), "compute_ms": 1e3 * compute}
        print(json.dumps(found), flush=True)
    for replica in replicas.values():
        replica.end()


if __name__ == "__main__":
    main()
