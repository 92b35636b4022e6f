"""The package as others get it: a complete wheel, and a system that offers less than Linux does."""

import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from email import message_from_string

import numpy as np
import pytest
from launch import ROOT, clean_environment, given

REFERENCE = "kernels.engine=reference"
# Functions that macOS does not have.
WITHOUT = """
import os, sys
for name in ("sched_getaffinity", "sched_setaffinity", "posix_fallocate", "preadv", "O_DIRECT"):
    delattr(os, name)
from adam_mpi.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "adam_mpi", source / "adam_mpi", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", target, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (file,) = target.glob("adam_mpi-*.whl")
    return file


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = (path for path in (ROOT / "adam_mpi").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    wanted = {str(path.relative_to(ROOT)) for path in files}
    assert wanted <= names, wanted - names
    # What package data and the search for packages could leave out.
    assert "adam_mpi/py.typed" in wanted and "adam_mpi/inference/export/__init__.py" in wanted
    assert any(name.startswith("adam_mpi/config/models/") and name.endswith(".toml") for name in wanted)


@pytest.mark.slow
def test_the_wheel_has_its_metadata(wheel):
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    with zipfile.ZipFile(wheel) as archive:
        entry, metadata = (read_end(archive, name) for name in ("entry_points.txt", "METADATA"))
    assert "adam-mpi = adam_mpi.cli:main" in entry
    fields = message_from_string(metadata)
    assert fields["Version"] == settings["metadata"]["version"]
    assert {"docs", "dev", "mpi", "export"} <= set(fields.get_all("Provides-Extra"))
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        fields.get_all("Classifier")
    )


def read_end(archive, ending):
    """Return the text of the file in `archive` whose name ends so."""
    return archive.read(next(name for name in archive.namelist() if name.endswith(ending))).decode()


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "printed"), [("models", "adam-mnist"), ("--version", "adam-mpi {version}")])
def test_the_wheel_works_without_the_source_tree(argument, printed, wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    version = wheel.name.split("-")[1]
    command = [sys.executable, "-m", "adam_mpi", argument]
    environment = clean_environment() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and printed.format(version=version) in done.stdout, done.stderr


@pytest.mark.slow
def test_training_on_a_system_without_what_only_linux_has(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (200, 8, 8)).astype(np.uint8)
    np.save(tmp_path / "train_images.npy", images)
    np.save(tmp_path / "train_labels.npy", np.arange(200) % 4)
    words = given('model.layers=[{kind="dense",units=4}]', REFERENCE, "train.epochs=1", f"data.set={tmp_path}")
    command = [sys.executable, "-c", WITHOUT, "train", *words, "--run", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and (tmp_path / "run" / "DONE").exists(), done.stdout + done.stderr
