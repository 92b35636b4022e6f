"""The figures of a run over time: lines of metrics.jsonl, and the same in TensorBoard's event files."""

import subprocess
import sys

import pytest
from launch import given

from adam_mpi.monitor.metrics import scalars

LAYERS = {"conv1", "conv2", "dense1", "dense2", "dense3"}


def test_a_run_leaves_all_figures_in_both(launch):
    settings = given("data.images=4000", "train.epochs=2", "observe.interval=0.3", "observe.tensorboard=true")
    job = launch(4, "train", *settings)
    assert job.returncode == 0, job.said()
    lines = job.metrics()
    last = [line for line in lines if line["part"] == "train" and line["done"]][-1]
    assert last["images_trained"] == 8000 and set(last["layers"]) == LAYERS
    assert all(row["weight_norm"] > 0 and row["gradient_norm"] > 0 for row in last["layers"].values())
    assert all(("dead" in row) == (name != "dense3") for name, row in last["layers"].items())
    assert last["bytes"]["pushed"] > 0 and last["bytes"]["pulled"] > 0 and last["bytes"]["served"] > 4000 * 28 * 28
    # From the servers' last reports, up to half an interval old.
    assert 0 < sum(last["staleness_histogram"].values()) <= job.summary["pushes"]["applied"]
    assert last["apply_batch"] >= 1 and 0 < last["busy"]["worker"] <= 1 and lines[0]["rate"] > 0
    pushed = {name: size for name, size in job.summary["traffic"].items() if not name.endswith("pull")}
    assert {name.split()[0] for name in pushed} == LAYERS
    # Headers come on top of what the layers take.
    assert 0.98 * job.summary["pushes"]["bytes"] < sum(pushed.values()) < job.summary["pushes"]["bytes"]
    found = events(job.run / "tensorboard")
    wanted = {
        "loss/train",
        "accuracy/validation",
        "rate",
        "images_per_second",
        "bytes/pushed",
        "apply_batch",
        "store_lag",
        "busy/server",
        "layers/dense1/dead",
        "staleness_histogram",
    }
    assert wanted <= set(found), f"missing: {wanted - set(found)}"
    assert found["loss/train"][-1] == (8000, pytest.approx(last["loss"]))


def events(folder):
    """Return tag -> its (step, value) in order; for a histogram the value is its count."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for record in records(next(folder.glob("events.*"))):
        event = Event.FromString(record)
        for value in event.summary.value:
            number = value.histo.num if value.HasField("histo") else round(value.simple_value, 12)
            found.setdefault(value.tag, []).append((event.step, number))
    return found


def records(path):
    """Yield the records of an event file: each is its length, a checksum, the record, and a checksum."""
    data = path.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + size]
        data = data[16 + size :]


def test_names_of_nested_figures():
    line = {"loss": 0.5, "done": True, "part": "train", "busy": {"worker": 1}, "staleness_histogram": {"0": 3}}
    assert dict(scalars(line)) == {"loss": 0.5, "busy/worker": 1}


def test_without_tensorboardx_it_says_how_to_get_it(tmp_path):
    """As where it is not installed: nothing by that name can be found."""
    program = (
        "import sys, importlib.util; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'tensorboardX' else find(name, *rest);"
        "from adam_mpi.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["train", "--run", str(tmp_path / "run"), *given("observe.tensorboard=true")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "pip install 'adam-mpi[tensorboard]'" in done.stderr, done.stderr
