"""Train with several bounds on staleness, and print a table.

    mpirun -n 4 python examples/staleness.py

`adam-mpi sweep --over consistency.staleness=0,2,inf --seeds 3` does the same with a job for each run, repetitions, and
advice. A bound changes more than the delay of pushes: with one, a batch is shared by all replicas, without one each
replica has its own.
"""

import sys
from pathlib import Path

from mpi4py import MPI
from train import CONFIG

import adam_mpi

VALUES = (0, 2, float("inf"))


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/staleness")
    rows = []
    for staleness in VALUES:
        overrides = {"consistency.staleness": staleness, "train.epochs": 1, "data.images": 3200}
        model = adam_mpi.train(CONFIG, overrides=overrides, run=folder / f"{staleness}")
        summary = model.summary
        rows.append((staleness, summary["staleness"]["mean"], summary["images_per_second"], summary["test_accuracy"]))
    if MPI.COMM_WORLD.rank == 0:
        print(f"{'bound':>6}{'mean staleness':>16}{'images/s':>10}{'accuracy':>10}")
        for bound, mean, speed, accuracy in rows:
            print(f"{bound:6g}{mean or 0:16.2f}{speed:10,.0f}{accuracy:10.1%}")


if __name__ == "__main__":
    main()
