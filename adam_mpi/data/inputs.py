"""What a trained network takes and tells: kept with its weights, so that they are of use without the data set."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.config import Transform
from adam_mpi.data.batch_loader import BatchLoader
from adam_mpi.data.transform import middle, output

Shape = tuple[int, int, int]
DTYPES = ("uint8", "float32")
MOST = 1 << 31
MOST_VALUES = 1 << 28
"""How many values an input may have: memory is taken for them, and the file may come from anybody."""


@dataclass(frozen=True)
class Inputs:
    """Images as they are in the data set, and what becomes of them before the first layer."""

    shape: Shape
    dtype: str
    classes: int
    names: tuple[str, ...] = ()
    """Of the classes, where the data set has names for them."""
    mean: tuple[float, ...] = ()
    """Of each channel, with `normalize`."""
    factor: tuple[float, ...] = ()

    @classmethod
    def of(cls, preparation: BatchLoader) -> Self:
        source, transformer = preparation.data.sources["train"], preparation.transformer
        mean = factor = np.empty(0)
        if transformer.wanted.normalize:
            mean, factor = transformer.mean.ravel(), transformer.factor.ravel()
        classes = preparation.data.classes
        return cls(source.shape, source.dtype.name, classes, source.names, tuple(mean.tolist()), tuple(factor.tolist()))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Of a file, which may come from anybody; raises a UserError where it says what no data set has."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields |= {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
            made = cls(**fields)
            wrong = made._wrong()
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"inputs: not what this program writes ({error})") from None
        if wrong:
            raise UserError(f"inputs: {wrong}")
        return made

    def _wrong(self) -> str:
        """What is wrong with it, if anything."""
        if not _are(self.shape, int) or len(self.shape) != 3 or not all(0 < side <= MOST for side in self.shape):
            return "shape wants three whole numbers above 0"
        if math.prod(self.shape) > MOST_VALUES:
            return f"shape has {math.prod(self.shape)} values; at most {MOST_VALUES} are taken"
        if self.dtype not in DTYPES:
            return f"dtype is none of {', '.join(DTYPES)}"
        if type(self.classes) is not int or not 0 < self.classes <= MOST:
            return "classes wants a whole number above 0"
        if not _are(self.names, str) or len(self.names) not in (0, self.classes):
            return "names wants a text for each class, or none"
        numbers = [number for values in (self.mean, self.factor) for number in values]
        if not all(_are(values, float, int) for values in (self.mean, self.factor)) or not np.isfinite(numbers).all():
            return "mean and factor want finite numbers"
        if {len(self.mean), len(self.factor)} not in ({0}, {self.shape[0]}):
            return "mean and factor want a number for each channel, or none"
        return ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def network_shape(self, wanted: Transform) -> Shape:
        """What the first layer gets."""
        return output(wanted, self.shape, np.dtype(self.dtype))[0]

    def prepare(self, images: np.ndarray, wanted: Transform) -> np.ndarray:
        """Images as the first layer gets them; those that are cut to size already are taken too."""
        images, inner = _arranged(images, self.shape[0]), self.network_shape(wanted)
        if images.dtype != self.dtype or images.shape[1:] not in (self.shape, inner):
            raise UserError(
                f"images are {images.dtype} of {_sizes(images.shape[1:])}; this model takes {self.dtype} of "
                f"{_sizes(self.shape)} (channels x height x width)"
            )
        if images.shape[1:] != inner:
            images = middle(images, wanted.crop)
        return (images - _column(self.mean)) * _column(self.factor) if self.mean else images


def _are(values: object, *kinds: type) -> bool:
    """Whether it is a tuple of just these kinds: True is no number."""
    return isinstance(values, tuple) and all(type(value) in kinds for value in values)


def _arranged(images: np.ndarray, channels: int) -> np.ndarray:
    """Axes (images, channels, height, width), also of plain rows, of gray images, and of channels that come last."""
    if images.dtype == np.float64:
        images = images.astype(np.float32)
    if images.ndim == 2:
        return images[:, :, None, None]
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[1] != channels == images.shape[3]:
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return images


def _column(values: tuple[float, ...]) -> np.ndarray:
    return np.array(values, np.float32)[:, None, None]


def _sizes(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
