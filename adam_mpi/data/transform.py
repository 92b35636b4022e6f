"""Transformations: what happens to images between the cache and a batch; the same for (seed, epoch, image) anywhere."""

import math

import numpy as np

from adam_mpi.base.counter_rng import key_of
from adam_mpi.base.errors import UserError
from adam_mpi.config import Transform
from adam_mpi.data import warp

Shape = tuple[int, int, int]
# Of the training part, for the mean and deviation of each channel.
SAMPLE = 1024


def output(wanted: Transform, shape: Shape, dtype: np.dtype) -> tuple[Shape, np.dtype]:
    """Shape and type of an image after its transformation."""
    if dtype != np.uint8 and (_warps(wanted) or wanted.crop):
        raise UserError("data.transform: features and float images are taken as they are; only normalize works on them")
    channels, height, width = shape
    if wanted.crop > min(height, width):
        raise UserError(f"data.transform.crop = {wanted.crop}: images are {height} x {width}; give at most the smaller")
    if wanted.crop:
        height = width = wanted.crop
    return (channels, height, width), np.dtype(np.float32) if wanted.normalize else dtype


class Transformer:
    """Any number of threads may call it at the same time."""

    def __init__(self, wanted: Transform, shape: Shape, dtype: np.dtype, seed: int, sample: np.ndarray) -> None:
        """`sample`: images from which the mean and deviation are taken, where they are wanted."""
        self.wanted, self.seed, self.warps = wanted, seed, _warps(wanted)
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
        """Images as the network sees them: changed at random in training, not without an epoch."""
        if epoch is not None and (self.warps or self.wanted.crop):
            pixels = np.empty((len(images), *self.shape), np.uint8)
            key = np.uint64(key_of(np.uint64(self.seed % 2**64), epoch))
            warp.warp(images, ids, key, self.limits, self.across, self.along, pixels)
            images = pixels
        elif self.wanted.crop:
            images = middle(images, self.wanted.crop)
        return (images - self.mean) * self.factor if self.wanted.normalize else images


def _warps(wanted: Transform) -> bool:
    amounts = wanted.shift, wanted.rotation, wanted.scale, wanted.shear, wanted.elastic
    return any(amounts) or wanted.reflect or wanted.brightness > 0 or wanted.contrast > 0


def middle(images: np.ndarray, side: int) -> np.ndarray:
    top, left = (images.shape[2] - side) // 2, (images.shape[3] - side) // 2
    return np.ascontiguousarray(images[:, :, top : top + side, left : left + side])


def _moments(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and 1 / deviation of each channel, shaped to go with images; a constant channel becomes 0."""
    values = np.moveaxis(sample, 1, 0).reshape(sample.shape[1], -1).astype(np.float64)
    mean, deviation = values.mean(axis=1), values.std(axis=1)
    factor = 1 / np.where(deviation > 0, deviation, 1)
    return mean[:, None, None].astype(np.float32), factor[:, None, None].astype(np.float32)
