"""A trained network: predict, run layer by layer, export to other programs and import from them.

Only the last test trains; the others write random weights in the form that a run leaves.
"""

import json
import os
import re

import h5py
import numpy as np
import pytest
from launch import given
from PIL import Image

import adam_mpi
from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file
from adam_mpi.cli import main
from adam_mpi.config import Data, load, to_toml
from adam_mpi.data import glyphs
from adam_mpi.data.batch_loader import BatchLoader
from adam_mpi.data.formats import arrays
from adam_mpi.data.inputs import Inputs
from adam_mpi.data.sets import open_set
from adam_mpi.inference import predict as predicting
from adam_mpi.inference.import_weights import match
from adam_mpi.inference.trained import infer_shapes
from adam_mpi.model import parameters
from adam_mpi.model.parameters import Tensor

SMALL = (
    'model.layers=[{kind="conv", channels=4, kernel=5}, "relu", {kind="max_pool", size=2}, {kind="lrn", size=3},'
    ' {kind="avg_pool", size=3, stride=2}, {kind="dense", units=16}, "tanh", {kind="dropout", rate=0.5},'
    ' {kind="dense", units=12}, "sigmoid", {kind="dense", units=10}]'
)
PLAIN = 'model.layers=[{kind="conv", channels=4, kernel=3, stride=2, pad=1}, "relu", {kind="dense", units=10}]'
REFERENCE = "kernels.engine=reference"
IMAGES = glyphs.draw_glyphs(1, "test", np.arange(100))[0]


def run_directory(path, *overrides):
    """Write the file of weights that a finished run leaves, with random weights; return its folder."""
    config = load(None, [REFERENCE, *overrides])
    inputs = Inputs.of(BatchLoader(open_set(config.data), config.run.seed))
    shapes = infer_shapes(config, inputs)
    weights = parameters.initial(shapes, 7)
    weights += np.random.default_rng(7).normal(0, 0.05, weights.size).astype(np.float32)
    path.mkdir(parents=True, exist_ok=True)
    model_file.write_model(path / "weights.h5", weights, parameters.tensors(shapes), to_toml(config), inputs.to_json())
    return path


@pytest.fixture
def run(tmp_path):
    return run_directory(tmp_path / "run", SMALL)


def run_command(capsys, *arguments, code=0):
    """Run a command in this process, check its exit code, and return stderr if it fails, else stdout."""
    assert main([str(argument) for argument in arguments]) == code
    streams = capsys.readouterr()
    return streams.err if code else streams.out


def test_load_and_predict(run):
    model = adam_mpi.load(run)
    probabilities = model.predict(IMAGES)
    assert probabilities.shape == (100, 10) and np.allclose(probabilities.sum(axis=1), 1)
    # Gray images and channels that come last are understood.
    np.testing.assert_array_equal(model.predict(IMAGES[:, 0]), probabilities)
    np.testing.assert_array_equal(model.predict(IMAGES.transpose(0, 2, 3, 1)), probabilities)
    assert model.predict(IMAGES[:0]).shape == (0, 10)
    np.testing.assert_array_equal(adam_mpi.load(run / "weights.h5").predict(IMAGES), probabilities)


def test_images_of_another_shape_or_type_are_refused(run, tmp_path):
    model = adam_mpi.load(run)
    with pytest.raises(UserError, match=r"images are float32 of 1x28x28; this model takes uint8 of 1x28x28"):
        model.predict(IMAGES / 255)
    with pytest.raises(UserError, match=r"images are uint8 of 1x27x28"):
        model.predict(IMAGES[:, :, 1:])
    with pytest.raises(UserError, match="no weights; give a run directory"):
        adam_mpi.load(tmp_path)


def test_run_feeds_and_fetches_any_layer(run):
    model = adam_mpi.load(run)
    pixels, conv, relu, probabilities = model.run({"input": IMAGES}, ["input", "conv1", "relu1", "probabilities"])
    np.testing.assert_allclose(pixels, IMAGES / 255, atol=1e-7)
    # The activation works in place, and yet its input can be fetched too.
    assert conv.shape == (100, 4, 24, 24) and conv.min() < 0
    np.testing.assert_array_equal(relu, np.maximum(conv, 0))
    np.testing.assert_allclose(probabilities, model.predict(IMAGES), atol=1e-6)
    # The output of a layer can be fed, and gives the same results.
    (again,) = model.run(feed={"relu1": relu}, fetch=["probabilities"])
    np.testing.assert_array_equal(again, probabilities)
    hidden, changed = model.run({"input": IMAGES, "dense1": np.zeros((100, 16))}, ["dense1", "probabilities"])
    assert not hidden.any() and np.ptp(changed, axis=0).max() == 0


@pytest.mark.parametrize(
    ("feed", "fetch", "complaint"),
    [
        ({"input": IMAGES}, ["conv9"], "conv9: not a layer of this model; it has input, conv1, relu1"),
        ({"dense1": np.zeros((3, 16))}, ["conv1"], "conv1: comes before all that is fed"),
        ({"dense1": np.zeros((3, 17))}, ["dense2"], r"feed dense1: values of \(17,\) per image; its output is 16x1x1"),
        ({}, ["conv1"], "feed: give at least one array"),
    ],
)
def test_wrong_names_and_shapes_in_feed_and_fetch_are_refused(run, feed, fetch, complaint):
    with pytest.raises(UserError, match=complaint):
        adam_mpi.load(run).run(feed, fetch)


def test_a_model_of_normalized_and_cropped_images_needs_no_data_set(tmp_path, monkeypatch):
    data = np.random.default_rng(0).integers(0, 256, (60, 12, 12, 3)).astype(np.uint8)
    np.savez(tmp_path / "set.npz", images=data, labels=np.arange(60) % 3)
    layers = 'model.layers=[{kind="conv", channels=2, kernel=3}, "relu", {kind="dense", units=3}]'
    transform = "data.transform.normalize=true", "data.transform.crop=8"
    run_directory(tmp_path / "run", f"data.set={tmp_path / 'set.npz'}", layers, *transform)
    held = open_set(Data(set=str(tmp_path / "set.npz"), transform=load(None, transform).data.transform))
    (tmp_path / "set.npz").unlink()
    model = adam_mpi.load(tmp_path / "run")
    (numbers,) = model.run({"input": data}, ["input"])
    inner = data[:, 2:10, 2:10].transpose(0, 3, 1, 2)
    assert model.inputs.network_shape(model.config.data.transform) == held.description.shape == (3, 8, 8)
    np.testing.assert_allclose(numbers, (inner - inner_mean(model)) * factor(model), rtol=1e-5)
    np.testing.assert_array_equal(model.predict(inner), model.predict(data))


def inner_mean(model):
    return np.array(model.inputs.mean, np.float32)[:, None, None]


def factor(model):
    return np.array(model.inputs.factor, np.float32)[:, None, None]


def test_predict_images_folders_and_arrays(run, tmp_path, capsys):
    probabilities = adam_mpi.load(run).predict(IMAGES[:3])
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    files = [folder / "a.png", folder / "b.png", folder / "more" / "c.png"]
    for file, image in zip(files, IMAGES, strict=False):
        Image.fromarray(image[0]).save(file)
    lines = run_command(capsys, "predict", run, files[1], folder).splitlines()
    assert [line.split(":")[0] for line in lines] == [str(file) for file in [files[1], *files]]
    for line, row in zip(lines[1:], probabilities, strict=True):
        assert re.fullmatch(rf".*: {row.argmax()} {row.max():.1%} \(\d .*%, \d .*%\)", line)
    np.savez(tmp_path / "some.npz", test_images=IMAGES[:3], test_labels=[probabilities[0].argmax(), 11, 11])
    lines = run_command(capsys, "predict", run, tmp_path / "some.npz", "-o", tmp_path / "out.npz").splitlines()
    assert lines[3] == f"{tmp_path / 'some.npz'}: 1 of 3 right, 33.33%"
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["probabilities"], probabilities)


def test_predict_scales_images_to_the_size_of_the_model(run, tmp_path, capsys):
    Image.fromarray(np.kron(IMAGES[0, 0], np.ones((3, 3), np.uint8))).convert("RGB").save(tmp_path / "large.png")
    best = adam_mpi.load(run).predict(IMAGES[:1]).argmax()
    assert f"large.png: {best} " in run_command(capsys, "predict", run, tmp_path / "large.png")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("missing.png", "no such file"), ("empty", "no images in it"), ("broken.png", "cannot be read")],
)
def test_predict_names_what_it_cannot_read(run, tmp_path, capsys, name, complaint):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no more")
    output = run_command(capsys, "predict", run, tmp_path / name, code=2)
    assert output.startswith(f"adam_mpi: {tmp_path / name}: {complaint}") and output.count("\n") == 1


def in_onnxruntime(path, images):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], {"input": images})[0]


@pytest.mark.parametrize("layers", [SMALL, PLAIN])
def test_onnx_gives_the_same_probabilities(layers, tmp_path, capsys):
    run = run_directory(tmp_path / "run", layers)
    assert "onnx" in run_command(capsys, "export", run, "-o", tmp_path / "model.onnx")
    found = in_onnxruntime(tmp_path / "model.onnx", IMAGES)
    np.testing.assert_allclose(found, adam_mpi.load(run).predict(IMAGES), atol=1e-5)


def test_onnx_of_normalized_features(tmp_path, capsys):
    random = np.random.default_rng(0)
    features = random.normal(3, 5, (60, 7)).astype(np.float32)
    np.savez(tmp_path / "set.npz", features=features, labels=np.arange(60) % 3)
    layers = 'model.layers=[{kind="dense", units=9}, "tanh", {kind="dense", units=3}]'
    run = run_directory(tmp_path / "run", f"data.set={tmp_path / 'set.npz'}", layers, "data.transform.normalize=true")
    run_command(capsys, "export", run, "--format", "onnx", "-o", tmp_path / "model")
    found = in_onnxruntime(tmp_path / "model", features[:, :, None, None])
    np.testing.assert_allclose(found, adam_mpi.load(run).predict(features), atol=1e-5)


def test_onnx_refuses_layers_that_it_computes_differently(tmp_path, capsys):
    run = run_directory(tmp_path / "run", SMALL.replace("size=3}", "size=4}"))
    assert "take an odd size" in run_command(capsys, "export", run, "-o", tmp_path / "model.onnx", code=2)
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_exported_weights_can_be_imported(kind, run, tmp_path, capsys):
    file = tmp_path / f"model.{kind}"
    run_command(capsys, "export", run, "-o", file)
    back = tmp_path / "back.h5"
    output = run_command(capsys, "import", file, *given(SMALL, REFERENCE), "-o", back)
    assert "conv1/weight     <- conv1.weight" in output and f"model.weights={back}" in output
    np.testing.assert_array_equal(adam_mpi.load(back).predict(IMAGES), adam_mpi.load(run).predict(IMAGES))


def test_metadata_has_configuration_and_inputs(run, tmp_path, capsys):
    from safetensors import safe_open

    run_command(capsys, "export", run, "-o", tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        metadata = file.metadata()
    assert "[model]" in metadata["config"] and json.loads(metadata["inputs"])["shape"] == [1, 28, 28]


def test_foreign_tensors_are_matched_by_shape_in_the_order_of_their_numbers(tmp_path, capsys):
    from safetensors.numpy import save_file

    layers = 'model.layers=[{kind="dense", units=5}, {kind="dense", units=5}, {kind="dense", units=5}, %s]'
    layers %= '{kind="dense", units=10}'
    random = np.random.default_rng(0)
    sizes = {"10.weight": (5, 5), "2.weight": (5, 5), "0.weight": (5, 784), "12.weight": (10, 5)}
    held = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    held |= {name.replace("weight", "bias"): np.zeros(size[0], np.float32) for name, size in sizes.items()}
    save_file(held, tmp_path / "other.safetensors")
    output = run_command(capsys, "import", tmp_path / "other.safetensors", *given(layers), "-o", tmp_path / "own.h5")
    assert "dense2/weight    <- 2.weight" in output and "dense3/weight    <- 10.weight" in output
    np.testing.assert_array_equal(adam_mpi.load(tmp_path / "own.h5").tensors["dense3/weight"], held["10.weight"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors.pop("x.dense3.weight"), "nothing with weight 10x12 and bias 10, but dense3 of"),
        (lambda tensors: tensors.update(extra=np.zeros(3, np.float32)), "extra fit nowhere"),
    ],
)
def test_shapes_that_do_not_match_are_named(change, complaint, run, tmp_path, capsys):
    from adam_mpi.inference.export import named_tensors

    tensors = named_tensors(adam_mpi.load(run))
    tensors = {f"x.{name}": values for name, values in tensors.items()}
    change(tensors)
    np.savez(tmp_path / "other.npz", **tensors)
    output = run_command(capsys, "import", tmp_path / "other.npz", *given(SMALL), "-o", tmp_path / "own.h5", code=2)
    assert complaint in output and output.count("\n") == 1


def test_an_npz_that_unpacks_to_too_much_is_refused_unread(run, tmp_path, capsys, monkeypatch):
    """Zeros pack well, so the size of a file says little."""
    monkeypatch.setattr(predicting, "MOST_BYTES", 1 << 19)
    monkeypatch.setattr(arrays.Held, "all", lambda held: pytest.fail("it was read"))
    np.savez_compressed(tmp_path / "bomb.npz", images=np.zeros((1000, 28, 28), np.uint8))
    output = run_command(capsys, "predict", run, tmp_path / "bomb.npz", code=2)
    assert "images has 0.0 GiB; at most 0.000488281 GiB are read at once: write several files" in output


def parameters_of(file):
    names = []
    file.visit(names.append)
    return [name for name in names if isinstance(file[name], h5py.Dataset) and name != model_file.INPUTS]


def test_weights_that_are_announced_but_missing_are_refused_unread(run, capsys, monkeypatch):
    """A file of a few kilobytes can announce any number of them."""
    with h5py.File(run / "weights.h5", "r+") as file:
        for name in parameters_of(file):
            shape = file[name].shape
            del file[name]
            file.create_dataset(name, shape, np.float32)
    monkeypatch.setattr(model_file, "model_pieces", lambda *arguments: pytest.fail("it was read"))
    output = run_command(capsys, "predict", run, "x.png", code=2)
    assert re.search(r"weights.h5:\S+/weight: incomplete: \d+ bytes announced, 0 are in the file", output)


def test_a_file_that_is_no_npz_is_refused(run, tmp_path, capsys):
    (tmp_path / "other.npz").write_bytes(b"nothing of use")
    output = run_command(capsys, "predict", run, tmp_path / "other.npz", code=2)
    assert "other.npz: cannot be read: File is not a zip file" in output


STACK = (("conv1", (4, 1, 5, 5)), ("dense1", (16, 100)), ("dense2", (4, 16)))


def tensors_of(stack):
    """Weight and bias of each layer, as the program has them."""
    return [
        Tensor(f"{layer}/{kind}", layer, size, 0, 0)
        for layer, shape in stack
        for kind, size in (("weight", shape), ("bias", shape[:1]))
    ]


NORMS = {"1.weight": (4,), "1.bias": (4,), "1.running_mean": (4,), "1.running_var": (4,)}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        # A network with batch normalization, as it is saved; and without what is no parameter of it.
        (NORMS, "1.weight, 1.bias, 1.running_mean, 1.running_var fit nowhere"),
        ({"1.weight": (4,), "1.bias": (4,)}, "1.weight, 1.bias fit nowhere"),
        # Where layers have no bias beside it, a gamma has the shape of one.
        ({"0.bias": None, "1.weight": (4,)}, "nothing with weight 4x1x5x5 and bias 4, but conv1 of"),
        ({"other.weight": (4, 16), "other.bias": (4,)}, "4, other with weight 4x16 and bias 4, but dense2 of"),
    ],
)
def test_tensors_that_fit_nowhere_or_twice_are_refused(given, complaint, tmp_path):
    held = {"0.weight": (4, 1, 5, 5), "0.bias": (4,), "3.weight": (16, 100), "3.bias": (16,), "4.weight": (4, 16)}
    held |= {"4.bias": (4,)} | given
    held = {name: shape for name, shape in held.items() if shape}
    with pytest.raises(UserError, match=complaint):
        match(tensors_of(STACK), held, tmp_path)


def test_tensors_with_our_names_are_matched_by_name(tmp_path):
    ours = {tensor.name.replace("/", "."): tensor.shape for tensor in tensors_of(STACK)}
    assert match(tensors_of(STACK), ours, tmp_path)["dense2/bias"] == "dense2.bias"
    with pytest.raises(UserError, match="bn1.weight, bn1.bias fit nowhere"):
        match(tensors_of(STACK), ours | {"bn1.weight": (4,), "bn1.bias": (4,)}, tmp_path)
    with pytest.raises(UserError, match="dense1.bias is 17, but 16 in model.layers"):
        match(tensors_of(STACK), ours | {"dense1.bias": (17,)}, tmp_path)


def test_equal_shapes_need_numbers_in_their_names(tmp_path):
    stack = (("dense1", (8, 8)), ("dense2", (8, 8)))
    shapes = (("weight", (8, 8)), ("bias", (8,)))
    numbered, words = (
        {f"{name}.{kind}": shape for name in names for kind, shape in shapes}
        for names in (("net.10", "net.2"), ("out", "hidden"))
    )
    assert match(tensors_of(stack), numbered, tmp_path)["dense1/weight"] == "net.2.weight"
    with pytest.raises(UserError, match="out, hidden all have weight 8x8 and bias 8: their order is unknown"):
        match(tensors_of(stack), words, tmp_path)


def test_tensors_without_names_are_matched_where_each_has_one_place(tmp_path):
    arrays = {"arr_0": (16, 100), "arr_1": (16,), "arr_2": (4, 16), "arr_3": (4,)}
    assert match(tensors_of(STACK[1:]), arrays, tmp_path)["dense2/bias"] == "arr_3"
    with pytest.raises(UserError, match="arr_1, arr_3 all have tensor 16: their order is unknown"):
        twice = dict(zip(arrays, ((16, 9), (16,), (16, 7), (16,)), strict=True))
        match(tensors_of((("dense1", (16, 9)), ("dense2", (16, 7)))), twice, tmp_path)
    with pytest.raises(UserError, match="arr_1 with tensor 8, but dense1.bias, dense2.bias of"):
        match(tensors_of((("dense1", (8, 9)), ("dense2", (8, 7)))), {"arr_0": (8, 9), "arr_1": (8,)}, tmp_path)


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "a.txt", "missing.npz"])
def test_files_that_are_something_else_are_refused(name, tmp_path, capsys):
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"nothing of use")
    output = run_command(capsys, "import", tmp_path / name, "-o", tmp_path / "own.h5", code=2)
    assert str(tmp_path / name) in output and output.count("\n") == 1


def torch_stack():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    parts = [
        nn.Conv2d(1, 4, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.LocalResponseNorm(3, 1e-4, 0.75, 2.0),
        nn.AvgPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(100, 16),
        nn.Tanh(),
        nn.Linear(16, 12),
        nn.Sigmoid(),
        nn.Linear(12, 10),
    ]
    return torch, nn.Sequential(*parts)


def in_torch(torch, stack, images=IMAGES):
    with torch.no_grad():
        return torch.softmax(stack(torch.from_numpy(images).float() / 255), 1).numpy()


def test_safetensors_in_pytorch(run, tmp_path, capsys):
    torch, stack = torch_stack()
    from safetensors.torch import load_file

    run_command(capsys, "export", run, "-o", tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, name in {0: "conv1", 6: "dense1", 8: "dense2", 10: "dense3"}.items():
        stack[layer].load_state_dict({part: tensors[f"{name}.{part}"] for part in ("weight", "bias")})
    np.testing.assert_allclose(in_torch(torch, stack), adam_mpi.load(run).predict(IMAGES), atol=1e-5)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_dict_of_pytorch_can_be_imported(wrapped, tmp_path, capsys):
    torch, stack = torch_stack()
    state = stack.state_dict()
    torch.save({"state_dict": state, "epoch": 3} if wrapped else state, tmp_path / "state.pt")
    run_command(capsys, "import", tmp_path / "state.pt", *given(SMALL, REFERENCE), "-o", tmp_path / "own.h5")
    np.testing.assert_allclose(adam_mpi.load(tmp_path / "own.h5").predict(IMAGES), in_torch(torch, stack), atol=1e-5)


class Harmful:
    """Would make a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_with_code_in_it_is_not_run(tmp_path, capsys):
    torch, _ = torch_stack()
    torch.save({"weight": Harmful(str(tmp_path / "harm"))}, tmp_path / "bad.pt")
    output = run_command(capsys, "import", tmp_path / "bad.pt", "-o", tmp_path / "own.h5", code=2)
    assert str(tmp_path / "bad.pt") in output and not (tmp_path / "harm").exists() and output.count("\n") == 1


def test_a_trained_run_on_the_whole_test_set(launch, tmp_path, capsys):
    """Generated kernels with trained weights agree with onnxruntime and, where it is installed, with PyTorch."""
    job = launch(2, "train", *given("data.images=3200", "train.epochs=1"))
    assert job.returncode == 0, job.said()
    model = adam_mpi.load(job.run)
    images, labels = open_set(model.config.data).read("test", np.arange(glyphs.TEST))
    probabilities = model.predict(images)
    accuracy = np.mean(probabilities.argmax(axis=1) == labels)
    assert accuracy == pytest.approx(job.summary["test_accuracy"], abs=1e-3)
    run_command(capsys, "export", job.run, "-o", tmp_path / "model.onnx")
    np.testing.assert_allclose(in_onnxruntime(tmp_path / "model.onnx", images), probabilities, atol=1e-5)
    torch = pytest.importorskip("torch")
    nn, weights = torch.nn, model.tensors
    stack = nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(320, 400),
        nn.ReLU(),
        nn.Linear(400, 400),
        nn.ReLU(),
        nn.Linear(400, 10),
    )
    stack.load_state_dict(dict(zip(stack.state_dict(), map(torch.from_numpy, weights.values()), strict=True)))
    np.testing.assert_allclose(in_torch(torch, stack, images), probabilities, atol=1e-5)


@pytest.mark.parametrize(
    "names",
    [("conv.kernel", "bn.gamma", "out.kernel", "out.offset"), ("a", "b", "c", "d")],
    ids=["words", "letters"],
)
def test_tensors_with_words_that_are_not_known_are_refused(names, tmp_path):
    """A gamma has the shape of a bias."""
    shapes = (16, 100), (16,), (4, 16), (4,)
    held = dict(zip(names, shapes, strict=True))
    complaint = r"none ends in weight or bias.*; rename them to dense1.weight, dense1.bias, dense2.weight, dense2.bias"
    with pytest.raises(UserError, match=complaint):
        match(tensors_of(STACK[1:]), held, tmp_path)
