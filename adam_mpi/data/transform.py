"""Transform images between the cache and a batch; the result depends only on (seed, epoch, image)."""

import math

import numpy as np

from adam_mpi.base.counter_rng import key_of
from adam_mpi.base.errors import UserError
from adam_mpi.config import Transform
from adam_mpi.data import warp

Shape = tuple[int, int, int]
SAMPLE = 1024
"""Images of the training part from which the mean and deviation of each channel are computed."""


def output(wanted: Transform, shape: Shape, dtype: np.dtype) -> tuple[Shape, np.dtype]:
    """Return shape and type of an image after its transformation; raise UserError for one that is not possible."""
    if dtype != np.uint8 and (_warps(wanted) or wanted.crop):
        raise UserError("data.transform: features and float images are taken as they are; only normalize works on them")
    channels, height, width = shape
    if wanted.crop > min(height, width):
        raise UserError(f"data.transform.crop = {wanted.crop}: images are {height} x {width}; give at most the smaller")
    if wanted.crop:
        height = width = wanted.crop
    return (channels, height, width), np.dtype(np.float32) if wanted.normalize else dtype


class Transformer:
    """Transforms images as the config wants; any number of threads may call it at the same time."""

    def __init__(self, wanted: Transform, shape: Shape, dtype: np.dtype, seed: int, sample: np.ndarray) -> None:
        """Prepare for images of `shape` and `dtype`; with `wanted.normalize` use mean and deviation of `sample`."""
        self.wanted = wanted
        self.seed = seed
        self.warps = _warps(wanted)
        self.shape, self.dtype = output(wanted, shape, dtype)
        self.across, self.along = (warp.splines(side, wanted.spacing) for side in self.shape[1:])
        self.limits = warp.Limits(
            shift=wanted.shift,
            rotation=math.radians(wanted.rotation),
            scale=wanted.scale,
            shear=wanted.shear,
            elastic=wanted.elastic,
            reflect=float(wanted.reflect),
            brightness=wanted.brightness,
            contrast=wanted.contrast,
        )
        if wanted.normalize:
            self.mean, self.factor = _moments(sample)

    def __call__(self, images: np.ndarray, ids: np.ndarray, epoch: int | None) -> np.ndarray:
        """Return images as the network sees them: warped at random if `epoch` is given, cropped and normalized."""
        if epoch is not None and (self.warps or self.wanted.crop):
            pixels = np.empty((len(images), *self.shape), np.uint8)
            key = np.uint64(key_of(np.uint64(self.seed % 2**64), epoch))
            warp.warp(images, ids, key, self.limits, across=self.across, along=self.along, outputs=pixels)
            images = pixels
        elif self.wanted.crop:
            images = center_crop(images, self.wanted.crop)
        return (images - self.mean) * self.factor if self.wanted.normalize else images


def _warps(wanted: Transform) -> bool:
    """Return whether any random change is wanted, beyond where a crop lies."""
    amounts = wanted.shift, wanted.rotation, wanted.scale, wanted.shear, wanted.elastic
    return any(amounts) or wanted.reflect or wanted.brightness > 0 or wanted.contrast > 0


def center_crop(images: np.ndarray, side: int) -> np.ndarray:
    """Return the square of `side` pixels in the middle of each image."""
    top = (images.shape[2] - side) // 2
    left = (images.shape[3] - side) // 2
    return np.ascontiguousarray(images[:, :, top : top + side, left : left + side])


def _moments(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and 1 / deviation of each channel, shaped to go with images; a constant channel becomes 0."""
    values = np.moveaxis(sample, 1, 0).reshape(sample.shape[1], -1).astype(np.float64)
    mean = values.mean(axis=1)
    deviation = values.std(axis=1)
    factor = 1 / np.where(deviation > 0, deviation, 1)
    return mean[:, None, None].astype(np.float32), factor[:, None, None].astype(np.float32)
