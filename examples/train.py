"""Train a small network from Python, in one process or on all ranks of an MPI job.

    python examples/train.py
    mpirun -n 4 python examples/train.py runs/four

The run directory (default: runs/example) gets the weights, the metrics and a summary; other examples read it.
"""

import sys

from mpi4py import MPI

import adam_mpi

# Generated images of digits; `data.set` names another data set, and a TOML file can stand in place of the dict.
CONFIG = {
    "data": {"images": 6400},
    "train": {"epochs": 2, "batch": 32},
    "optimizer": {"learning_rate": 0.05},
    "model": {
        "layers": [
            {"kind": "conv", "channels": 8, "kernel": 5},
            "relu",
            {"kind": "max_pool", "size": 4},
            {"kind": "dense", "units": 10},
        ]
    },
}


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/example"
    model = adam_mpi.train(CONFIG, run=run)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{run}: test accuracy {model.summary['test_accuracy']:.1%} with {len(model.weights):,} parameters")


if __name__ == "__main__":
    main()
