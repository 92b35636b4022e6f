"""Programs that use `ParameterServer` and lose a rank, or raise: real jobs, real kills."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from launch import LAUNCH, ROOT, UNTESTED, available, clean_environment

PROGRAM = Path(__file__).parent / "parameter_server_program.py"
SECONDS = 90
only_ulfm = pytest.mark.skipif(
    all(mpi.name != "openmpi" for mpi in available()), reason="only Open MPI survives a dead rank"
)


@pytest.fixture
def run(mpi, tmp_path):
    """Return a function that runs a scenario on `ranks` ranks and returns its exit code, stdout and stderr."""
    temporary = tempfile.mkdtemp(prefix="adam-")

    def call(ranks, scenario):
        command = ["bash", "-c", LAUNCH, ROOT / "scripts/lib.sh", mpi.mpirun, str(ranks), mpi.python, PROGRAM, scenario]
        environment = clean_environment() | {"TMPDIR": temporary}
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout, UNTESTED.sub("", done.stderr.replace("\0", "\n"))

    yield call
    shutil.rmtree(temporary, ignore_errors=True)


@only_ulfm
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
@pytest.mark.parametrize(
    ("scenario", "generation", "closed"),
    [
        ("server", 1, {0, 1, 2, 4}),
        pytest.param("two servers", 2, {0, 1, 3}, marks=pytest.mark.full),
        pytest.param("client", 1, {0, 2, 3, 4}, marks=pytest.mark.full),
    ],
)
def test_the_others_continue_and_no_push_is_lost_or_applied_twice(scenario, generation, closed, run):
    _, out, errors = run(5, scenario)
    clients = {client: result for client, result in re.findall(r"client (\d) (.*)", out)}
    assert clients == {str(rank): f"right generation {generation}" for rank in closed if rank < 2}, out + errors
    assert {int(rank) for rank in re.findall(r"closed (\d)", out)} == closed, out + errors
    assert "Traceback" not in errors


@only_ulfm
@pytest.mark.full
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_the_loss_of_the_only_copy_ends_the_job(run):
    code, out, errors = run(4, "alone")
    assert code != 0 and "closed" not in out
    assert re.search(r"rank 2, server on \S+ died; no copy is left of \d+ of 16 shards.*; the job ends", errors)


@pytest.mark.parametrize("scenario", ["raise", pytest.param("with", marks=pytest.mark.full)])
def test_a_client_that_raises_ends_the_job(scenario, run):
    code, out, errors = run(4, scenario)
    assert code != 0 and "closed" not in out
    assert re.search(r"adam_mpi: rank 0, worker \(replica 0, strip 0\) on \S+ raised; the job ends", errors), errors
    assert errors.count("ValueError: the client's own mistake") == 1, errors


@pytest.mark.full
def test_a_client_that_exits_without_closing_ends_the_job(run):
    code, out, errors = run(4, "exit")
    assert code != 0 and "closed" not in out
    assert re.search(r"adam_mpi: rank 0, worker .* left without close\(\); the job ends", errors), errors
