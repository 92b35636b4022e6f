"""adam_mpi.train inside other programs: one process that trains twice, and an MPI program of several ranks."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from launch import clean_environment

import adam_mpi
from adam_mpi.base.errors import UserError
from adam_mpi.config import load

SMALL = {
    "data": {"images": 640},
    "train": {"epochs": 1},
    "model": {
        "layers": [
            {"kind": "conv", "channels": 4, "kernel": 5},
            "relu",
            {"kind": "max_pool", "size": 4},
            {"kind": "dense", "units": 10},
        ]
    },
    "kernels": {"engine": "reference"},
}
# What a notebook does: trains, uses it, makes a mistake, is interrupted, trains again.
NOTEBOOK = f"""
import os, signal, sys
import numpy as np
import adam_mpi

config = {SMALL!r}
first = adam_mpi.train(config, run="first")
assert first.predict(np.zeros((3, 28, 28), np.uint8)).shape == (3, 10)
assert first.summary["status"] == "done" and first.summary["images"] == 640, first.summary
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
try:
    adam_mpi.train(config, set=["train.epoch=3"])
except adam_mpi.UserError as error:
    print(error)
try:
    adam_mpi.train(config, set=['inject.faults=["raise role=worker at=compute step=2"]'], run="bad")
except Exception as error:
    print("raised", error)
second = adam_mpi.train(config, set=["model.weights=first/weights.h5", "optimizer.learning_rate=0"], run="second")
assert (second.weights == first.weights).all(), "training at rate 0 begins and ends with what was given"
print("done")
"""


def test_a_notebook_trains_twice_and_sees_errors_as_exceptions(tmp_path):
    command, surroundings = [sys.executable, "-c", NOTEBOOK], clean_environment()
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=surroundings, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unknown key train.epoch; did you mean train.epochs?" in done.stdout
    assert "raised" in done.stdout and done.stdout.endswith("done\n")


def test_a_configuration_is_a_dict_or_an_object_as_well():
    assert load(SMALL).data.images == 640
    given = load(SMALL)
    assert load(given, ["data.images=64"]).data.images == 64 and given.data.images == 640
    with pytest.raises(UserError, match="config: unknown key train.epoch; did you mean train.epochs?"):
        load({"train": {"epoch": 1}})


@pytest.mark.mpi(min_size=3)
@pytest.mark.timeout(110)
def test_all_ranks_of_a_program_train_together(tmp_path_factory):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    run = comm.bcast(str(tmp_path_factory.mktemp("run") / "run") if comm.rank == 0 else None)
    before = signal.getsignal(signal.SIGINT)
    model = adam_mpi.train(SMALL, run=run)
    assert signal.getsignal(signal.SIGINT) is before
    assert model.summary["ranks"]["total"] == comm.size and model.summary["images"] == 640
    everywhere = comm.allgather(model.predict(np.zeros((1, 28, 28), np.uint8)))
    assert all((probabilities == everywhere[0]).all() for probabilities in everywhere)
