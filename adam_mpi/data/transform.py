"""Transform images between the cache and a batch; the result depends only on (seed, epoch, image)."""

import math

import numpy as np

from adam_mpi.base.counter_rng import key_of
from adam_mpi.base.errors import UserError
from adam_mpi.config import Transform
from adam_mpi.data import augment, warp

Shape = tuple[int, int, int]
Moments = tuple[np.ndarray, np.ndarray]
"""Mean and 1 / deviation of each channel, shaped to go with images."""


def output(wanted: Transform, shape: Shape, dtype: np.dtype) -> tuple[Shape, np.dtype]:
    """Return shape and type of an image after its transformation; raise UserError for one that is not possible."""
    if dtype.kind == "i" and (changes_pixels(wanted) or wanted.normalize):
        raise UserError("data.transform: integers are taken as they are; remove its keys")
    if dtype.kind == "i":
        return shape, dtype
    if dtype != np.uint8 and changes_pixels(wanted):
        raise UserError("data.transform: features and float images are taken as they are; only normalize works on them")
    channels, height, width = shape
    if wanted.crop > min(height, width):
        raise UserError(f"data.transform.crop = {wanted.crop}: images are {height} x {width}; give at most the smaller")
    if (wanted.saturation or wanted.hue) and channels != 3:
        raise UserError(f"data.transform: saturation and hue need images of 3 channels, not {channels}")
    if wanted.crop:
        height = width = wanted.crop
    if wanted.cutout > max(height, width):
        raise UserError(
            f"data.transform.cutout = {wanted.cutout}: images are {height} x {width}; give at most the larger"
        )
    # Normalized numbers are no longer in the range that 16 bits suit.
    normal = wanted.normalize and dtype.kind == "f"
    return (channels, height, width), np.dtype(np.float32) if normal else dtype


class Transformer:
    """Transforms images as the config wants; any number of threads may call it at the same time."""

    def __init__(
        self, wanted: Transform, shape: Shape, dtype: np.dtype, seed: int, moments: Moments | None = None
    ) -> None:
        """Prepare to transform images of `shape` and `dtype`, which `moments` normalize.

        Bytes stay bytes: the kernel that loads them has a table of normalized levels.
        """
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
        self.moments = moments
        self.fill = np.zeros(self.shape[0], np.uint8)
        """What erased pixels become: black, or the mean of each channel where images are normalized."""
        if moments is not None and self.dtype == np.uint8:
            self.fill = np.rint(moments[0].ravel()).astype(np.uint8)
        if mixes(wanted):
            # Of a way to mix that is not wanted nothing is drawn.
            self.blended = augment.weight_table(wanted.mixup or 1.0)
            self.pasted = augment.weight_table(wanted.cutmix or 1.0)

    def __call__(self, images: np.ndarray, ids: np.ndarray, epoch: int | None) -> np.ndarray:
        """Return transformed images: cropped, floats normalized, and warped at random in an `epoch`."""
        if epoch is not None and (self.warps or self.wanted.crop or self.wanted.pad):
            images = self._warp(images, ids, self._key(epoch))
        elif self.wanted.crop:
            images = center_crop(images, self.wanted.crop)
        if epoch is not None and _alters(self.wanted):
            images = self._alter(images, ids, self._key(epoch))
        if self.moments is None or self.dtype == np.uint8:
            return images
        mean, factor = self.moments
        return (images - mean) * factor

    def _key(self, epoch: int) -> np.uint64:
        """Return the random key of an `epoch`, which all transformed images share."""
        return np.uint64(key_of(np.uint64(self.seed % 2**64), epoch))

    def _warp(self, images: np.ndarray, ids: np.ndarray, key: np.uint64) -> np.ndarray:
        """Return the images to transform padded, warped and cropped."""
        if pad := self.wanted.pad:
            images = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        pixels = np.empty((len(images), *self.shape), np.uint8)
        warp.warp(images, ids, key, self.limits, across=self.across, along=self.along, outputs=pixels)
        return pixels

    def _alter(self, images: np.ndarray, ids: np.ndarray, key: np.uint64) -> np.ndarray:
        """Return the transformed images with other colors and without a square."""
        wanted = self.wanted
        pixels = images.copy()
        if wanted.saturation or wanted.hue:
            augment.jitter_colors(pixels, ids, key, wanted.saturation, wanted.hue)
        if wanted.cutout:
            augment.cut_out(pixels, ids, key, wanted.cutout, self.fill)
        return pixels

    def partners(self, ids: np.ndarray, epoch: int, count: int) -> np.ndarray:
        """Return for each image the one of the `count` training images that it is mixed with in `epoch`."""
        return augment.partners(ids, self._key(epoch), count)

    def mix(self, images: np.ndarray, others: np.ndarray, ids: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return transformed `images` mixed with their transformed partners `others`, and the weights of the former."""
        wanted = self.wanted
        weights = np.empty(len(images), np.float32)
        mixed = images.copy()
        share = 0.5 if wanted.mixup and wanted.cutmix else float(wanted.mixup > 0)
        augment.mix_images(
            mixed,
            others,
            ids,
            self._key(epoch),
            share=share,
            blended=self.blended,
            pasted=self.pasted,
            weights=weights,
        )
        return mixed, weights


def changes_pixels(wanted: Transform) -> bool:
    """Return whether any wanted transformation needs images of bytes."""
    return _warps(wanted) or _alters(wanted) or mixes(wanted) or wanted.crop > 0 or wanted.pad > 0


def mixes(wanted: Transform) -> bool:
    """Return whether the transformation mixes training images in pairs."""
    return wanted.mixup > 0 or wanted.cutmix > 0


def _alters(wanted: Transform) -> bool:
    """Return whether the transformation changes colors or erases squares."""
    return wanted.saturation > 0 or wanted.hue > 0 or wanted.cutout > 0


def _warps(wanted: Transform) -> bool:
    """Return whether the transformation has any random change, beyond where a crop lies."""
    amounts = wanted.shift, wanted.rotation, wanted.scale, wanted.shear, wanted.elastic
    return any(amounts) or wanted.reflect or wanted.brightness > 0 or wanted.contrast > 0


def center_crop(images: np.ndarray, side: int) -> np.ndarray:
    """Return the images transformed to the square of `side` pixels in their middle."""
    top = (images.shape[2] - side) // 2
    left = (images.shape[3] - side) // 2
    return np.ascontiguousarray(images[:, :, top : top + side, left : left + side])


def moments(sample: np.ndarray) -> Moments:
    """Return mean and 1 / deviation of each channel of `sample` to normalize with; a constant channel becomes 0."""
    values = np.moveaxis(sample, 1, 0).reshape(sample.shape[1], -1).astype(np.float64)
    mean = values.mean(axis=1)
    deviation = values.std(axis=1)
    factor = 1 / np.where(deviation > 0, deviation, 1)
    return mean[:, None, None].astype(np.float32), factor[:, None, None].astype(np.float32)
