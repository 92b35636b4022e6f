"""Data sets by name or by path: what they hold, and their images by part and index."""

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.config import Data
from adam_mpi.data import formats, glyphs, transform
from adam_mpi.data.formats import idx
from adam_mpi.data.formats.source import BadImages, Source

log = logging.getLogger(__name__)
NAMES = ("glyphs", "mnist", "fashion")
FILES = idx.FILES
SPLIT_KEY = 2014
TEST_SHARE = 1 / 6
"""The share of images that become the test part of a set that has none."""
CHECKED_BYTES = 1 << 24
"""Bytes that `DataSet.check` reads at a time."""
CHECK_SECONDS = 5.0
"""Seconds between two reports of its progress."""
SEED = 1
"""The seed of glyphs: like a set of files, they are the same in every run."""


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
    """The type that a network gets: uint8 pixels, or float32 numbers that are taken as they are."""


class DataSet:
    """Images through a cache; the validation part is split off the training images, as is a missing test part."""

    def __init__(self, data: Data, sources: dict[str, Source]) -> None:
        """Check the labels of the `sources` "train" and perhaps "test", and split them into parts."""
        self.data = data
        self.sources = sources
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
        """Return images [n, channels, height, width] and labels [n] of a part: "train", "validation" or "test"."""
        origin, order = self._parts[part]
        chosen = order[indices]
        return self._caches[origin].read(chosen), self.sources[origin].labels[chosen]

    def read_usable(self, part: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (positions, images, labels) of the usable images at `indices` of `part`.

        Raises BadImages for an unusable one where `data.on_bad` is "stop".
        """
        origin, order = self._parts[part]
        return self.read_source(origin, order[indices])

    def read_source(self, origin: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the same of the source "train" or "test", before it is split into parts."""
        usable = self.usable[origin]
        while True:
            kept = np.flatnonzero(usable[indices])
            chosen = indices[kept]
            try:
                return kept, self._caches[origin].read(chosen), self.sources[origin].labels[chosen]
            except BadImages as error:
                if self.data.on_bad == "stop":
                    raise
                log.warning("bad images are left out: %s", error)
                usable[chosen[error.positions]] = False

    def check(self, part: str, report: Callable[[str], None]) -> None:
        """Read a part of float images; raise BadImages where they hold NaN or infinity.

        Images of bytes, and parts of which bad images may be left out, are not read. `report` gets the progress.
        """
        origin, order = self._parts[part]
        source = self.sources[origin]
        if source.dtype.kind != "f" or self.data.on_bad != "stop":
            return
        chosen = np.sort(order)
        step = max(1, CHECKED_BYTES // source.image_bytes)
        reported = time.monotonic()
        for first in range(0, len(chosen), step):
            if time.monotonic() - reported > CHECK_SECONDS:
                reported = time.monotonic()
                report(f"looking for NaN in the {part} part: {first / len(chosen):.0%}")
            source.read(chosen[first : first + step])

    def labels(self, part: str) -> np.ndarray:
        """Return the labels of `part`."""
        origin, order = self._parts[part]
        return self.sources[origin].labels[order]

    def bad(self) -> list[str]:
        """Return the images found bad so far, as texts like "train 17"."""
        found = ((part, np.flatnonzero(~usable)) for part, usable in self.usable.items())
        return [f"{part} {index}" for part, indices in found for index in indices]

    def _usable(self, source: Source) -> np.ndarray:
        """Return which images have an allowed label; raise BadImages where `data.on_bad` is "stop" and one has not."""
        usable = (source.labels >= 0) & (source.labels < self.classes)
        if self.data.on_bad == "stop" and not usable.all():
            first = int(np.argmin(usable))
            where = f"{source.name(first)}: has the label {source.labels[first]}"
            raise BadImages([first], f"{where}; allowed are 0 to {self.classes - 1}")
        return usable

    def _split(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return for each part its source, and the indices of its images there."""
        labeled = {part: np.flatnonzero(usable) for part, usable in self.usable.items()}
        order = labeled["train"][_split_order(len(labeled["train"]))]
        if "test" in labeled:
            test = ("test", labeled["test"])
        else:
            count = round(len(order) * TEST_SHARE)
            test = ("train", order[:count])
            order = order[count:]
        held_out = round(len(order) * self.data.validation)
        train = order[held_out:][: self.data.images or None]
        return {"train": ("train", train), "validation": ("train", order[:held_out]), "test": test}


def _check_labels(name: str, source: Source) -> None:
    """Raise UserError for labels that count from 1, which would make an empty class, or leave the last one out."""
    lowest = int(source.labels.min())
    highest = int(source.labels.max())
    if lowest == 1 < highest and highest == (source.classes or len(np.unique(source.labels))):
        raise UserError(
            f"data set {name!r}: labels count from 1 to {highest}; they must count from 0 to {highest - 1}: subtract 1"
        )


def describe(data: Data) -> Description:
    """Return what a data set holds; no image is read."""
    return open_set(data).description


def open_set(data: Data) -> DataSet:
    """Open a data set; images are read on request. Raises UserError for a name or path that is none."""
    if data.set == "glyphs":
        return DataSet(data, {"train": _glyphs("train", glyphs.TRAIN), "test": _glyphs("test", glyphs.TEST)})
    if data.set.startswith(PREFIX):
        return DataSet(data, open_parts(data.set))
    path = find_data_set(data.set) if data.set in NAMES else Path(data.set)
    if data.set not in NAMES and not path.exists():
        raise UserError(f"data set {data.set!r}: unknown; allowed are {', '.join(NAMES)}, or a path of files")
    sources = formats.open_parts(path, data.size)
    shapes = {part: (source.shape, source.dtype) for part, source in sources.items()}
    if len(set(shapes.values())) > 1:
        raise UserError(f"{path}: training images are {shapes['train']}, test images {shapes['test']}; they must agree")
    return DataSet(data, sources)


def home() -> Path:
    """Return the data folder of this package's checkout, or of the current directory when it is installed."""
    project = Path(__file__).resolve().parents[2]
    return (project if (project / "setup.cfg").is_file() else Path.cwd()) / "data"


def find_data_set(name: str) -> Path:
    """Return the folder with the files of the data set `name`: in $ADAM_MPI_DATA, else in `home()`."""
    given = os.environ.get("ADAM_MPI_DATA")
    places = [Path(given) / name] if given else []
    places.append(home() / name)
    for folder in places:
        if all(idx.find_idx_file(folder, stem).is_file() for stems in FILES.values() for stem in stems):
            return folder
    looked = " nor in ".join([str(Path(given) / name) if given else "$ADAM_MPI_DATA (not set)", str(places[-1])])
    raise UserError(f"data set {name!r}: its files are neither in {looked}; get them: python -m adam_mpi fetch {name}")


def _glyphs(part: str, count: int) -> Source:
    """Return a part of the built-in data set."""

    def rows(indices: np.ndarray) -> np.ndarray:
        return glyphs.draw_glyphs(SEED, part, indices)[0]

    return Source(
        name=lambda index: f"glyph {index}",
        shape=(1, glyphs.SIDE, glyphs.SIDE),
        dtype=np.dtype(np.uint8),
        labels=np.arange(count) % glyphs.CLASSES,
        rows=rows,
        classes=glyphs.CLASSES,
    )


def _split_order(count: int) -> np.ndarray:
    """Return the order in which the training images are split into parts."""
    # The key is fixed, not the run's seed: runs of different seeds are compared on the same validation images.
    # RandomState, because numpy guarantees that its numbers never change.
    return np.random.RandomState(SPLIT_KEY).permutation(count)


class Cache:
    """Keeps the first images that it reads and never evicts one: each epoch reads each image once, in a new random
    order, so eviction never pays. One thread at a time may read.
    """

    def __init__(self, source: Source, limit: int) -> None:
        """Make room for `limit` bytes of images of `source`; for none if they are in memory anyway."""
        self.source = source
        room = 0 if source.in_memory else min(len(source), limit // source.image_bytes)
        # Pages that are never written take no memory.
        self.kept = np.empty((room, *source.shape), source.dtype)
        self.place = np.full(len(source), -1, np.int64)
        self.used = 0

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the images at `indices`; raise BadImages for those that the source cannot read."""
        place = self.place[indices]
        hits = place >= 0
        if hits.all():
            return self.kept[place]
        images = np.empty((len(indices), *self.source.shape), self.source.dtype)
        images[hits] = self.kept[place[hits]]
        positions = np.flatnonzero(~hits)
        positions = positions[np.argsort(indices[positions])]
        images[positions] = fresh = self._fetch(indices, positions)
        self._keep(indices[positions], fresh)
        return images

    def _fetch(self, indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the images indices[positions] from the source; positions in a BadImages are those in `indices`."""
        try:
            return self.source.read(indices[positions])[0]
        except BadImages as error:
            error.positions = positions[error.positions].tolist()
            raise

    def _keep(self, indices: np.ndarray, images: np.ndarray) -> None:
        """Keep as many of the `images` as there is room for."""
        count = min(len(indices), len(self.kept) - self.used)
        self.kept[self.used : self.used + count] = images[:count]
        self.place[indices[:count]] = np.arange(self.used, self.used + count)
        self.used += count


IMAGES = {"train": 50_000, "test": 10_000}
PREFIX = "noise:"


def open_parts(name: str) -> dict[str, Source]:
    """Return the parts of a set of noise: "noise:3x32x32:10" has color images, "noise:440:8000" rows of 440 numbers."""
    found = re.fullmatch(r"noise:([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*))?:([1-9]\d*)", name)
    if found is None:
        raise UserError(f"data set {name!r}: give noise:CHANNELSxHEIGHTxWIDTH:CLASSES, or noise:FEATURES:CLASSES")
    channels, height, width, classes = (int(number or 1) for number in found.groups())
    dtype = np.dtype(np.uint8 if found[2] else np.float32)
    shape = channels, height, width
    return {part: _source(part, shape, dtype, classes) for part in IMAGES}


def _source(part: str, shape: tuple[int, int, int], dtype: np.dtype, classes: int) -> Source:
    """Return images whose pixels depend on `part` and index only, and whose labels take turns."""
    key = list(IMAGES).index(part)
    labels = np.arange(IMAGES[part]) % classes

    def draw(index: int) -> np.ndarray:
        random = np.random.Generator(np.random.SFC64([key, int(index)]))
        return random.integers(0, 256, shape, dtype) if dtype == np.uint8 else random.standard_normal(shape, dtype)

    def rows(indices: np.ndarray) -> np.ndarray:
        drawn = np.empty((len(indices), *shape), dtype)
        for place, index in enumerate(indices):
            drawn[place] = draw(index)
        return drawn

    return Source(
        name=lambda index: f"noise {part} {index}", shape=shape, dtype=dtype, labels=labels, rows=rows, classes=classes
    )
