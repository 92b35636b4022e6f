"""Bytes through tables of levels and floats as they are, in both engines, whole and on strips."""

import numpy as np
import pytest

from adam_mpi.config import load
from adam_mpi.data.sets import describe, describe_inputs, open_set
from adam_mpi.model.engine import jit, program
from adam_mpi.model.engine.engine_context import EngineContext
from adam_mpi.model.input_format import InputFormat
from adam_mpi.model.layers import Activation, Conv, Dense, MaxPool, infer
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import initial
from adam_mpi.planning.plan import network

STACKS = {
    "images": infer([Conv(4, 3), Activation("relu"), MaxPool(2), Dense(5)], (3, 7, 6), 5),
    "features": infer([Dense(9), Activation("relu"), Dense(5)], (11, 1, 1), 5),
}
COUNT = 7


def numbers(shape, form, pixels):
    """Return what the first layer is to get for `pixels`, by numpy alone."""
    if not form.mean:
        return pixels / 255
    column = (slice(None), None, None)
    return (pixels - np.array(form.mean)[column]) * np.array(form.factor)[column]


def results(context, weights, images, labels):
    gradient = np.zeros_like(weights)
    loss, correct = context.train(weights, gradient, images, labels, ids=np.arange(COUNT), epoch=1)
    return loss, correct, gradient


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kind", ["bytes", "normalized", "float32", "float16"])
@pytest.mark.parametrize(("lanes", "make"), [(4, jit.uncompiled), (16, jit.uncompiled), (8, jit.run)])
def test_inputs_of_every_format_give_what_their_numbers_give(stack, kind, lanes, make):
    shapes = STACKS[stack]
    random = np.random.default_rng(3)
    channels = shapes[0].input[0]
    form = InputFormat()
    if kind == "normalized":
        form = InputFormat(
            "uint8", tuple(random.uniform(90, 160, channels)), tuple(random.uniform(0.01, 0.02, channels))
        )
    pixels = random.integers(0, 256, (COUNT, *shapes[0].input), dtype=np.uint8)
    wanted = numbers(shapes[0].input, form, pixels)
    images = pixels
    if kind.startswith("float"):
        form = InputFormat(kind)
        images = wanted.astype(kind)
        wanted = images.astype(np.float64)
    labels = random.integers(0, 5, COUNT)
    weights = initial(shapes, 0)
    reference = Network(shapes, COUNT, 11, np.float64, form=InputFormat("float32")).context()
    loss, correct, gradient = results(reference, weights.astype(np.float64), wanted, labels)
    built = program.build(shapes, COUNT, lanes, 16, form=form)
    compiled = {} if make is jit.uncompiled else {"pixels": "uint8" if form.bytes else "float32"}
    engine = EngineContext(shapes, COUNT, 11, built, make(built.text, built.lanes, **compiled))
    slow = Network(shapes, COUNT, 11, form=form).context()
    for context in (engine, slow):
        found = results(context, weights, images, labels)
        assert found[0] == pytest.approx(loss, rel=1e-5) and found[1] == correct
        np.testing.assert_allclose(found[2], gradient, atol=2e-5 * np.abs(gradient).max())


def test_floats_are_refused_where_bytes_are_expected():
    context = Network(STACKS["features"], COUNT, 11, engine="generated").context()
    with pytest.raises(TypeError, match="float32"):
        context.evaluate(initial(STACKS["features"], 0), np.zeros((COUNT, 11, 1, 1), np.float32), np.zeros(COUNT, int))


def test_normalized_bytes_and_floats_are_computed_by_generated_kernels(tmp_path):
    random = np.random.default_rng(0)
    for name, images in {"bytes": random.integers(0, 256, (60, 8, 8, 3), np.uint8), "floats": np.ones((60, 5))}.items():
        np.savez(tmp_path / f"{name}.npz", images=images, labels=np.arange(60) % 3)
    for name, count in {"bytes": 3, "floats": 0}.items():
        config = load(None, [f"data.set={tmp_path / name}.npz", "data.transform.normalize=true"])
        data = open_set(config.data)
        found = describe_inputs(data)
        assert len(found.form.mean) == count and not describe(config.data).form.mean
        assert network(config, found, infer([Dense(3)], found.shape, 3)).program is not None
    images, _ = open_set(load(None, [f"data.set={tmp_path / 'bytes.npz'}"]).data).read("train", np.arange(46))
    np.testing.assert_allclose(
        describe_inputs(
            open_set(load(None, [f"data.set={tmp_path / 'bytes.npz'}", "data.transform.normalize=true"]).data)
        ).form.mean,
        images.mean(axis=(0, 2, 3)),
        rtol=1e-5,
    )
