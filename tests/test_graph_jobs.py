"""Jobs that train graphs: from a configuration and from Python, on several ranks, through the loss of one."""

import subprocess
import sys

import numpy as np
import pytest
from launch import ROOT, available, clean_environment, given

import adam_mpi
from adam_mpi.base.errors import UserError
from adam_mpi.data.sets import open_set

LAYERS = """[
    {kind = "avg_pool", size = 4}, {kind = "dense", units = 24, name = "stem"}, "tanh",
    {repeat = 2, name = "block", layers = [
        {kind = "dense", units = 24}, "silu", {kind = "dense", units = 24},
        {kind = "add", inputs = ["dense2", "input"]}]},
    {kind = "dense", units = 10}]"""
SETTINGS = given(
    f"model.layers={LAYERS}",
    "data.images=1000",
    "train.epochs=2",
    "optimizer.learning_rate=0.1",
    "kernels.engine=reference",
)
# The same model in Python; a user's own function of elements; what comes back predicts and is exported.
PROGRAM = """
import numpy as np
import adam_mpi
from adam_mpi import nn

x = nn.input((1, 28, 28), "byte")
y = nn.dense(nn.max_pool(x, 4), 16)
gate = nn.elementwise(lambda a, b: a * nn.tanh(b), y, nn.dense(y, 16))
z = nn.dense(nn.add(y, gate), 10)
target = nn.target()
model = nn.graph(z, nn.softmax_cross_entropy(z, target), {"correct": nn.correct(z, target)})
trained = adam_mpi.train({"data": {"images": 1280}, "train": {"epochs": 1}}, model=model, run="run")
assert trained.summary["status"] == "done"
images = np.random.default_rng(0).integers(0, 256, (7, 28, 28)).astype(np.uint8)
np.save("images.npy", images)
np.save("found.npy", trained.predict(images))
(again,) = trained.run({"input": images}, ["dense3"])
np.testing.assert_allclose(again, trained.predict(images), rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
def test_all_ranks_together_compute_what_one_does(launch):
    settings = [*SETTINGS, *given("consistency.staleness=0")]
    one, three = (launch(ranks, "train", *settings) for ranks in (1, 3))
    for job in (one, three):
        assert job.returncode == 0 and job.summary["status"] == "done", job.said()
    curves = [[line["loss"] for line in job.metrics() if line["done"]] for job in (one, three)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4) and curves[0][-1] < curves[0][0]


@pytest.mark.slow
@pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="only Open MPI survives a dead rank")
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_a_graph_is_trained_although_a_worker_dies(launch):
    faults = 'inject.faults=["kill rank=3 at=push step=10"]'
    job = launch(4, "train", *SETTINGS, *given(faults, "train.epochs=4", "layout.servers=1", "layout.data=1"))
    assert job.returncode == 0 and job.summary["generation"] == 1, job.said()
    model = adam_mpi.load(job.run)
    assert model.summary["test_accuracy"] > 0.2
    assert model.tensors["block2.dense1/weight"].shape == (24, 24)


@pytest.mark.slow
@pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="only Open MPI survives a dead rank")
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_a_regression_is_trained_with_adam_although_a_worker_dies(launch, tmp_path):
    random = np.random.default_rng(0)
    inputs = random.standard_normal((2000, 20)).astype(np.float32)
    targets = np.tanh(inputs @ random.standard_normal((20, 3)).astype(np.float32) / 4)
    np.savez(tmp_path / "table.npz", input=inputs, target=targets)
    data = [f"data.set={tmp_path / 'table.npz'}", 'data.inputs=["input"]', 'data.targets=["target"]']
    model = ['model.layers=[{kind = "dense", units = 48}, "tanh", {kind = "dense", units = 3}]']
    loss = [
        'model.losses=["mean_squared_error"]',
        'train.metrics=["r2"]',
        "train.epochs=20",
        "kernels.engine=reference",
    ]
    rule = ["optimizer.kind=adam", "optimizer.learning_rate=0.003", "layout.servers=1", "layout.data=1"]
    job = launch(4, "train", *given(*data, *model, *loss, *rule, 'inject.faults=["kill rank=3 at=push step=10"]'))
    assert job.returncode == 0 and job.summary["generation"] == 1, job.said()
    predicted = adam_mpi.load(job.run).predict(inputs)
    assert np.mean((predicted - targets) ** 2) < 0.5 * targets.var()


@pytest.mark.slow
def test_running_statistics_are_averages_of_what_all_replicas_see(launch):
    layers = '[{kind = "avg_pool", size = 4}, {kind = "batch_norm", images = 32}, {kind = "dense", units = 10}]'
    settings = ["data.images=1000", "train.epochs=3", "kernels.engine=reference", "consistency.staleness=0"]
    job = launch(4, "train", *given(f"model.layers={layers}", "optimizer.kind=adamw", "optimizer.decay=0.1", *settings))
    assert job.returncode == 0, job.said()
    model = adam_mpi.load(job.run)
    images, _ = open_set(model.config.data).read("train", np.arange(800))
    (pooled,) = model.run({"input": images}, ["avg_pool1"])
    np.testing.assert_allclose(model.tensors["batch_norm1/mean"], pooled.mean(), rtol=0.1)
    np.testing.assert_allclose(model.tensors["batch_norm1/variance"], pooled.var(), rtol=0.2)


def test_what_changes_gradients_is_refused_for_statistics(launch):
    layers = '[{kind = "batch_norm"}, {kind = "dense", units = 10}]'
    job = launch(1, "train", *given(f"model.layers={layers}", "consistency.staleness=3"))
    assert job.returncode == 2
    assert "consistency.staleness = 3.0 does not fit the running statistic batch_norm1/mean" in job.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_from_python_trains_predicts_and_is_exported(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    environment = clean_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    runtime = pytest.importorskip("onnxruntime")
    from adam_mpi.inference.export import onnx_file

    images = np.load(tmp_path / "images.npy")
    onnx_file.write(adam_mpi.load(tmp_path / "run"), tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {"input": images[:, None]})
    np.testing.assert_allclose(found, np.load(tmp_path / "found.npy"), atol=1e-4)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.losses=['huber']", "the model.s target target 10 of type float is fed integer of scalar"),
        ("model.losses=['nothing']", r"model.losses\[0\] is 'nothing'; give the kind of a loss"),
        (f"model.layers={LAYERS.replace('units = 10', 'units = 9')}", "9 scores for 10 classes"),
        ("model.graph=graph", "model.graph: not a graph that this version wrote"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(setting, message):
    from adam_mpi import config
    from adam_mpi.data.sets import Description
    from adam_mpi.planning import plan

    settings = config.load(None, [*SETTINGS[1::2], setting])
    with pytest.raises(UserError, match=message) as caught:
        plan.model(settings, Description("digits", (1, 28, 28), classes=10, train=9, validation=1, test=1))
    assert "\n" not in str(caught.value)


def test_a_graph_is_not_cut():
    from adam_mpi import config
    from adam_mpi.planning import plan

    settings = config.load(None, [*SETTINGS[1::2], "layout.partitions=2"])
    with pytest.raises(UserError, match="is computed whole; set layout.partitions = 1"):
        plan.plan_job(settings, 4, None, "1x28x28:10")
