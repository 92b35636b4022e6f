"""The ready configurations can be planned, with random images where a data set is not installed."""

import numpy as np
import pytest

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.cli import main
from adam_mpi.config import Data, models
from adam_mpi.data.sets import open_set
from adam_mpi.model import parameters
from adam_mpi.model.frontends import configured
from adam_mpi.model.input_format import SCALED_BYTES
from adam_mpi.planning.report import plan_text

SHAPES = {"mnist": ((1, 28, 28), 10)}


def shapes(name):
    loaded = config.load(name)
    if loaded.data.set in SHAPES:
        shape, classes, form = *SHAPES[loaded.data.set], SCALED_BYTES
    else:
        description = open_set(loaded.data).description
        shape, classes, form = description.shape, description.classes, description.form
    return configured.infer(loaded.model, shape, classes, form)


@pytest.mark.parametrize("name", models.names())
def test_every_model_fits_its_data_set(name):
    assert parameters.total(shapes(name)) > 50_000


def test_the_list_and_the_files(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == models.names() and len(lines) == 11
    assert all(line.endswith(".") for line in lines)
    assert main(["models", "lenet"]) == 0
    assert capsys.readouterr().out.strip() == (models.FOLDER / "lenet.toml").read_text().strip()


def test_a_name_stands_for_its_file_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    assert config.load("adam-mnist", ["train.epochs=1"]).data.set == "mnist"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lenet").write_text("[train]\nepochs = 77\n")
    assert config.load("lenet").train.epochs == 77


def test_the_default_network_is_the_papers():
    assert config.load("adam-mnist").model.layers == config.LAYERS


def test_the_large_one_can_be_planned_without_its_images():
    said = plan_text(config.load("adam-imagenet"), 64, "8x8")
    assert "21841x1x1" in said and said.count("3000x1x1") >= 3


def test_noise_is_the_same_whenever_it_is_asked_for():
    data = open_set(Data(set="noise:3x5x4:7"))
    assert (
        data.description.shape == (3, 5, 4) and data.description.classes == 7 and data.description.form.dtype == "uint8"
    )
    images, labels = data.read("train", np.array([3, 9, 11]))
    again, _ = data.read("train", np.array([9]))
    assert images.shape == (3, 3, 5, 4) and (images[1] == again[0]).all() and (images[0] != images[1]).any()
    assert labels.max() < 7
    numbers = open_set(Data(set="noise:40:3"))
    assert numbers.description.shape == (40, 1, 1) and numbers.description.form.dtype == "float32"


@pytest.mark.parametrize("name", ["noise:", "noise:3x5:2", "noise:3x5x5", "noise:0x5x5:3"])
def test_noise_of_no_size_is_refused(name):
    with pytest.raises(UserError, match="give noise:CHANNELSxHEIGHTxWIDTH:CLASSES"):
        open_set(Data(set=name))
