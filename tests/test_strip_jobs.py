"""Whole jobs: replicas of several strips have the losses and weights of replicas of one rank."""

import re

import h5py
import numpy as np
import pytest
from launch import given, spread

from adam_mpi.cli import main

CLASSES = 5
STEPS = 50
BATCH = 8
WINDOWS = {"p": "max_pool", "a": "avg_pool"}
# Models whose losses in float32 on one rank are those of float64 within 4e-6 (five convs of three maps differ by 0.1).
# Rows and columns of the image, layers: 'c maps kernel stride pad', 'p size stride' (or 'a'), 'd units', 'r'.
CASES = {
    "one conv": ((9, 12), "c3,3,1,0 r d8 r"),
    "odd width": ((9, 15), "c4,3,1,1 r p2,2 c3,3,1,1 r d6 r"),
    "no conv": ((5, 7), "d9 r"),
    "stride 2": ((11, 17), "c4,3,2,1 r c3,3,1,1 r"),
    "stride 3": ((10, 16), "c4,1,3,0 r d7 r"),
    "pad 2": ((8, 17), "c3,5,1,2 r p2,2"),
    "pad 3": ((8, 14), "c3,5,1,3 r p2,2 c2,4,1,3"),
    "overlapping pools": ((13, 19), "c3,3,1,1 r p3,2 c4,3,1,1 r p3,2"),
    "two convs and two dense": ((12, 20), "c4,3,1,1 r c4,3,1,1 r p2,2 d12 r d9 r"),
    "three convs": ((12, 15), "c3,3,1,1 r c4,3,1,1 r c3,3,1,1 r d8 r"),
    "four convs": ((10, 18), "c3,3,1,1 r c3,2,1,0 r c3,3,1,1 r c3,3,1,1 r"),
    "five convs": ((16, 23), "c4,3,1,1 r c4,3,1,1 r c4,3,1,1 r c4,3,1,1 r c4,3,1,1 r p2,2"),
}
# Strips and replicas, with one strip and one replica besides: three of each number of strips for three cases.
LAYOUTS = [[(strips, 1 + (strips + turn) % 3) for strips in (1, 2, 3, 4)] for turn in range(3)]
QUICK = {"one conv": [(2, 2)], "odd width": [(3, 1)]}
every_case = pytest.mark.parametrize(
    ("case", "layouts"),
    [
        *QUICK.items(),
        *(pytest.param(case, LAYOUTS[i % 3], marks=pytest.mark.full) for i, case in enumerate(CASES)),
    ],
)


def layers(text):
    """Return the layers of a case as a TOML list."""
    entries = []
    for word in text.split():
        kind = word[0]
        numbers = word[1:].split(",")
        if kind == "c":
            entries.append('{{kind = "conv", channels = {}, kernel = {}, stride = {}, pad = {}}}'.format(*numbers))
        elif kind in WINDOWS:
            entries.append(f'{{kind = "{WINDOWS[kind]}", size = {numbers[0]}, stride = {numbers[1]}}}')
        else:
            entries.append('"tanh"' if kind == "r" else f'{{kind = "dense", units = {numbers[0]}}}')
    return f'[{", ".join(entries)}, {{kind = "dense", units = {CLASSES}}}]'


def noise(path, shape, batches=1):
    """Write random images for `batches` steps per epoch; with one, every step reports its loss. Return `path`."""
    draw = np.random.default_rng(5)
    images = draw.integers(0, 256, (batches * BATCH + 20, *shape), dtype=np.uint8)
    labels = draw.integers(0, CLASSES, len(images))
    cut = batches * BATCH
    test = {"test_images": images[cut:], "test_labels": labels[cut:]}
    np.savez(path, train_images=images[:cut], train_labels=labels[:cut], **test)
    return path


def settings(path, text, strips, *more):
    return given(
        f"data.set={path}",
        "data.validation=0",
        f"train.batch={BATCH}",
        f"train.epochs={STEPS}",
        f"model.layers={layers(text)}",
        "consistency.staleness=0",
        "layout.data=1",
        "layout.servers=1",
        f"layout.partitions={strips}",
        "optimizer.learning_rate=0.05",
        "optimizer.momentum=0.5",
        "server.shard=128",
        *more,
    )


def trained(launch, path, text, strips, replicas, *more):
    return result(launch(2 + strips * replicas, "train", *settings(path, text, strips, *more)))


def result(job):
    assert job.returncode == 0, job.said()
    weights = {}
    with h5py.File(job.run / "weights.h5") as file:
        file.visititems(lambda name, item: weights.__setitem__(name, item[()]) if hasattr(item, "dtype") else None)
    return job, {name: value for name, value in weights.items() if isinstance(value, np.ndarray)}


def losses(job):
    """Return the loss of each epoch."""
    return [line["loss"] for line in job.metrics() if line["part"] == "train" and line["done"]]


def same(one, other, steps=STEPS):
    (job, weights), (other_job, others) = one, other
    assert len(losses(job)) == steps
    np.testing.assert_allclose(losses(other_job), losses(job), rtol=1e-5)
    assert other_job.summary["test_loss"] == pytest.approx(job.summary["test_loss"], rel=1e-5)
    assert weights.keys() == others.keys()
    for name, values in weights.items():
        np.testing.assert_allclose(others[name], values, rtol=1e-5, atol=1e-5 * np.abs(values).max(), err_msg=name)


@every_case
@pytest.mark.timeout(600)
def test_strips_agree_with_one_rank(launch, tmp_path, case, layouts):
    shape, text = CASES[case]
    path = noise(tmp_path / "noise.npz", shape)
    alone = trained(launch, path, text, 1, 1)
    for strips, replicas in layouts:
        if (strips, replicas) != (1, 1):
            same(alone, trained(launch, path, text, strips, replicas))


WAYS = ["cluster.transport=send", "worker.in_flight=1", "worker.threads=2"]


# Compiling takes seconds per strip.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "setting", ["kernels.engine=generated", *(pytest.param(way, marks=pytest.mark.full) for way in WAYS)]
)
def test_strips_agree_with_every_transport_and_engine(launch, tmp_path, setting):
    shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape)
    same(trained(launch, path, text, 1, 1), trained(launch, path, text, 2, 1, setting))


@pytest.mark.timeout(300)
def test_a_run_resumes_with_another_number_of_strips(launch, tmp_path):
    shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape)
    constant = "optimizer.schedule=constant"
    alone = trained(launch, path, text, 1, 1, constant)
    half, _ = trained(launch, path, text, 2, 1, constant, f"train.epochs={STEPS // 2}")
    resumed = launch(5, "train", "--run", half.run, "--resume", *settings(path, text, 3, constant))
    same(alone, result(resumed))


LATE = pytest.param(("--delay", "1ms"), marks=pytest.mark.full, id="late")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", [pytest.param((), id="at once"), LATE], indirect=True)
def test_strips_on_three_hosts_agree_with_one_rank(launch, hosts, tmp_path):
    shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape)
    job, weights = result(launch(5, "train", *settings(path, text, 3), environment=hosts.environment))
    places = {rank: host for log in job.logs().values() for rank, host in re.findall(r"(strip \d)\) on (h\d)", log)}
    assert len(set(places.values())) == 3, places
    same(trained(launch, path, text, 1, 1), (job, weights))


GENERATED = pytest.param("generated", "openmpi", marks=pytest.mark.full)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("engine", "mpi"), [*spread(["reference"]), GENERATED], indirect=["mpi"])
def test_eval_on_strips_prints_the_same_as_in_one_process(launch, tmp_path, capsys, engine):
    shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape)
    job, _ = trained(launch, path, text, 2, 1, "train.epochs=2", f"kernels.engine={engine}")
    assert main(["eval", str(job.run)]) == 0
    alone = capsys.readouterr().out
    assert f"loss {job.summary['test_loss']:.4f}, 20 images" in alone
    for ranks in (2, 3):
        strips = launch(ranks, "eval", job.run)
        assert strips.returncode == 0 and strips.stdout.endswith(alone), strips.said()
    most = launch(6, "eval", job.run)
    assert most.returncode == 2
    message = f"eval on 6 ranks, a strip for each: layout.partitions = 6: dense2 has {CLASSES} units; set at most 4"
    assert message in most.stderr and most.stderr.count("adam_mpi:") == 1


@pytest.mark.timeout(300)
def test_asynchronous_and_bounded_strips_finish_and_report_every_image(launch, tmp_path):
    shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape, STEPS)
    for staleness in ("inf", "2"):
        job, _ = trained(launch, path, text, 2, 2, f"consistency.staleness={staleness}", "train.epochs=2")
        assert job.summary["status"] == "done" and job.summary["images"] == 2 * STEPS * BATCH
        assert job.summary["pushes"]["sent"] == job.summary["pushes"]["acknowledged"]
