"""The data sets: by name or by path, what they hold, and their images by part and index."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.config import Data
from adam_mpi.data import formats, glyphs, random_images, transform
from adam_mpi.data.cache import Cache
from adam_mpi.data.formats import idx
from adam_mpi.data.formats.source import BadImages, Source

log = logging.getLogger(__name__)
NAMES = ("glyphs", "mnist", "fashion")
FILES = idx.FILES
SPLIT_KEY = 2014
TEST_SHARE = 1 / 6  # of a set that has no test part of its own
CHECKED_BYTES, CHECK_SECONDS = 1 << 24, 5.0  # that are looked through at once, and between two words about it
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
    dtype: str = "uint8"
    """What a network gets: uint8 pixels, or float32 numbers that are taken as they are."""


class DataSet:
    """Images through a cache; the validation part is split off the training images, the test part where it must be."""

    def __init__(self, data: Data, sources: dict[str, Source]) -> None:
        self.data, self.sources = data, sources
        _check_labels(data.set, sources["train"])
        self.classes = sources["train"].classes or int(sources["train"].labels.max()) + 1
        self.usable = {part: self._usable(source) for part, source in sources.items()}
        total = sum(len(source) * source.image_bytes for source in sources.values())
        self._caches = {
            part: Cache(source, data.cache * len(source) * source.image_bytes // total)
            for part, source in sources.items()
        }
        self._parts = self._split()
        shape, dtype = transform.output(data.transform, sources["train"].shape, sources["train"].dtype)
        counts = {part: len(chosen) for part, (_, chosen) in self._parts.items()}
        self.description = Description(data.set, shape, self.classes, **counts, dtype=dtype.name)

    def read(self, part: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images [n, channels, height, width] and labels [n] of a part: "train", "validation" or "test"."""
        origin, order = self._parts[part]
        chosen = order[indices]
        return self._caches[origin].read(chosen), self.sources[origin].labels[chosen]

    def read_usable(self, part: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(positions, images, labels) of those that are not bad, where `data.on_bad` allows some to be."""
        origin, order = self._parts[part]
        return self.read_source(origin, order[indices])

    def read_source(self, origin: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same of the files "train" or "test", before they are split into parts."""
        usable = self.usable[origin]
        while True:
            kept = np.flatnonzero(usable[indices])
            chosen = indices[kept]
            try:
                return kept, self._caches[origin].read(chosen), self.sources[origin].labels[chosen]
            except BadImages as error:
                if self.data.on_bad == "stop":
                    raise
                log.warning("left out: %s", error)
                usable[chosen[error.positions]] = False

    def check(self, part: str, tell: Callable[[str], None]) -> None:
        """Read a part of numbers that are taken as they are; raise BadImages where they hold NaN or infinity.

        Images of bytes, and parts of which bad images may be left out, need no look. `tell` is told how far it is.
        """
        origin, order = self._parts[part]
        source = self.sources[origin]
        if source.dtype.kind != "f" or self.data.on_bad != "stop":
            return
        chosen, step, told = np.sort(order), max(1, CHECKED_BYTES // source.image_bytes), time.monotonic()
        for first in range(0, len(chosen), step):
            if time.monotonic() - told > CHECK_SECONDS:
                told = time.monotonic()
                tell(f"looking for NaN in the {part} part: {first / len(chosen):.0%}")
            source.read(chosen[first : first + step])

    def labels(self, part: str) -> np.ndarray:
        origin, order = self._parts[part]
        return self.sources[origin].labels[order]

    def bad(self) -> list[str]:
        """Images found bad so far: "train 17"."""
        found = ((part, np.flatnonzero(~usable)) for part, usable in self.usable.items())
        return [f"{part} {index}" for part, indices in found for index in indices]

    def _usable(self, source: Source) -> np.ndarray:
        """Which images may be read, as far as their labels show."""
        usable = (source.labels >= 0) & (source.labels < self.classes)
        if self.data.on_bad == "stop" and not usable.all():
            first = int(np.argmin(usable))
            where = f"{source.name(first)}: has the label {source.labels[first]}"
            raise BadImages([first], f"{where}; allowed are 0 to {self.classes - 1}")
        return usable

    def _split(self) -> dict[str, tuple[str, np.ndarray]]:
        """part -> (source, indices in it)"""
        labeled = {part: np.flatnonzero(usable) for part, usable in self.usable.items()}
        order = labeled["train"][_split_order(len(labeled["train"]))]
        if "test" in labeled:
            test = "test", labeled["test"]
        else:
            cut = round(len(order) * TEST_SHARE)
            test, order = ("train", order[:cut]), order[cut:]
        held_out = round(len(order) * self.data.validation)
        train = order[held_out:][: self.data.images or None]
        return {"train": ("train", train), "validation": ("train", order[:held_out]), "test": test}


def _check_labels(name: str, source: Source) -> None:
    """Refuse labels that count from 1, which would make a class of nothing, or leave the last one out."""
    lowest, highest = int(source.labels.min()), int(source.labels.max())
    if lowest == 1 < highest and highest == (source.classes or len(np.unique(source.labels))):
        raise UserError(
            f"data set {name!r}: labels count from 1 to {highest}; they must count from 0 to {highest - 1}: subtract 1"
        )


def describe(data: Data) -> Description:
    """What a data set holds for us; no image is read."""
    return open_set(data).description


def open_set(data: Data) -> DataSet:
    """A data set ready to be read from; images come into memory as they are asked for."""
    if data.set == "glyphs":
        return DataSet(data, {"train": _glyphs("train", glyphs.TRAIN), "test": _glyphs("test", glyphs.TEST)})
    if data.set.startswith(random_images.PREFIX):
        return DataSet(data, random_images.open_parts(data.set))
    path = find(data.set) if data.set in NAMES else Path(data.set)
    if data.set not in NAMES and not path.exists():
        raise UserError(f"data set {data.set!r}: unknown; allowed are {', '.join(NAMES)}, or a path of files")
    sources = formats.open_parts(path, data.size)
    shapes = {part: (source.shape, source.dtype) for part, source in sources.items()}
    if len(set(shapes.values())) > 1:
        raise UserError(f"{path}: training images are {shapes['train']}, test images {shapes['test']}; they must agree")
    return DataSet(data, sources)


def home() -> Path:
    """The data folder of the checkout this package lies in, or of the current directory when it is installed."""
    project = Path(__file__).resolve().parents[2]
    return (project if (project / "setup.cfg").is_file() else Path.cwd()) / "data"


def find(name: str) -> Path:
    """The folder with the files of a data set that has a name: in $ADAM_MPI_DATA, then in `home()`."""
    given = os.environ.get("ADAM_MPI_DATA")
    places = [Path(given) / name] if given else []
    places.append(home() / name)
    for folder in places:
        if all(idx.find(folder, stem).is_file() for stems in FILES.values() for stem in stems):
            return folder
    looked = " nor in ".join([str(Path(given) / name) if given else "$ADAM_MPI_DATA (not set)", str(places[-1])])
    raise UserError(f"data set {name!r}: its files are neither in {looked}; get them: python -m adam_mpi fetch {name}")


def _glyphs(part: str, count: int) -> Source:
    def rows(indices: np.ndarray) -> np.ndarray:
        return glyphs.draw(SEED, part, indices)[0]

    shape, labels = (1, glyphs.SIDE, glyphs.SIDE), np.arange(count) % glyphs.CLASSES
    return Source(lambda index: f"glyph {index}", shape, np.dtype(np.uint8), labels, rows, glyphs.CLASSES)


def _split_order(count: int) -> np.ndarray:
    # The key is fixed, not the run's seed: runs of different seeds are compared on the same validation images.
    # RandomState because its numbers are promised never to change, whatever the numpy version.
    return np.random.RandomState(SPLIT_KEY).permutation(count)
