"""The public names: train inside other programs, examples of the documentation, types that checkers see."""

import inspect
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from launch import ROOT, clean_environment

import adam_mpi
from adam_mpi import api
from adam_mpi.base.errors import UserError
from adam_mpi.config import load
from adam_mpi.config.reading import _parse_override

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
# A notebook that trains, predicts, gives a wrong key, has a job that fails, and trains again.
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
    adam_mpi.train(config, overrides={{"train.epoch": 3}})
except adam_mpi.UserError as error:
    print(error)
try:
    adam_mpi.train(config, overrides={{"inject.faults": ["raise role=worker at=compute step=2"]}}, run="bad")
except Exception as error:
    print("raised", error)
second = adam_mpi.train(config, overrides=["model.weights=first/weights.h5", "optimizer.learning_rate=0"], run="second")
assert (second.weights == first.weights).all(), "training with a learning rate of 0 changes nothing"
print("done")
"""


def run_python(program, folder):
    """Run `program` in a process of its own in `folder`."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=clean_environment(), timeout=110)


@pytest.mark.slow
def test_a_notebook_trains_twice_and_gets_errors_as_exceptions(tmp_path):
    done = run_python(NOTEBOOK, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unknown key train.epoch; did you mean train.epochs?" in done.stdout
    assert "raised" in done.stdout and done.stdout.endswith("done\n")


def test_a_configuration_may_be_a_dict_or_an_object():
    assert load(SMALL).data.images == 640
    given = load(SMALL)
    assert load(given, ["data.images=64"]).data.images == 64 and given.data.images == 640
    with pytest.raises(UserError, match="config: unknown key train.epoch; did you mean train.epochs?"):
        load({"train": {"epoch": 1}})


@pytest.mark.parametrize(
    "value",
    [3, 0.5, True, "a b", "1", [], ["a=b", 'say "c"'], [{"kind": "dense", "units": 10}, "relu"], {"worker": ["h"]}],
)
def test_overrides_of_a_dict_are_those_of_strings(value):
    (text,) = api._as_settings({"section.key": value})
    assert _parse_override(text) == {"section": {"key": value}}


@pytest.mark.parametrize("overrides", ["train.epochs=1", {"train.epochs": None}])
def test_overrides_that_cannot_be_are_named(overrides):
    with pytest.raises(UserError, match="overrides"):
        api._as_settings(overrides)


def test_the_package_lists_its_public_names_without_starting_mpi(tmp_path):
    program = "import sys, adam_mpi; print(set(adam_mpi.__all__) <= set(dir(adam_mpi)), 'mpi4py' in sys.modules)"
    assert run_python(program, tmp_path).stdout == "True False\n"
    assert all(getattr(adam_mpi, name) is not None for name in adam_mpi.__all__)
    with pytest.raises(AttributeError, match="module 'adam_mpi' has no attribute 'Network'"):
        adam_mpi.Network  # noqa: B018


@pytest.mark.parametrize("name", sorted(set(adam_mpi.__all__) - {"UserError", "__version__"}))
def test_public_names_have_documentation_with_an_example(name):
    """Every public class, method and function has numpydoc sections for what it takes, gives and raises."""
    thing = getattr(adam_mpi, name)
    methods = [method for key, method in vars(thing).items() if key[0] != "_" and inspect.isfunction(method)]
    for documented in (thing, *methods):
        text = inspect.getdoc(documented) or ""
        assert "Examples\n--------\n" in text, documented
        signature = inspect.signature(documented)
        taken = set(signature.parameters) - {"self"}
        section = "Attributes" if name in ("Handle", "Trained") and documented is thing else "Parameters"
        assert not taken or f"{section}\n{'-' * len(section)}\n" in text, documented
        assert section != "Parameters" or all(f"\n{parameter} : " in text for parameter in taken), documented
        returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
        assert inspect.isclass(documented) or not returns or "Returns\n-------\n" in text, documented


DOCTESTS = """
import doctest, importlib
for name in ("adam_mpi", "adam_mpi.api", "adam_mpi.inference.trained", "adam_mpi.parameter_server.client",
             "adam_mpi.parameter_server.handles", "adam_mpi.parameter_server.server"):
    result = doctest.testmod(importlib.import_module(name))
    print(name, result)
    assert result.attempted and not result.failed
"""


@pytest.mark.slow
def test_the_examples_of_the_documentation_run(tmp_path):
    done = run_python(DOCTESTS, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# A program of a user, with types that are right on the first lines and wrong on the marked ones.
TYPED = """
import numpy as np
from mpi4py import MPI
import adam_mpi

version: str = adam_mpi.__version__
model: adam_mpi.Trained = adam_mpi.load("run")
found: np.ndarray = model.predict(np.zeros(3))
server = adam_mpi.ParameterServer(MPI.COMM_WORLD, 3)
doubled = 2 * server.wait(server.pull())
2 * server.wait(server.push(found))  # wrong
adam_mpi.load(3)  # wrong
adam_mpi.train(epochs=3)  # wrong
adam_mpi.nothing  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_types(tmp_path):
    checker = pytest.importorskip("mypy.api", reason="pip install mypy")
    (tmp_path / "program.py").write_text(TYPED)
    cache = str(tmp_path / "cache")
    found, errors, _ = checker.run(
        ["--cache-dir", cache, "--config-file", str(ROOT / "setup.cfg"), str(tmp_path / "program.py")]
    )
    lines = [int(line) for line in re.findall(r"program.py:(\d+): error", found)]
    wrong = [number for number, line in enumerate(TYPED.splitlines(), 1) if "# wrong" in line]
    assert lines == wrong, found + errors


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
