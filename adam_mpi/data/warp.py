"""Warp images at random: one affine map, a smooth elastic field and a change of light, in one pass over the pixels.

Coordinates have 8 binary places. The four pixels around a source position lie in one 32-bit word of a table made per
image, so that one load per output pixel is enough; all else in the loops over a row is plain vector arithmetic.
"""

import math
from typing import NamedTuple

import numba
import numpy as np

from adam_mpi.base.counter_rng import mix, uniform

UNIT = 256
FIELD = 100
"""The first random number of an image's elastic field; numbers 0-9 are its map and its light."""


class Limits(NamedTuple):
    """The largest change of each kind; 0 leaves the image as it is."""

    shift: float
    rotation: float
    scale: float
    shear: float
    elastic: float
    reflect: float
    brightness: float
    contrast: float


class Row(NamedTuple):
    """Memory for one row of output: per column the source position, its bend, the four pixels there, their weights."""

    offset: np.ndarray
    source: np.ndarray
    quad: np.ndarray
    right: np.ndarray
    down: np.ndarray
    bend: np.ndarray


def splines(size: int, spacing: int) -> np.ndarray:
    """Return [controls, size]: how much each control point of a cubic B-spline moves each pixel."""
    controls = -(-(size - 1) // spacing) + 3
    distance = np.abs(np.arange(size)[None, :] / spacing - (np.arange(controls)[:, None] - 1))
    near = 2 / 3 - distance**2 + distance**3 / 2
    far = np.maximum(2 - distance, 0) ** 3 / 6
    return np.where(distance < 1, near, far).astype(np.float32)


@numba.njit(nogil=True, cache=True)
def warp(
    images: np.ndarray,
    ids: np.ndarray,
    key: np.uint64,
    limits: Limits,
    across: np.ndarray,
    along: np.ndarray,
    outputs: np.ndarray,
) -> None:
    """Fill `outputs` [n, channels, rows, columns] with warped images; each depends on `key` and its id only.

    `across` and `along` are the splines of the output's rows and columns.
    """
    channels, height, width = images.shape[1:]
    table = np.empty((channels, height * width), np.uint32)
    field = np.zeros((2, across.shape[0], along.shape[0]), np.float32)
    row = _allocate_row(outputs.shape[3])
    for i in range(len(images)):
        image_key = mix(key + np.uint64(ids[i]))
        for channel in range(channels):
            _tabulate(images[i, channel], table[channel])
        if limits.elastic > 0:
            _draw_field(image_key, limits.elastic, field)
        _warp_image(
            table, (height, width), image_key, limits, field=field, bases=(across, along), row=row, output=outputs[i]
        )


@numba.njit(nogil=True, cache=True)
def _allocate_row(columns: int) -> Row:
    """Allocate the memory for one row of a warped image."""
    offset = (np.arange(columns) - (columns - 1) / 2).astype(np.float32)
    source = np.empty(columns, np.int32)
    quad = np.empty(columns, np.uint32)
    right = np.empty(columns, np.float32)
    down = np.empty(columns, np.float32)
    bend = np.zeros((2, columns), np.float32)
    return Row(offset=offset, source=source, quad=quad, right=right, down=down, bend=bend)


@numba.njit(nogil=True, cache=True)
def _tabulate(image: np.ndarray, table: np.ndarray) -> None:
    """Pack each pixel of the image to warp with its right, lower and lower right neighbor into one word."""
    height, width = image.shape
    for r in range(height):
        below = min(r + 1, height - 1)
        for c in range(width - 1):
            upper = np.uint32(image[r, c]) | np.uint32(image[r, c + 1]) << 8
            table[r * width + c] = upper | np.uint32(image[below, c]) << 16 | np.uint32(image[below, c + 1]) << 24
        last = np.uint32(image[r, width - 1]) | np.uint32(image[below, width - 1]) << 16
        table[r * width + width - 1] = last | last << 8


@numba.njit(nogil=True, cache=True)
def _draw_field(key: np.uint64, strength: float, field: np.ndarray) -> None:
    """Draw control points of an elastic warp whose spline moves pixels by `strength` in the quadratic mean."""
    # The variance of a uniform number is a third of its limit squared; a spline surface keeps (151 / 315) ** 2 of it.
    limit = UNIT * strength * math.sqrt(3.0) * 315 / 151
    flat = field.reshape(-1)
    for n in range(flat.size):
        flat[n] = uniform(key, FIELD + n, -limit, limit)


@numba.njit(nogil=True, cache=True)
def _warp_image(
    table: np.ndarray,
    size: tuple[int, int],
    key: np.uint64,
    limits: Limits,
    field: np.ndarray,
    bases: tuple[np.ndarray, np.ndarray],
    row: Row,
    output: np.ndarray,
) -> None:
    """Warp an image of `size` (height, width), given as its `table`; `bases` are the splines of rows and columns."""
    channels, rows, columns = output.shape
    across, along = bases
    a, b, c, d, x, y = _draw_map(key, limits, size, (rows, columns))
    gain, add = _draw_light(key, limits)
    for r in range(rows):
        if limits.elastic > 0:
            _bend_row(field, across[:, r], along, row.bend)
        off = np.float32(r - (rows - 1) / 2)
        _source_pixels((a, b * off + x), (c, d * off + y), size, row)
        for channel in range(channels):
            _look_up_pixels(table[channel], row.source, row.quad)
            _interpolate_row(row, gain, add, output[channel, r])


@numba.njit(nogil=True, cache=True)
def _draw_map(
    key: np.uint64, limits: Limits, size_in: tuple[int, int], size_out: tuple[int, int]
) -> tuple[np.float32, np.float32, np.float32, np.float32, np.float32, np.float32]:
    """Draw the affine map (a, b, c, d, x0, y0) of a warp: x' = a x + b y + x0, y' = c x + d y + y0.

    Both positions are relative to the center; sizes are (rows, columns).
    """
    height, width = size_in
    rows, columns = size_out
    turn = uniform(key, 0, -limits.rotation, limits.rotation)
    size = UNIT / (1 + uniform(key, 1, -limits.scale, limits.scale))
    shear = uniform(key, 2, -limits.shear, limits.shear)
    mirror = -1.0 if uniform(key, 3, 0.0, 1.0) < limits.reflect / 2 else 1.0
    # A crop lies at whole pixels anywhere inside the image; a shift moves it further.
    x = _draw_crop_start(key, 4, width - columns) + uniform(key, 6, -limits.shift, limits.shift)
    y = _draw_crop_start(key, 5, height - rows) + uniform(key, 7, -limits.shift, limits.shift)
    cosine = size * math.cos(turn)
    sine = size * math.sin(turn)
    a = np.float32(mirror * cosine)
    b = np.float32(cosine * shear - sine)
    c = np.float32(mirror * sine)
    d = np.float32(sine * shear + cosine)
    center_x = np.float32(UNIT * (x + (columns - 1) / 2) + 0.5)
    center_y = np.float32(UNIT * (y + (rows - 1) / 2) + 0.5)
    return a, b, c, d, center_x, center_y


@numba.njit(nogil=True, cache=True)
def _draw_crop_start(key: np.uint64, number: int, free: int) -> float:
    """Draw the first row or column of a warped image's crop, from 0 to `free`."""
    return math.floor(uniform(key, number, 0.0, free + 1.0))


@numba.njit(nogil=True, cache=True)
def _draw_light(key: np.uint64, limits: Limits) -> tuple[np.float32, np.float32]:
    """Draw the light (gain, add) of a warp: a pixel p becomes gain * p + add; contrast is about middle gray."""
    gain = 1 + uniform(key, 8, -limits.contrast, limits.contrast)
    add = 255 * uniform(key, 9, -limits.brightness, limits.brightness) + 127.5 * (1 - gain)
    return np.float32(gain), np.float32(add + 0.5)


@numba.njit(nogil=True, cache=True)
def _bend_row(field: np.ndarray, across: np.ndarray, along: np.ndarray, bend: np.ndarray) -> None:
    """Compute the elastic field of a warp along one row: sum control points down the rows, spread over columns."""
    for axis in range(2):
        bend[axis, :] = 0
        for k in range(along.shape[0]):
            control = np.float32(0)
            for j in range(across.size):
                control += across[j] * field[axis, j, k]
            for column in range(along.shape[1]):
                bend[axis, column] += control * along[k, column]


@numba.njit(nogil=True, cache=True)
def _source_pixels(
    line_x: tuple[np.float32, np.float32], line_y: tuple[np.float32, np.float32], size: tuple[int, int], row: Row
) -> None:
    """Compute where each pixel of a warped row comes from: its word in the table, and two weights.

    The source of a pixel is at slope * offset + start along x and y; `line_x` and `line_y` are (slope, start).
    """
    a, x = line_x
    c, y = line_y
    height, width = size
    last_x = np.int32((width - 1) * UNIT)
    last_y = np.int32((height - 1) * UNIT)
    none = np.int32(0)
    offset = row.offset
    source = row.source
    right = row.right
    down = row.down
    bend = row.bend
    for j in range(source.size):
        from_x = min(max(np.int32(a * offset[j] + x + bend[0, j]), none), last_x)
        from_y = min(max(np.int32(c * offset[j] + y + bend[1, j]), none), last_y)
        source[j] = np.int32(from_y >> 8) * np.int32(width) + np.int32(from_x >> 8)
        right[j] = np.float32(np.int32(from_x & 255)) * np.float32(1 / UNIT)
        down[j] = np.float32(np.int32(from_y & 255)) * np.float32(1 / UNIT)


@numba.njit(nogil=True, cache=True)
def _look_up_pixels(table: np.ndarray, source: np.ndarray, quad: np.ndarray) -> None:
    """Look up the words of a warped row in the table of its image."""
    # Alone in its loop: next to arithmetic it would keep that from being vectorized.
    for j in range(source.size):
        quad[j] = table[np.uint32(source[j])]


@numba.njit(nogil=True, cache=True)
def _interpolate_row(row: Row, gain: np.float32, add: np.float32, output: np.ndarray) -> None:
    """Interpolate the pixels of a warped row from their words, and change their light."""
    byte = np.uint32(255)
    quads = row.quad
    right = row.right
    down = row.down
    for j in range(output.size):
        quad = quads[j]
        upper_left = np.float32(np.int32(quad & byte))
        upper_right = np.float32(np.int32(quad >> np.uint32(8) & byte))
        lower_left = np.float32(np.int32(quad >> np.uint32(16) & byte))
        lower_right = np.float32(np.int32(quad >> np.uint32(24)))
        upper = upper_left + right[j] * (upper_right - upper_left)
        lower = lower_left + right[j] * (lower_right - lower_left)
        level = np.int32(gain * (upper + down[j] * (lower - upper)) + add)
        output[j] = np.uint8(min(max(level, np.int32(0)), np.int32(255)))
