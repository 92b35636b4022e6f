"""The data sets by name: what they hold, where their files are, and their images by part and index."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adam_mpi.config import Data
from adam_mpi.data import glyphs, idx
from adam_mpi.errors import UserError

NAMES = ("glyphs", "mnist", "fashion")
CLASSES = 10
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
SPLIT_KEY = 2014
SEED = 1  # of the drawing: like a set of files, glyphs are the same in every run


@dataclass(frozen=True)
class Description:
    """What a data set holds: the shape of an image as (channels, height, width), and the images in each part."""

    name: str
    shape: tuple[int, int, int]
    classes: int
    train: int
    validation: int
    test: int


class DataSet:
    """A data set in memory; its validation part is split off the training files."""

    def __init__(self, description: Description, train: tuple[np.ndarray, ...], test: tuple[np.ndarray, ...]) -> None:
        self.description = description
        order = _split_order(len(train[1]))
        held_out = description.validation
        self._parts = {
            "train": (*train, order[held_out:]),
            "validation": (*train, order[:held_out]),
            "test": (*test, np.arange(len(test[1]))),
        }

    def read(self, part: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images [n, channels, height, width] and labels [n] of a part: "train", "validation" or "test"."""
        images, labels, order = self._parts[part]
        chosen = order[indices]
        return images[chosen], labels[chosen]


def describe(data: Data) -> Description:
    """What a data set holds for us, from the headers of its files only."""
    if data.set == "glyphs":
        shape, train, test = (1, glyphs.SIDE, glyphs.SIDE), glyphs.TRAIN, glyphs.TEST
    else:
        folder = find(data.set)
        train, *sides = _image_sizes(_file(folder, FILES["train"][0]))
        test, *test_sides = _image_sizes(_file(folder, FILES["test"][0]))
        if sides != test_sides:
            raise UserError(f"{folder}: training images are {sides}, test images {test_sides}; fetch the set again")
        shape = (1, sides[0], sides[1])
    held_out = round(train * data.validation)
    kept = min(train - held_out, data.images or train)
    return Description(data.set, shape, CLASSES, kept, held_out, test)


def open_set(data: Data) -> DataSet:
    """Read a data set into memory, or draw it."""
    description = describe(data)
    if data.set == "glyphs":
        parts = (("train", glyphs.TRAIN), ("test", glyphs.TEST))
        return DataSet(description, *(glyphs.draw(SEED, part, np.arange(count)) for part, count in parts))
    folder = find(data.set)
    return DataSet(description, _read_part(folder, "train"), _read_part(folder, "test"))


def home() -> Path:
    """The data folder of the checkout this package lies in, or of the current directory when it is installed."""
    project = Path(__file__).resolve().parents[2]
    return (project if (project / "setup.cfg").is_file() else Path.cwd()) / "data"


def find(name: str) -> Path:
    """The folder with the files of a data set: in $ADAM_MPI_DATA, then in `home()`."""
    if name not in NAMES:
        raise UserError(f"data set {name!r}: unknown; allowed are {', '.join(NAMES)}")
    given = os.environ.get("ADAM_MPI_DATA")
    places = [Path(given) / name] if given else []
    places.append(home() / name)
    for folder in places:
        if all(_file(folder, stem).is_file() for stems in FILES.values() for stem in stems):
            return folder
    looked = " nor in ".join([str(Path(given) / name) if given else "$ADAM_MPI_DATA (not set)", str(places[-1])])
    raise UserError(f"data set {name!r}: its files are neither in {looked}; get them: python -m adam_mpi fetch {name}")


def _file(folder: Path, stem: str) -> Path:
    plain = folder / stem
    return plain if plain.is_file() else folder / f"{stem}.gz"


def _image_sizes(path: Path) -> tuple[int, ...]:
    sizes = idx.shape(path)
    if len(sizes) != 3 or 0 in sizes:
        raise UserError(f"{path}: holds an array of sizes {sizes}, not images (count, height, width)")
    return sizes


def _read_part(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images_path, labels_path = (_file(folder, stem) for stem in FILES[part])
    images, labels = idx.read(images_path), idx.read(labels_path)
    if labels.shape != images.shape[:1]:
        raise UserError(f"{labels_path}: holds labels {labels.shape} for {len(images)} images in {images_path.name}")
    if labels.max() >= CLASSES:
        raise UserError(f"{labels_path}: holds the label {labels.max()}; allowed are 0 to {CLASSES - 1}")
    return images[:, None], labels


def _split_order(count: int) -> np.ndarray:
    # The key is fixed, not the run's seed: runs of different seeds are compared on the same validation images.
    # RandomState because its numbers are promised never to change, whatever the numpy version.
    return np.random.RandomState(SPLIT_KEY).permutation(count)
