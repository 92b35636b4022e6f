"""Whole jobs: replicas of several strips go through the same losses to the same weights as replicas of one rank."""

import h5py
import numpy as np
import pytest
from launch import given

CLASSES, STEPS, BATCH = 5, 50, 8
# Strips, replicas, rows and columns of the image, layers: 'c maps kernel stride pad', 'p size stride', 'd units', 'r'.
CASES = {
    "no conv": (3, 1, (5, 7), "d9 r"),
    "one conv": (2, 2, (9, 12), "c3,3,1,0 r d8 r"),
    "odd width": (3, 1, (9, 13), "c4,3,1,1 r p2,2 c3,3,1,1 r d6 r"),
    "stride 2": (2, 1, (11, 17), "c4,3,2,1 r c3,3,1,1 r"),
    "stride 3": (2, 1, (10, 16), "c4,1,3,0 r d7 r"),
    "pad 2": (4, 1, (8, 17), "c3,5,1,2 r p2,2"),
    "pad 3": (2, 1, (8, 14), "c3,5,1,3 r p2,2 c2,4,1,3"),
    "overlapping pools": (2, 3, (13, 19), "c3,3,1,1 r p3,2 c4,3,1,1 r p3,2"),
    "two convs and two dense": (4, 1, (12, 20), "c4,3,1,1 r c4,3,1,1 r p2,2 d12 r d9 r"),
    "three convs": (2, 1, (12, 15), "c3,3,1,1 r c4,3,1,1 r c3,3,1,1 r d8 r"),
    "four convs": (3, 1, (10, 18), "c3,3,1,1 r c3,2,1,0 r c3,3,1,1 r c3,3,1,1 r"),
    "five convs": (2, 1, (16, 23), "c3,3,1,1 r c3,3,1,1 r c3,3,1,1 r c3,3,1,1 r c3,3,1,1 r p2,2"),
}
QUICK = ("one conv", "odd width")
every_case = pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)


def layers(text):
    """As a TOML list."""
    entries = []
    for word in text.split():
        kind, numbers = word[0], word[1:].split(",")
        if kind == "c":
            entries.append('{{kind = "conv", maps = {}, kernel = {}, stride = {}, pad = {}}}'.format(*numbers))
        elif kind == "p":
            entries.append('{{kind = "pool", size = {}, stride = {}}}'.format(*numbers))
        else:
            entries.append('"tanh"' if kind == "r" else f'{{kind = "dense", units = {numbers[0]}}}')
    return f'[{", ".join(entries)}, {{kind = "dense", units = {CLASSES}}}]'


def noise(path, shape):
    draw = np.random.default_rng(5)
    images = draw.integers(0, 256, (STEPS * BATCH + 20, *shape), dtype=np.uint8)
    labels = draw.integers(0, CLASSES, len(images))
    cut = STEPS * BATCH
    test = {"test_images": images[cut:], "test_labels": labels[cut:]}
    np.savez(path, train_images=images[:cut], train_labels=labels[:cut], **test)
    return path


def trained(launch, path, text, strips, replicas, *more):
    settings = (
        f"data.set={path}", "data.validation=0", f"train.batch={BATCH}", "train.epochs=1",
        f"model.layers={layers(text)}", "consistency.staleness=0", "layout.data=1", "layout.servers=1",
        f"layout.partitions={strips}", "optimiser.rate=0.05", "optimiser.momentum=0.5", "server.shard=128",
    )  # fmt: skip
    job = launch(2 + strips * replicas, "train", *given(*settings, *more))
    assert job.returncode == 0, job.said()
    weights = {}
    with h5py.File(job.run / "weights.h5") as file:
        file.visititems(lambda name, item: weights.__setitem__(name, item[()]) if hasattr(item, "dtype") else None)
    return job, {name: value for name, value in weights.items() if isinstance(value, np.ndarray)}


def same(one, other):
    (job, weights), (other_job, others) = one, other
    assert other_job.summary["train_loss"] == pytest.approx(job.summary["train_loss"], rel=1e-5)
    assert other_job.summary["test_loss"] == pytest.approx(job.summary["test_loss"], rel=1e-5)
    assert weights.keys() == others.keys()
    for name, values in weights.items():
        np.testing.assert_allclose(others[name], values, rtol=1e-5, atol=1e-5 * np.abs(values).max(), err_msg=name)


@every_case
@pytest.mark.timeout(300)
def test_strips_go_the_same_way_as_one_piece(launch, tmp_path, case):
    strips, replicas, shape, text = CASES[case]
    path = noise(tmp_path / "noise.npz", shape)
    same(trained(launch, path, text, 1, 1), trained(launch, path, text, strips, replicas))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("setting", ["cluster.transport=send", "worker.in_flight=1", "worker.threads=2"])
def test_the_same_way_whatever_carries_it(launch, tmp_path, setting):
    _, _, shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape)
    same(trained(launch, path, text, 1, 1), trained(launch, path, text, 2, 1, setting))


@pytest.mark.timeout(300)
def test_asynchronous_and_bounded_strips_come_to_an_end_and_report_every_image(launch, tmp_path):
    _, _, shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape)
    for staleness in ("inf", "2"):
        job, _ = trained(launch, path, text, 2, 2, f"consistency.staleness={staleness}", "train.epochs=2")
        assert job.summary["status"] == "done" and job.summary["images"] == 2 * STEPS * BATCH
        assert job.summary["pushes"]["sent"] == job.summary["pushes"]["acknowledged"]
