"""Data sets by name or by path: what they hold, and their images by part and index."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.config import Data
from adam_mpi.data import formats, glyphs, noise, targets, transform
from adam_mpi.data.cache import Cache
from adam_mpi.data.formats import idx
from adam_mpi.data.formats.source import BadImages, Source
from adam_mpi.data.transform import Moments
from adam_mpi.model.input_format import SCALED_BYTES, InputFormat
from adam_mpi.sharding.fields import (
    CLASSES,
    INPUT,
    SOFT,
    TARGET,
    Field,
    image_fields,
    split,
)

log = logging.getLogger(__name__)
NAMES = ("glyphs", "mnist", "fashion")
FILES = idx.FILES
SPLIT_KEY = 2014
TEST_SHARE = 1 / 6
"""The share of images that become the test part of a set that has none."""
SAMPLE = 1024
"""Images of the training part from which the mean and deviation of each channel are computed."""
CHECKED_BYTES = 1 << 24
"""Bytes that `DataSet.check` reads at a time."""
CHECK_SECONDS = 5.0
"""Seconds between two reports of its progress."""


@dataclass(frozen=True)
class Description:
    """What a data set holds: the shape of an image as (channels, height, width), and the images in each part."""

    name: str
    shape: tuple[int, int, int]
    classes: int
    train: int
    validation: int
    test: int
    form: InputFormat = SCALED_BYTES
    """What a network gets as its first input: bytes, or numbers that are taken as they are."""
    named: tuple[Field, ...] = ()
    """The fields of a batch, where they are not images and classes."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """Return the fields of a data set's batches, as data ranks send them."""
        return self.named or image_fields(self.shape, self.form.dtype)

    @property
    def target(self) -> Field:
        """Return the first target of a data set."""
        return next(field for field in self.fields if field.role == TARGET)


@dataclass(frozen=True)
class Samples:
    """Images that were read, with all their inputs and targets by name."""

    kept: np.ndarray
    """The positions of usable images among those that were requested."""
    inputs: dict[str, np.ndarray]
    targets: dict[str, np.ndarray]


class DataSet:
    """Images through a cache; the validation part is split off the training images, as is a missing test part."""

    def __init__(self, data: Data, sources: dict[str, Source]) -> None:
        """Check the labels of the data set's `sources` "train" and perhaps "test", and split them into parts."""
        self.data = data
        self.sources = sources
        self.target = sources["train"].target
        if self.target.kind == CLASSES:
            targets.check_labels(data.set, sources["train"])
        self.classes = targets.outputs(sources["train"])
        """The number of classes, or of the values of a vector or a set."""
        self.usable = {part: self._find_usable(source) for part, source in sources.items()}
        total = sum(len(source) * source.image_bytes for source in sources.values())
        self._caches = {
            part: Cache(source, data.cache * len(source) * source.image_bytes // total)
            for part, source in sources.items()
        }
        self._parts = self._split_into_parts()
        shape, dtype = transform.output(data.transform, sources["train"].image_shape, sources["train"].dtype)
        counts = {part: len(chosen) for part, (_, chosen) in self._parts.items()}
        image, *others = sources["train"].fields
        sent = shape if len(image.shape) == 3 else image.shape
        fields = (replace(image, shape=sent, dtype=dtype.name), *others, *self._soft_fields())
        self.description = Description(
            data.set,
            shape,
            self.classes,
            **counts,
            form=InputFormat(dtype.name),
            named=() if fields == image_fields(shape, dtype.name) else fields,
        )

    def _soft_fields(self) -> tuple[Field, ...]:
        """Return a data set's fields of mixed images: the other image's class, and the weight of the first class."""
        if not transform.mixes(self.data.transform):
            return ()
        if self.target.kind != CLASSES:
            raise UserError(f"data.transform: mixup and cutmix need targets that are classes, not {self.target.kind}")
        return SOFT

    def read(self, part: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a data set's images [n, channels, height, width] and labels [n] of a part such as "train"."""
        origin, order = self._parts[part]
        chosen = order[indices]
        return self._caches[origin].read(chosen), self.sources[origin].labels[chosen]

    def read_usable(self, part: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (positions, images, labels) of the usable images of the data set at `indices` of `part`.

        Raises BadImages for an unusable one where `data.on_bad` is "stop".
        """
        origin, order = self._parts[part]
        return self.read_source(origin, order[indices])

    def read_samples(self, part: str, indices: np.ndarray) -> Samples:
        """Return the usable images of the data set at `indices` of `part`, with all inputs and targets."""
        origin, order = self._parts[part]
        source = self.sources[origin]
        while True:
            kept, images, labels = self.read_source(origin, order[indices])
            chosen = order[indices][kept]
            try:
                values = source.read_columns(chosen)
            except BadImages as error:
                if self.data.on_bad == "stop":
                    raise
                log.warning("bad images are left out: %s", error)
                self.usable[origin][chosen[error.positions]] = False
                continue
            values |= {source.input_name: images, source.target.name: labels}
            return Samples(kept, split(source.fields, values, INPUT), split(source.fields, values, TARGET))

    def read_source(self, origin: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return images and labels of the data set's source "train" or "test", before it is split into parts."""
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

    def moments(self) -> Moments | None:
        """Return mean and 1 / deviation of each channel over a sample of the data set; None where not wanted.

        Raises BadImages as `read_usable` does.
        """
        if not self.data.transform.normalize:
            return None
        sample = np.arange(min(SAMPLE, self.description.train))
        return transform.moments(self.read_usable("train", sample)[1])

    def check(self, part: str, report: Callable[[str], None]) -> None:
        """Read a part of the data set whose inputs have floats; raise BadImages where they hold NaN or infinity.

        Images of bytes, and parts of which bad images may be left out, are not read. `report` gets the progress.
        """
        origin, order = self._parts[part]
        source = self.sources[origin]
        floats = any(np.dtype(field.dtype).kind == "f" for field in source.fields if field.role == INPUT)
        if not floats or self.data.on_bad != "stop":
            return
        chosen = np.sort(order)
        step = max(1, CHECKED_BYTES // source.image_bytes)
        reported = time.monotonic()
        for first in range(0, len(chosen), step):
            if time.monotonic() - reported > CHECK_SECONDS:
                reported = time.monotonic()
                report(f"looking for NaN in the {part} part: {first / len(chosen):.0%}")
            source.read(chosen[first : first + step])
            source.read_columns(chosen[first : first + step])

    def labels(self, part: str) -> np.ndarray:
        """Return the labels of a data set's `part`."""
        origin, order = self._parts[part]
        return self.sources[origin].labels[order]

    def bad(self) -> list[str]:
        """Return the images of the data set found bad so far, as texts like "train 17"."""
        found = ((part, np.flatnonzero(~usable)) for part, usable in self.usable.items())
        return [f"{part} {index}" for part, indices in found for index in indices]

    def _find_usable(self, source: Source) -> np.ndarray:
        """Return which images of the data set have an allowed target; raise BadImages if `data.on_bad` is "stop"."""
        usable, allowed = targets.allowed(source.labels, source.target, self.classes)
        if self.data.on_bad == "stop" and not usable.all():
            first = int(np.argmin(usable))
            what = "label" if source.target.kind == CLASSES else f"target {source.target.name}"
            raise BadImages([first], f"{source.name(first)}: has the {what} {source.labels[first]}; allowed {allowed}")
        return usable

    def _split_into_parts(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return for each part of the data set its source, and the indices of its images there."""
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


def describe(data: Data) -> Description:
    """Return what a data set holds; no image is read.

    What normalizes bytes is therefore not in the format of the inputs: see `describe_inputs`.
    """
    return open_set(data).description


def describe_inputs(data: DataSet) -> Description:
    """Return the description of `data` with what normalizes bytes, from a sample of images."""
    found = data.description
    moments = data.moments() if found.form.bytes else None
    if moments is None:
        return found
    mean, factor = (tuple(values.ravel().tolist()) for values in moments)
    return replace(found, form=replace(found.form, mean=mean, factor=factor))


def open_set(data: Data) -> DataSet:
    """Open a data set; images are read on request. Raises UserError for a name or path that is none."""
    if data.set == "glyphs":
        return DataSet(data, glyphs.open_parts())
    if data.set.startswith(noise.PREFIX):
        return DataSet(data, noise.open_parts(data.set))
    path = find_data_set(data.set) if data.set in NAMES else Path(data.set)
    if data.set not in NAMES and not path.exists():
        raise UserError(f"data set {data.set!r}: unknown; allowed are {', '.join(NAMES)}, or a path of files")
    if data.inputs or data.targets:
        sources = formats.open_named(path, data.inputs, data.targets)
    else:
        sources = formats.open_parts(path, data.size)
    _check_agreement(path, sources)
    return DataSet(data, sources)


def _check_agreement(path: Path, sources: dict[str, Source]) -> None:
    """Raise UserError where the test part has other fields than the training part."""
    if "test" not in sources:
        return
    for one, other in zip(sources["train"].fields, sources["test"].fields, strict=True):
        if one != other:
            shown = [f"{field.dtype} of {field.shape}" for field in (one, other)]
            what = "images" if one.name == INPUT else one.name
            raise UserError(f"{path}: training {what} are {shown[0]}, test {what} {shown[1]}; they must agree")


def home() -> Path:
    """Return the data folder with the known data sets: of this checkout, or of the current directory when installed."""
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


def _split_order(count: int) -> np.ndarray:
    """Return the order in which the training images of a data set are split into parts."""
    # The key is fixed, not the run's seed: runs of different seeds are compared on the same validation images.
    # RandomState, because numpy guarantees that its numbers never change.
    return np.random.RandomState(SPLIT_KEY).permutation(count)
