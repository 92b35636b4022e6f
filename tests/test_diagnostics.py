"""Diagnostics of a model: layers in numbers, the outputs of an image, and the layer of the first NaN."""

import re
import subprocess
import sys

import numpy as np
import pytest
from launch import given
from test_network import block, prepare

from adam_mpi.model.parameters import tensors, views
from adam_mpi.report.layer_report import statistics
from adam_mpi.sharding.batches import image_batch
from adam_mpi.worker.diagnostics import NaNDetector, describe, suspects

INSPECT = [sys.executable, "-m", "adam_mpi", "inspect"]


def inspect(*arguments, folder=None):
    return subprocess.run([*INSPECT, *map(str, arguments)], capture_output=True, text=True, timeout=100, cwd=folder)


def test_layers_and_an_image_of_a_run(launch, tmp_path):
    from PIL import Image

    from adam_mpi.data import glyphs

    job = launch(2, "train", *given("data.images=2000", "train.epochs=1"))
    assert job.returncode == 0, job.said()
    done = inspect(job.run, "--layers")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and [line.split()[0] for line in lines[1:4]] == ["conv1", "weight", "bias"], done
    assert "1x28x28" in lines[1] and "10x24x24" in lines[1] and re.search(r"mean [+-].*deviation .*\|.*█.*\|", lines[2])
    pixels, labels = glyphs.draw_glyphs(1, "test", np.arange(1))
    Image.fromarray(pixels[0, 0]).save(tmp_path / "glyph.png")
    done = inspect(job.run, "--image", tmp_path / "glyph.png", "-o", tmp_path / "layers.png")
    assert done.returncode == 0 and f"glyph.png: {labels[0]} " in done.stdout, done
    # Eleven layers and the input: taller than wide would be wrong, and so would an empty picture.
    picture = np.asarray(Image.open(tmp_path / "layers.png").convert("RGB"))
    assert picture.shape[1] > 1000 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 100


def test_statistics_count_values_that_are_not_finite():
    values = np.array([0, 0, 1, 3, np.nan, np.inf], np.float32)
    text = statistics(values)
    assert "mean +1.000e+00" in text and "zeros 50.0%" in text and "NOT FINITE: 2" in text
    assert "none of 2 values is finite" in statistics(values[4:])


def batch(pixels, number=7):
    ids = np.arange(len(pixels))
    labels = np.zeros(len(pixels), np.int64)
    return image_batch(number, ids, labels, pixels, epoch=3)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("conv2/weight", np.nan, "conv2/weight"),
        ("conv1/weight", 3e38, "the output of conv1"),
        ("dense2/bias", np.inf, "dense2/bias"),
    ],
)
def test_the_first_layer_that_is_not_finite_is_reported(name, value, what):
    shapes, weights = prepare("conv relu pool")
    views(weights, tensors(shapes))[name][:] = value
    pixels = block(3)[0]
    detector = NaNDetector(shapes)
    detector.look(0.5, weights, batch(pixels, number=6))
    detector.look(float("nan"), weights, batch(pixels))
    detector.look(float("nan"), weights, batch(pixels, number=8))
    found = detector.trouble
    assert found is not None
    assert (found.what, found.step, found.epoch, found.batches, found.images) == (what, 2, 3, [7], [0, 1, 2])
    assert describe(found.stats()) == f"{what} is not finite: step 2, epoch 3, batch 7"


def test_nothing_is_reported_of_a_finite_network():
    shapes, weights = prepare("conv relu pool")
    assert list(suspects(shapes, weights, block(3)[0])) == []


def test_a_job_that_diverges_reports_the_layer_and_ends(launch):
    """With far too large steps, the first output that overflows is on the terminal and in the summary."""
    # Synchronous, so that the first step is certainly on the initial weights.
    settings = given("data.images=3000", "train.epochs=1", "optimizer.learning_rate=1e12", "observe.interval=0.2")
    job = launch(3, "train", *settings, *given("consistency.staleness=0", "worker.threads=1"))
    assert job.returncode == 2 and not (job.run / "DONE").exists(), job.said()
    failure = job.summary["failure"]
    assert re.match(r"rank 0, data on \S+: epoch 1/1 train: training has diverged after \d+ images: .* finite", failure)
    assert "; set optimizer.learning_rate below 1e+12" in failure
    assert job.summary["status"] == "failed" and job.stderr.count(failure) == 1, job.said()
    (printed,) = re.findall(r"^rank \d+: (.*) is not finite: step (\d+), epoch 1, batch \d+", job.stdout, re.MULTILINE)
    reported = list(job.summary["not_finite"].values())
    assert printed[0] in [trouble["what"] for trouble in reported] and int(printed[1]) >= 2
    assert all(trouble["layer"] in trouble["what"] for trouble in reported) and job.summary["pushes"]["refused"] > 0


def test_a_job_that_learned_nothing_ends_with_a_warning(launch):
    """Weights that do not change classify no better than guessing."""
    job = launch(2, "train", *given("data.images=640", "train.epochs=1", "optimizer.learning_rate=1e-12"))
    assert job.returncode == 0 and (job.run / "DONE").exists(), job.said()
    (warning,) = job.summary["warnings"]
    assert warning.startswith("nothing was learned: test accuracy ") and "optimizer.learning_rate" in warning
    assert job.stdout.splitlines()[-1] == f"warning: {warning}"
