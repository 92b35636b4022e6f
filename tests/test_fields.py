"""Named fields: messages hold any of them, strips and hybrid ranks get their part, and data sets describe them."""

import json

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_mpi.base.errors import UserError
from adam_mpi.config import Data, load
from adam_mpi.data.batch_loader import BatchLoader
from adam_mpi.data.formats.source import BadImages
from adam_mpi.data.sets import open_set
from adam_mpi.planning.plan import model
from adam_mpi.sharding import fields as described
from adam_mpi.sharding.batches import Batch, cut_batch
from adam_mpi.sharding.fields import DTYPES, INPUT, KINDS, TARGET, Field, image_fields
from adam_mpi.sharding.training_state import Phase

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
FIELDS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES, st.booleans()), min_size=1, max_size=5)


def values_of(fields, images, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 100, (images, *field.shape)).astype(field.dtype) for field in fields]


def made(drawn):
    """Return fields of these types and shapes; the first one is an input."""
    roles = [INPUT, *(TARGET if target else INPUT for _, _, target in drawn[1:])]
    return [
        Field(f"f{number}", dtype, shape, role, KINDS[0] if role == TARGET else "")
        for number, ((dtype, shape, _), role) in enumerate(zip(drawn, roles, strict=True))
    ]


@settings(deadline=None, max_examples=60)
@given(drawn=FIELDS, images=st.integers(0, 9), more=st.integers(0, 9))
def test_any_fields_come_back_from_a_message(drawn, images, more):
    fields = made(drawn)
    mark = described.signature(fields)
    values = values_of(fields, images)
    ids = np.arange(images) + 7
    message = described.pack_batch([2, 3, 0, 1, 5, images, 4], mark, ids, values)
    assert message.nbytes == described.message_bytes(images, fields)
    room = np.full(described.message_bytes(images + more, fields), 0xEE, np.uint8)
    room[: message.nbytes] = message
    found = described.unpack_batch(room, fields, mark, images)
    for field, array in zip(fields, values, strict=True):
        np.testing.assert_array_equal(found[field.name], array)
        assert found[field.name].dtype == field.dtype and np.shares_memory(found[field.name], room) == bool(array.size)
        assert not array.size or found[field.name].ctypes.data % 8 == room.ctypes.data % 8


def test_other_fields_than_expected_are_refused():
    fields = image_fields((1, 2, 3))
    others = image_fields((1, 2, 3), "float32")
    message = described.pack_batch(
        [2, 0, 0, 1, 0, 2, 0], described.signature(others), np.arange(2), values_of(others, 2)
    )
    with pytest.raises(UserError, match=r"sends other fields than input \(uint8 of \(1, 2, 3\)\), target"):
        described.unpack_batch(message, fields, described.signature(fields), 2)


def test_signatures_tell_names_types_shapes_and_kinds_apart():
    field = Field("x", "float32", (3,))
    others = [
        Field("y", "float32", (3,)),
        Field("x", "float16", (3,)),
        Field("x", "float32", (4,)),
        Field("x", "float32", (3,), TARGET, "vectors"),
        Field("x", "float32", (3,), TARGET, "sets"),
    ]
    assert len({described.signature([one]) for one in (field, *others)}) == 6


def test_a_strip_gets_its_columns_of_inputs_and_whole_targets():
    fields = (Field("x", "uint8", (2, 3, 8)), Field("y", "float32", (4,), TARGET, "vectors"))
    assert described.cut_columns(fields, 2, 5) == (Field("x", "uint8", (2, 3, 3)), fields[1])


def test_parts_of_a_batch_have_their_images_of_all_fields():
    inputs = {"a": np.arange(10), "b": np.arange(20).reshape(10, 2)}
    targets = {"y": np.arange(10) * 3, "z": np.arange(10) * 5}
    parts = cut_batch(Batch(0, 1, 0, np.arange(10), inputs, targets), 3)
    for name in ("a", "b"):
        np.testing.assert_array_equal(np.concatenate([part.inputs[name] for part in parts]), inputs[name])
    for part in parts:
        np.testing.assert_array_equal(part.pixels, part.ids)
        np.testing.assert_array_equal(part.targets["z"], 5 * part.ids)


COUNT = 60


def held():
    """Return arrays of every kind, by the names in the file."""
    random = np.random.default_rng(2)
    return {
        "x": random.standard_normal((COUNT, 5)),
        "half": random.standard_normal((COUNT, 2, 3)).astype(np.float16),
        "tokens": random.integers(0, 9, (COUNT, 4)),
        "pixels": random.integers(0, 256, (COUNT, 6, 7, 3), dtype=np.uint8),
        "class": random.integers(0, 3, COUNT),
        "value": random.standard_normal(COUNT).astype(np.float32),
        "vector": random.standard_normal((COUNT, 3)),
        "marks": random.integers(0, 2, (COUNT, 4)).astype(bool),
        "text": random.integers(-1, 9, (COUNT, 4)).astype(np.int32),
    }


def write(path, arrays, kind):
    """Write `arrays` as a file or folder of `kind`; return its path."""
    if kind == "npz":
        np.savez(path / "set.npz", **arrays)
        return path / "set.npz"
    if kind == "npy":
        (path / "set").mkdir()
        for name, array in arrays.items():
            np.save(path / "set" / f"{name}.npy", array)
        return path / "set"
    if kind == "hdf5":
        with h5py.File(path / "set.h5", "w") as file:
            for name, array in arrays.items():
                file[f"train/{name}"] = array
        return path / "set.h5"
    codes = {"float64": "F64", "float16": "F16", "float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8"}
    header, place = {"__metadata__": {"by": "a test"}}, 0
    for name, array in arrays.items():
        code = codes.get(array.dtype.name, "BOOL")
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    text = json.dumps(header).encode()
    with open(path / "set.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())
    return path / "set.safetensors"


@pytest.mark.parametrize("kind", ["npz", "npy", "hdf5", "safetensors"])
def test_named_arrays_of_every_kind_become_fields_of_batches(kind, tmp_path):
    arrays = held()
    inputs = ["pixels", "x", "half", "tokens"]
    targets = ["class", "value", "vector", "marks", "text"]
    data = open_set(Data(set=str(write(tmp_path, arrays, kind)), inputs=inputs, targets=targets, validation=0.2))
    assert [(field.name, field.dtype, field.shape, field.kind) for field in data.description.fields] == [
        ("pixels", "uint8", (3, 6, 7), ""),
        ("x", "float32", (5,), ""),
        ("half", "float16", (2, 3), ""),
        ("tokens", "int64", (4,), ""),
        ("class", "int64", (), "classes"),
        ("value", "float32", (1,), "vectors"),
        ("vector", "float32", (3,), "vectors"),
        ("marks", "uint8", (4,), "sets"),
        ("text", "int32", (4,), "sequences"),
    ]
    wanted = np.random.default_rng(1).permutation(data.description.train)
    batch = BatchLoader(data, 1).prepare(Phase(0, "train", 1), wanted)
    assert list(batch.inputs) == inputs and list(batch.targets) == targets
    rows = data._parts["train"][1][wanted]
    np.testing.assert_array_equal(batch.inputs["pixels"], arrays["pixels"][rows].transpose(0, 3, 1, 2))
    for name in (*inputs[1:], "class", "marks", "text"):
        np.testing.assert_array_equal(
            (batch.inputs | batch.targets)[name],
            arrays[name][rows].astype({"x": np.float32}.get(name, arrays[name].dtype)),
        )
    np.testing.assert_array_equal(batch.targets["value"][:, 0], arrays["value"][rows])
    np.testing.assert_array_equal(batch.targets["vector"], arrays["vector"][rows].astype(np.float32))


def test_test_parts_are_found_by_their_names(tmp_path):
    arrays = {f"{part}_{name}": array for part in ("train", "test") for name, array in held().items()}
    np.savez(tmp_path / "set.npz", **arrays)
    data = open_set(Data(set=str(tmp_path / "set.npz"), inputs=["x"], targets=["class"], validation=0))
    assert (data.description.train, data.description.test) == (COUNT, COUNT)


@pytest.mark.parametrize(
    ("inputs", "targets", "complaint"),
    [
        (["x"], [], "data.inputs and data.targets: give both"),
        (["z"], ["class"], "no array train_z .* it holds bad, class, half"),
        (["x"], ["short"], "short has 7 rows, x has 60"),
        (["x"], [{"name": "vector", "kind": "classes"}], "classes are one whole number each, not float64"),
        (["x"], [{"name": "class", "kind": "sets"}], "sets are rows of whole numbers"),
        (["x"], [{"name": "class", "kind": "words"}], "kind 'words'; allowed: classes, vectors, sets, sequences"),
        (["x"], [{"nam": "class"}], "neither the name of an array nor a table"),
        ([{"name": "x", "kind": "bytes"}], ["class"], "data.inputs: x has the kind 'bytes'; allowed: none"),
        (["x", "x"], ["class"], "each array may be named once"),
        (["x"], ["x"], "data.targets: x is also in data.inputs"),
        (["names"], ["class"], "holds <U1; it must hold numbers"),
        (["x"], [{"name": "text", "kind": "sets"}], "has the target text .* allowed are 0 and 1"),
        (["bad"], ["class"], "row 3: holds NaN"),
        (["x", "bad"], ["class"], "row 3: holds NaN"),
        (["x"], ["bad"], "row 3: has the target bad .* allowed are finite numbers"),
    ],
)
def test_wrong_descriptions_and_values_are_named(inputs, targets, complaint, tmp_path):
    bad = np.ones((COUNT, 2))
    bad[3, 1] = np.nan
    np.savez(tmp_path / "set.npz", **held(), short=np.arange(7), names=np.array(["a"] * COUNT), bad=bad)
    with pytest.raises(UserError, match=complaint):
        data = open_set(Data(set=str(tmp_path / "set.npz"), inputs=inputs, targets=targets, validation=0))
        BatchLoader(data, 1).prepare(Phase(0, "train", 1), np.arange(data.description.train))


def test_bad_rows_of_any_field_are_skipped_where_that_is_allowed(tmp_path):
    arrays = held()
    arrays["x"][4, 1] = np.nan
    more = np.ones((COUNT, 2))
    more[9] = np.inf
    np.savez(tmp_path / "set.npz", **arrays, more=more)
    settings = {"inputs": ["x", "more"], "targets": ["vector"], "validation": 0, "on_bad": "skip"}
    data = open_set(Data(set=str(tmp_path / "set.npz"), **settings))
    found = [data.read_samples(part, np.arange(getattr(data.description, part))) for part in ("train", "test")]
    assert sum(len(samples.kept) for samples in found) == COUNT - 2
    assert all(np.isfinite(samples.inputs["x"]).all() for samples in found)
    assert sorted(data.bad()) == ["train 4", "train 9"]


@pytest.mark.parametrize("inputs", [["bad"], ["tokens", "bad"]])
def test_nan_in_any_input_is_found_before_training(inputs, tmp_path):
    bad = np.ones((COUNT, 2))
    bad[5] = np.nan
    np.savez(tmp_path / "set.npz", **held(), bad=bad)
    data = open_set(Data(set=str(tmp_path / "set.npz"), inputs=inputs, targets=["class"], validation=0))
    part = "train" if 5 in data._parts["train"][1] else "test"
    with pytest.raises(BadImages, match="row 5: holds NaN"):
        data.check(part, print)


@pytest.mark.parametrize(
    ("inputs", "targets", "complaint"),
    [
        (["x", "tokens"], ["class"], r"takes one input of bytes or floats, not x \(float32\), tokens \(int64\)"),
        (["tokens"], ["class"], "takes one input of bytes or floats"),
        (["x"], ["vector"], r"takes one target of classes, not vector \(vectors\)"),
        (["x"], ["class", "value"], "takes one target of classes, not class"),
    ],
)
def test_what_a_list_of_layers_cannot_take_is_refused(inputs, targets, complaint, tmp_path):
    np.savez(tmp_path / "set.npz", **held())
    config = load({"data": {"set": str(tmp_path / "set.npz"), "inputs": inputs, "targets": targets}})
    with pytest.raises(UserError, match=complaint):
        model(config, open_set(config.data).description)
