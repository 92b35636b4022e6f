import os
from pathlib import Path

import numpy as np
import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.config import Data
from adam_mpi.data import glyphs, sets
from adam_mpi.data.formats.source import BadImages, array_source
from adam_mpi.data.sets import DataSet, open_set


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small set named mnist: 60 training and 20 test images of 4x6, whose first pixel is their number."""
    monkeypatch.setenv("ADAM_MPI_DATA", str(tmp_path))
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, count in (("train", 60), ("test", 20)):
        images = np.zeros((count, 4, 6), np.uint8)
        images[:, 0, 0] = np.arange(count)
        for stem, array in zip(sets.FILES[part], (images, np.arange(count) % 10), strict=True):
            (folder / stem).write_bytes(idx_bytes(array))
    return folder


def everything(data, part):
    return data.read(part, np.arange(getattr(data.description, part)))


def test_glyphs():
    data = sets.open_set(Data(set="glyphs", validation=1 / 12))
    assert data.description == sets.Description("glyphs", (1, 28, 28), 10, 22_000, 2_000, 4_000)
    assert data.description == sets.describe(Data(set="glyphs", validation=1 / 12))
    images, labels = data.read("test", np.array([7, 3, 7]))
    drawn = glyphs.draw_glyphs(glyphs.SEED, "test", np.array([7, 3, 7]))
    assert np.array_equal(images, drawn[0]) and np.array_equal(labels, drawn[1])
    assert np.bincount(everything(data, "validation")[1]).min() > 150


def test_parts_are_disjoint_and_labels_stay_with_images(folder):
    data = sets.open_set(Data(set="mnist", validation=0.25))
    assert data.description == sets.Description("mnist", (1, 4, 6), 10, 45, 15, 20)
    train, validation = everything(data, "train"), everything(data, "validation")
    numbers = np.concatenate([train[0], validation[0]])[:, 0, 0, 0]
    assert sorted(numbers) == list(range(60))
    assert np.array_equal(np.concatenate([train[1], validation[1]]), numbers % 10)
    images, labels = data.read("test", np.array([19, 0]))
    assert images.shape == (2, 1, 4, 6) and images[:, 0, 0, 0].tolist() == [19, 0] and labels.tolist() == [9, 0]


def test_no_validation_and_few_images(folder):
    assert sets.describe(Data(set="mnist", validation=0.0)).validation == 0
    assert len(everything(sets.open_set(Data(set="mnist", validation=0.0)), "train")[1]) == 60
    assert sets.describe(Data(set="mnist", validation=0.0, images=7)).train == 7


def test_label_out_of_range_names_the_file(folder):
    path = folder / sets.FILES["test"][1]
    path.write_bytes(idx_bytes(np.arange(20)))
    with pytest.raises(UserError, match=f"{path}, image 10.*label 10.*0 to 9"):
        sets.open_set(Data(set="mnist", validation=0.25))


def test_count_mismatch_names_the_file(folder):
    path = folder / sets.FILES["train"][1]
    path.write_bytes(idx_bytes(np.zeros(59)))
    with pytest.raises(UserError, match=f"{path}.*59.*60 images"):
        sets.open_set(Data(set="mnist", validation=0.25))


def test_images_of_unequal_or_wrong_shape(folder):
    path = folder / sets.FILES["test"][0]
    path.write_bytes(idx_bytes(np.zeros((20, 4, 5))))
    with pytest.raises(UserError, match="4, 6.*4, 5"):
        sets.describe(Data(set="mnist", validation=0.25))
    path.write_bytes(idx_bytes(np.zeros(20)))
    with pytest.raises(UserError, match=f"{path}.*not images"):
        sets.describe(Data(set="mnist", validation=0.25))


def test_a_missing_set_names_both_folders_and_what_to_do(folder):
    (folder / sets.FILES["train"][0]).unlink()
    with pytest.raises(UserError) as caught:
        sets.find_data_set("mnist")
    for words in (folder, sets.home() / "mnist", "python -m adam_mpi fetch mnist"):
        assert str(words) in str(caught.value)


def test_home_is_looked_at_second(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "home", lambda: tmp_path)
    monkeypatch.setenv("ADAM_MPI_DATA", str(tmp_path / "empty"))
    assert sets.find_data_set("mnist") == folder
    monkeypatch.delenv("ADAM_MPI_DATA")
    assert sets.find_data_set("mnist") == folder


def test_unknown_name():
    with pytest.raises(UserError, match="'minst'.*glyphs, mnist, fashion"):
        sets.describe(Data(set="minst", validation=0.1))


@pytest.mark.parametrize("name", ["mnist", "fashion"])
def test_real_files(name):
    given = os.environ.get("ADAM_MPI_DATA")
    if not given or not (Path(given) / name).is_dir():
        pytest.skip(f"no {name} in $ADAM_MPI_DATA")
    data = sets.open_set(Data(set=name, validation=1 / 12))
    assert data.description == sets.Description(name, (1, 28, 28), 10, 55_000, 5_000, 10_000)
    images, labels = everything(data, "test")
    assert np.bincount(labels).min() > 800 and 30 < images.mean() < 80


@pytest.mark.parametrize(
    ("labels", "hint"),
    [
        (np.arange(60) % 10 + 1, "labels count from 1 to 10; they must count from 0 to 9: subtract 1"),
        (np.arange(60) % 10, None),
        # A class of which there is no image is nothing unusual.
        (np.array([1, 5, 9] * 20), None),
        (np.ones(60, np.int64), None),
    ],
)
def test_labels_that_count_from_one_are_recognized(labels, hint, tmp_path):
    np.savez(tmp_path / "set.npz", images=np.zeros((60, 4, 4), np.uint8), labels=labels)
    data = Data(set=str(tmp_path / "set.npz"))
    if hint is None:
        assert open_set(data).classes == labels.max() + 1
    else:
        with pytest.raises(UserError, match=hint):
            open_set(data)


def test_labels_that_count_from_one_are_no_bad_images_where_classes_are_known(tmp_path):
    labels = np.array([1, 2, 3, 1])
    source = array_source("some", (4, 2, 2), np.dtype(np.uint8), labels, lambda indices: None, classes=3)
    with pytest.raises(UserError, match="labels count from 1 to 3; they must count from 0 to 2: subtract 1"):
        DataSet(Data(set="some", on_bad="skip"), {"train": source})


@pytest.mark.parametrize(("part", "on_bad"), [("test", "stop"), ("test", "skip"), ("validation", "stop")])
def test_nan_is_found_before_anything_is_trained(part, on_bad, tmp_path, monkeypatch):
    monkeypatch.setattr(sets, "CHECKED_BYTES", 40)
    monkeypatch.setattr(sets, "CHECK_SECONDS", -1.0)
    features = {name: np.zeros((60, 5), np.float32) for name in ("train", "test")}
    held = open_set(_written(tmp_path, features, on_bad))
    origin, order = held._parts[part]
    features[origin][order[-1], 3] = np.nan
    held = open_set(_written(tmp_path, features, on_bad))
    reports = []
    if on_bad == "skip":
        held.check(part, reports.append)
        assert not reports
        return
    with pytest.raises(BadImages, match=f"{origin}_x.*image {order[-1]}: holds NaN or infinity"):
        held.check(part, reports.append)
    assert reports[0] == f"looking for NaN in the {part} part: 0%"


def _written(folder, features, on_bad):
    arrays = {f"{name}_x": values for name, values in features.items()}
    np.savez(folder / "set.npz", **arrays, train_y=np.arange(60) % 3, test_y=np.arange(60) % 3)
    return Data(set=str(folder / "set.npz"), on_bad=on_bad)
