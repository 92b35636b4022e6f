"""Change colors, erase squares and mix pairs of images at random; every number is a function of seed, epoch and image.

Each image has a key, as in `warp.py`. The numbers 0 to 9 and from 100 on of a key are those of the warp.
"""

import math

import numba
import numpy as np
from scipy.special import betaincinv

from adam_mpi.base.counter_rng import mix, uniform

SATURATION = 10
HUE = 11
CUTOUT = 12
"""The first of two random numbers: row and column."""
KIND = 14
PARTNER = 15
WEIGHT = 16
BOX = 17
"""The first of two random numbers: row and column."""
QUANTILES = 4096
"""Steps of the table that weights are drawn from."""

# Brightness and two colors of red, green and blue (YIQ), and back.
TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
FROM_YIQ = np.linalg.inv(TO_YIQ)


def weight_table(alpha: float) -> np.ndarray:
    """Return the quantiles of the symmetric beta distribution, which weights of mixed images are drawn from."""
    return betaincinv(alpha, alpha, np.linspace(0, 1, QUANTILES + 1))


@numba.njit(nogil=True, cache=True)
def jitter_colors(images: np.ndarray, ids: np.ndarray, key: np.uint64, saturation: float, hue: float) -> None:
    """Change saturation and hue of color images [n, 3, rows, columns] in place.

    The saturation is multiplied by a factor between 1 - `saturation` and 1 + `saturation`, the hue is turned by up to
    `hue` turns in either direction.
    """
    for i in range(len(images)):
        image_key = mix(key + np.uint64(ids[i]))
        matrix = _color_matrix(
            1 + uniform(image_key, SATURATION, -saturation, saturation),
            2 * math.pi * uniform(image_key, HUE, -hue, hue),
        )
        _recolor(images[i].reshape(3, -1), matrix.astype(np.float32))


@numba.njit(nogil=True, cache=True)
def _color_matrix(factor: float, turn: float) -> np.ndarray:
    """Return the map of (red, green, blue) that multiplies the saturation by `factor` and turns the hue."""
    middle = np.zeros((3, 3))
    middle[0, 0] = 1
    middle[1, 1] = middle[2, 2] = factor * math.cos(turn)
    middle[1, 2] = -factor * math.sin(turn)
    middle[2, 1] = factor * math.sin(turn)
    return FROM_YIQ @ middle @ TO_YIQ


@numba.njit(nogil=True, cache=True)
def _recolor(planes: np.ndarray, matrix: np.ndarray) -> None:
    """Apply the color `matrix` to every pixel of three planes of bytes."""
    half = np.float32(0.5)
    for pixel in range(planes.shape[1]):
        red, green, blue = np.float32(planes[0, pixel]), np.float32(planes[1, pixel]), np.float32(planes[2, pixel])
        for channel in range(3):
            level = matrix[channel, 0] * red + matrix[channel, 1] * green + matrix[channel, 2] * blue + half
            planes[channel, pixel] = np.uint8(min(max(level, np.float32(0)), np.float32(255)))


@numba.njit(nogil=True, cache=True)
def cut_out(images: np.ndarray, ids: np.ndarray, key: np.uint64, side: int, fill: np.ndarray) -> None:
    """Erase in place a random square of `side` pixels (cutout), as far as it is inside; `fill` replaces it."""
    channels, rows, columns = images.shape[1:]
    for i in range(len(images)):
        image_key = mix(key + np.uint64(ids[i]))
        top, bottom = _erased_span(image_key, CUTOUT, rows, side)
        left, right = _erased_span(image_key, CUTOUT + 1, columns, side)
        for channel in range(channels):
            images[i, channel, top:bottom, left:right] = fill[channel]


@numba.njit(nogil=True, cache=True)
def _erased_span(key: np.uint64, number: int, length: int, side: int) -> tuple[int, int]:
    """Draw where the erased `side` pixels around a random one of `length` begin and end."""
    first = int(uniform(key, number, 0.0, length)) - side // 2
    return max(first, 0), min(first + side, length)


@numba.njit(nogil=True, cache=True)
def partners(ids: np.ndarray, key: np.uint64, count: int) -> np.ndarray:
    """Return for each image the one of `count` images that augmentation mixes it with."""
    found = np.empty(len(ids), np.int64)
    for i in range(len(ids)):
        found[i] = int(uniform(mix(key + np.uint64(ids[i])), PARTNER, 0.0, count))
    return found


@numba.njit(nogil=True, cache=True)
def mix_images(
    images: np.ndarray,
    others: np.ndarray,
    ids: np.ndarray,
    key: np.uint64,
    share: float,
    blended: np.ndarray,
    pasted: np.ndarray,
    weights: np.ndarray,
) -> None:
    """Mix each image with the one of `others` in its place, and set its weight, which is that of its own class.

    A `share` of the images is blended (mixup), with weights from the quantiles `blended`; into the rest a box of the
    other image is pasted (cutmix), whose share of the area is drawn from `pasted`.
    """
    for i in range(len(images)):
        image_key = mix(key + np.uint64(ids[i]))
        if uniform(image_key, KIND, 0.0, 1.0) < share:
            weights[i] = _blend_images(images[i], others[i], _draw_weight(image_key, blended))
        else:
            weights[i] = _paste_box(images[i], others[i], image_key, _draw_weight(image_key, pasted))


@numba.njit(nogil=True, cache=True)
def _draw_weight(key: np.uint64, table: np.ndarray) -> float:
    """Draw the weight of a mixed image from the distribution with these quantiles."""
    place = uniform(key, WEIGHT, 0.0, float(table.size - 1))
    below = int(place)
    return table[below] + (place - below) * (table[below + 1] - table[below])


@numba.njit(nogil=True, cache=True)
def _blend_images(image: np.ndarray, other: np.ndarray, weight: float) -> float:
    """Blend `other` into `image` (mixup), which keeps `weight`; return the weight."""
    own = np.float32(weight)
    more = np.float32(1 - weight)
    pixels = image.reshape(-1)
    values = other.reshape(-1)
    for index in range(pixels.size):
        pixels[index] = np.uint8(own * np.float32(pixels[index]) + more * np.float32(values[index]) + np.float32(0.5))
    return weight


@numba.njit(nogil=True, cache=True)
def _paste_box(image: np.ndarray, other: np.ndarray, key: np.uint64, weight: float) -> float:
    """Paste a box of `other` with the area 1 - `weight` into `image` (CutMix); return the share that is left."""
    rows, columns = image.shape[1:]
    side = math.sqrt(1 - weight)
    top, bottom = _erased_span(key, BOX, rows, int(rows * side + 0.5))
    left, right = _erased_span(key, BOX + 1, columns, int(columns * side + 0.5))
    image[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    return 1 - (bottom - top) * (right - left) / (rows * columns)
