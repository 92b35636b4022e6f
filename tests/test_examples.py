"""The programs in examples/ run as their first lines say, and are short."""

import re
import subprocess
import sys

import pytest
from launch import LAUNCH, ROOT, clean_environment

EXAMPLES = ROOT / "examples"


def run_alone(folder, name, *arguments):
    """Run an example in one process, in `folder`; return its output."""
    return finish([sys.executable, EXAMPLES / name, *arguments], folder)


def run_ranks(mpi, folder, ranks, name, *arguments):
    """Run an example on `ranks` ranks of `mpi`, in `folder`; return its output."""
    launcher = ["bash", "-c", LAUNCH, ROOT / "scripts" / "lib.sh", mpi.mpirun, str(ranks)]
    return finish([*launcher, mpi.python, EXAMPLES / name, *arguments], folder)


def finish(command, folder):
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which train.py has run."""
    folder = tmp_path_factory.mktemp("examples")
    output = run_alone(folder, "train.py")
    accuracy = re.search(r"runs/example: test accuracy ([\d.]+)% with 3,098 parameters", output)
    assert accuracy is not None and float(accuracy[1]) > 60, output
    return folder


@pytest.mark.slow
def test_predict(trained):
    output = run_alone(trained, "predict.py")
    predictions = re.findall(r"digit (\d): predicted (\d) with probability ([\d.]+)", output)
    assert len(predictions) == 8 and sum(label == predicted for label, predicted, _ in predictions) >= 4, output
    assert "relu1 has shape (8, 8, 24, 24)" in output
    changed = re.search(r"change by up to ([\d.]+)", output)
    assert changed is not None and 0 < float(changed[1]) <= 1


@pytest.mark.slow
def test_export_onnx(trained):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    difference = re.search(r"largest difference on 100 images: (\S+)", run_alone(trained, "export_onnx.py"))
    assert difference is not None and float(difference[1]) < 1e-5


def test_logistic_regression(mpi, tmp_path):
    output = run_ranks(mpi, tmp_path, 3, "logistic_regression.py")
    found = re.findall(r"client (\d): accuracy ([\d.]+)%, best possible ([\d.]+)%", output)
    assert {client for client, _, _ in found} == {"0", "1"}, output
    assert all(float(accuracy) > float(best) - 3 for _, accuracy, best in found), output


def test_staleness(mpi, tmp_path):
    output = run_ranks(mpi, tmp_path, 4, "staleness.py")
    rows = re.findall(r"^ +(0|2|inf) +([\d.]+) +([\d,]+) +([\d.]+)%$", output, re.M)
    assert [bound for bound, *_ in rows] == ["0", "2", "inf"], output
    assert float(rows[0][1]) == 0 and float(rows[1][1]) <= 2


def test_the_readme_lists_every_example():
    listed = re.findall(
        r"^\| \[(\w+\.py)\]\(\1\) \|.*`.*python examples/\1`", (EXAMPLES / "README.md").read_text(), re.M
    )
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert re.search(rf"^    (mpirun -n \d )?python examples/{path.name}", text, re.M)
