"""What a trained network takes as input: kept with its weights, so that they can be used without the data set."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.config import Transform
from adam_mpi.data.batch_loader import BatchLoader
from adam_mpi.data.transform import center_crop, output
from adam_mpi.model.input_format import InputFormat

Shape = tuple[int, int, int]
DTYPES = ("uint8", "float16", "float32")
MOST = 1 << 31
MOST_VALUES = 1 << 28
"""Values that an input may have: memory is allocated for them, and the file is not trusted."""


@dataclass(frozen=True)
class Inputs:
    """Images as they are in the data set, and how they are prepared for the first layer."""

    shape: Shape
    dtype: str
    classes: int
    names: tuple[str, ...] = ()
    """Names of the classes, where the data set has them."""
    mean: tuple[float, ...] = ()
    """Mean of each channel, with `normalize`."""
    factor: tuple[float, ...] = ()
    """1 / deviation of each channel, with `normalize`."""

    @classmethod
    def of(cls, loader: BatchLoader) -> Self:
        """Return the inputs of a network that is trained with the batches of `loader`, to keep with its weights."""
        source = loader.data.sources["train"]
        mean: tuple[float, ...] = ()
        factor: tuple[float, ...] = ()
        if loader.transformer.moments is not None:
            mean, factor = (tuple(values.ravel().tolist()) for values in loader.transformer.moments)
        return cls(
            source.image_shape,
            source.dtype.name,
            classes=loader.data.classes,
            names=source.names,
            mean=mean,
            factor=factor,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the network's inputs that `to_json` wrote; raise UserError for anything else: it is not trusted."""
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
        """Return what is wrong with the fields of the network's inputs; an empty text when nothing is."""
        if not _are(self.shape, int) or len(self.shape) != 3 or not all(0 < side <= MOST for side in self.shape):
            return "shape must be three whole numbers above 0"
        if math.prod(self.shape) > MOST_VALUES:
            return f"shape has {math.prod(self.shape)} values; at most {MOST_VALUES} are allowed"
        if self.dtype not in DTYPES:
            return f"dtype must be one of {', '.join(DTYPES)}"
        if type(self.classes) is not int or not 0 < self.classes <= MOST:
            return "classes must be a whole number above 0"
        if not _are(self.names, str) or len(self.names) not in (0, self.classes):
            return "names must have a text for each class, or none"
        numbers = [number for values in (self.mean, self.factor) for number in values]
        if not all(_are(values, float, int) for values in (self.mean, self.factor)) or not np.isfinite(numbers).all():
            return "mean and factor must be finite numbers"
        if {len(self.mean), len(self.factor)} not in ({0}, {self.shape[0]}):
            return "mean and factor must have a number for each channel, or none"
        return ""

    def to_json(self) -> str:
        """Return the description of the network's inputs as JSON."""
        return json.dumps(asdict(self))

    def network_shape(self, wanted: Transform) -> Shape:
        """Return the input shape of a trained network's first layer, after the transformation `wanted`."""
        return output(wanted, self.shape, np.dtype(self.dtype))[0]

    @property
    def form(self) -> InputFormat:
        """Return the input format of images from `prepare`: floats are normalized there, bytes by the network."""
        return InputFormat(self.dtype, self.mean, self.factor) if self.dtype == "uint8" else InputFormat(self.dtype)

    def prepare(self, images: np.ndarray, wanted: Transform) -> np.ndarray:
        """Return input `images` as a trained network takes them; those that are cropped already are accepted too.

        Raises UserError for images of another type or shape.
        """
        images = _arranged(images, self.shape[0])
        if images.dtype.kind == "f" and self.dtype.startswith("float"):
            images = images.astype(self.dtype, copy=False)
        inner = self.network_shape(wanted)
        if images.dtype != self.dtype or images.shape[1:] not in (self.shape, inner):
            raise UserError(
                f"images are {images.dtype} of {_sizes(images.shape[1:])}; this model takes {self.dtype} of "
                f"{_sizes(self.shape)} (channels x height x width)"
            )
        if images.shape[1:] != inner:
            images = center_crop(images, wanted.crop)
        if self.form.bytes or not self.mean:
            return images
        return (images - _column(self.mean)) * _column(self.factor)


def _are(values: object, *kinds: type) -> bool:
    """Return whether `values` of an input description are a tuple of just these `kinds`; a bool is no int."""
    return isinstance(values, tuple) and all(type(value) in kinds for value in values)


def _arranged(images: np.ndarray, channels: int) -> np.ndarray:
    """Return input images with the axes (images, channels, height, width), from rows, gray or channels-last images."""
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
    """Return one value for each channel of the inputs, shaped to go with images."""
    return np.array(values, np.float32)[:, None, None]


def _sizes(sizes: tuple[int, ...]) -> str:
    """Return the sizes of input images as text."""
    return "x".join(map(str, sizes))
