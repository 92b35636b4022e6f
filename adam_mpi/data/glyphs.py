"""The built-in data set: ten digit-like classes drawn with strokes, 28x28 gray, no file needed."""

import math

import numba
import numpy as np

from adam_mpi.base.counter_rng import key_of, uniform
from adam_mpi.data.formats.source import Source

TRAIN = 24_000
TEST = 4_000
CLASSES = 10
SIDE = 28

# Two ways of writing each digit, as strokes through points in a box 6 wide and 10 high (y points down).
# A curve runs smoothly through its points; a point given twice is a corner.
SKELETONS = (
    (((3, 0), (0.6, 2), (0, 5), (0.6, 8), (3, 10), (5.4, 8), (6, 5), (5.4, 2), (3, 0)),),
    (((4.4, 0.8), (2.4, 0), (0.7, 2.6), (0.8, 7), (2.8, 10), (4.9, 8), (5.1, 3.6), (3.8, 0.6), (2.2, 0.9)),),
    (((3, 0), (3, 5), (3, 10)),),
    (((1.2, 2.4), (3.2, 0), (3.2, 0), (3.2, 5), (3.2, 10)), ((1.2, 10), (5.2, 10))),
    (((0.4, 2.2), (1.6, 0.3), (4.2, 0.2), (5.4, 2.4), (3.8, 5.6), (0.2, 10), (0.2, 10), (5.8, 10)),),
    (((0.6, 1.6), (2.8, 0), (5, 1.8), (3.6, 6), (1.2, 9.4), (0.2, 8.6), (1.4, 7.8), (3.6, 9.4), (6, 9.2)),),
    (((0.5, 1.2), (2.8, 0), (5.2, 1.6), (4.4, 4), (2.4, 4.8), (2.4, 4.8), (5, 5.6), (5.6, 8), (3, 10), (0.2, 8.8)),),
    (((0.6, 0), (5.2, 0), (5.2, 0), (2.6, 4), (2.6, 4), (5, 5), (5.6, 7.6), (3.4, 10), (0.4, 9)),),
    (((3.8, 0), (0, 6.6), (0, 6.6), (6, 6.6)), ((4.4, 3), (4.3, 10))),
    (((0.8, 0), (0.5, 5), (0.5, 5), (5.4, 5)), ((5, 0), (4.8, 5), (4.6, 10))),
    (((5.4, 0), (1, 0), (1, 0), (0.6, 4.4), (0.6, 4.4), (3.4, 3.8), (5.6, 6), (4.6, 9.2), (2, 10), (0.2, 8.8)),),
    (((1.2, 0), (0.8, 4.8), (0.8, 4.8), (4, 4.6), (5.4, 7.2), (3.4, 9.8), (0.2, 9.4)), ((1.2, 0.1), (5.6, 0.3))),
    (((4.8, 0.2), (2, 2), (0.3, 6), (1.4, 9.6), (4, 9.8), (5.6, 7.4), (4, 5.2), (1.8, 5.6), (0.6, 7.6)),),
    (((2.6, 0), (0.9, 3.6), (0.6, 7.4), (2.4, 10), (5, 8.6), (4.6, 6), (2.4, 5.8), (0.7, 8)),),
    (((0.2, 0.2), (5.8, 0.2), (5.8, 0.2), (3.6, 4.8), (2.2, 10)),),
    (((0.4, 1), (0.6, 0), (0.6, 0), (5.6, 0), (5.6, 0), (3.8, 4), (2.6, 10)), ((1.4, 5), (5.2, 4.8))),
    (((4.8, 1.4), (2.8, 0), (0.8, 1.8), (3, 4.8), (5.6, 7.6), (3, 10), (0.4, 7.6), (3, 4.8), (5, 2.4), (4.4, 0.9)),),
    (
        ((3, 0), (0.8, 1.2), (1, 3.8), (3, 4.7), (5, 3.8), (5.2, 1.2), (3, 0)),
        ((3, 4.7), (0.6, 6), (0.6, 8.8), (3, 10), (5.4, 8.8), (5.4, 6), (3, 4.7)),
    ),
    (((5.2, 1.6), (3, 0), (0.6, 1.8), (1.2, 4.6), (3.6, 4.8), (5.2, 2), (5.2, 2), (5, 6), (4.6, 10)),),
    (((5, 1.2), (2.4, 0.2), (0.6, 2.6), (2.4, 5), (5, 3.4), (5.2, 1), (5.4, 5.4), (4, 9.2), (0.8, 9.8)),),
)
POINTS = np.array([point for skeleton in SKELETONS for stroke in skeleton for point in stroke], np.float64)
STROKE_STARTS = np.cumsum([0] + [len(stroke) for skeleton in SKELETONS for stroke in skeleton])
SKELETON_STARTS = np.cumsum([0] + [len(skeleton) for skeleton in SKELETONS])
# Both points of a corner take the jitter of the first, or the corner would open.
JITTER_OF = np.arange(len(POINTS)) - np.append(False, (POINTS[1:] == POINTS[:-1]).all(axis=1))
LONGEST = max(len(stroke) for skeleton in SKELETONS for stroke in skeleton)
PIECES = 4  # straight pieces per span of a curve: at this size more are not seen

# Random numbers 0-12 of an image are its manner, 20-37 its distractors, 100-999 the jitter, then one per pixel.
PARTS = {"train": 1, "test": 2}


def draw_glyphs(seed: int, part: str, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, 1, 28, 28] and labels [n] of `part`; each depends on (seed, part, index) only."""
    images = np.empty((len(indices), 1, SIDE, SIDE), np.uint8)
    key = np.uint64(seed % 2**56 * 256 + PARTS[part])
    _draw_images(key, indices.astype(np.int64), images)
    return images, (indices % CLASSES).astype(np.uint8)


@numba.njit(nogil=True, cache=True)
def _draw_images(key: np.uint64, indices: np.ndarray, images: np.ndarray) -> None:
    """Draw the built-in glyphs with these `indices` into `images`."""
    canvas = np.empty((SIDE, SIDE), np.float64)
    points = np.empty((LONGEST, 2), np.float64)
    for i in range(len(indices)):
        image_key = key_of(key, indices[i])
        canvas[:] = 0.0
        _draw_glyph(image_key, indices[i] % CLASSES, canvas, points)
        _draw_distractors(image_key, canvas)
        _develop(image_key, canvas, images[i, 0])


@numba.njit(nogil=True, cache=True)
def _draw_glyph(key: np.uint64, label: int, canvas: np.ndarray, points: np.ndarray) -> None:
    """Draw a built-in glyph: one of the two skeletons of the class `label`, bent and placed at random."""
    skeleton = 2 * label + int(uniform(key, 0, 0.0, 2.0))
    radius = uniform(key, 1, 0.7, 1.6)
    ink = uniform(key, 2, 0.65, 1.0)
    for stroke in range(SKELETON_STARTS[skeleton], SKELETON_STARTS[skeleton + 1]):
        start = STROKE_STARTS[stroke]
        count = STROKE_STARTS[stroke + 1] - start
        _place_stroke(key, start, count, points)
        _draw_curve(canvas, points[:count], radius, ink)


@numba.njit(nogil=True, cache=True)
def _place_stroke(key: np.uint64, start: int, count: int, points: np.ndarray) -> None:
    """Jitter, slant, scale, turn and move the points of a glyph's stroke from their box onto the canvas."""
    slant = uniform(key, 3, -0.25, 0.4)
    turn = uniform(key, 4, -0.25, 0.25)
    wide = uniform(key, 5, 1.4, 2.2)
    high = uniform(key, 6, 1.5, 2.1)
    right = uniform(key, 7, -2.4, 2.4)
    down = uniform(key, 8, -2.4, 2.4)
    bend = uniform(key, 9, -0.5, 0.5)
    phase = uniform(key, 10, 0.0, 2 * math.pi)
    cosine = math.cos(turn)
    sine = math.sin(turn)
    for i in range(count):
        number = 100 + 2 * JITTER_OF[start + i]
        x = POINTS[start + i, 0] - 3 + uniform(key, number, -0.45, 0.45)
        y = POINTS[start + i, 1] - 5 + uniform(key, number + 1, -0.45, 0.45)
        x = (x - slant * y + bend * math.sin(0.6 * y + phase)) * wide
        y = y * high
        points[i, 0] = (SIDE - 1) / 2 + right + cosine * x - sine * y
        points[i, 1] = (SIDE - 1) / 2 + down + sine * x + cosine * y


@numba.njit(nogil=True, cache=True)
def _draw_curve(canvas: np.ndarray, points: np.ndarray, radius: float, ink: float) -> None:
    """Draw a glyph's cubic through the points; the slope at each is that of the line between its neighbors."""
    last = len(points) - 1
    for i in range(last):
        before = points[max(i - 1, 0)]
        after = points[min(i + 2, last)]
        x, y = points[i]
        for piece in range(1, PIECES + 1):
            t = piece / PIECES
            a = -0.5 * t * (1 - t) ** 2
            b = -0.5 * t * t * (1 - t)
            d = t * t * (3 - 2 * t) - a
            c = 1 - a - b - d
            next_x = a * before[0] + c * points[i, 0] + d * points[i + 1, 0] + b * after[0]
            next_y = a * before[1] + c * points[i, 1] + d * points[i + 1, 1] + b * after[1]
            _draw_line(canvas, (x, y), (next_x, next_y), radius, ink)
            x = next_x
            y = next_y


@numba.njit(nogil=True, cache=True)
def _draw_line(
    canvas: np.ndarray, start: tuple[float, float], stop: tuple[float, float], radius: float, ink: float
) -> None:
    """Draw a glyph's round-ended line with soft edges; where lines overlap the darker ink stays."""
    x0, y0 = start
    x1, y1 = stop
    reach = radius + 0.5
    along_x = x1 - x0
    along_y = y1 - y0
    scale = 1 / max(along_x * along_x + along_y * along_y, 1e-9)
    left = max(math.ceil(min(x0, x1) - reach), 0)
    right = min(math.floor(max(x0, x1) + reach), SIDE - 1)
    top = max(math.ceil(min(y0, y1) - reach), 0)
    bottom = min(math.floor(max(y0, y1) + reach), SIDE - 1)
    for row in range(top, bottom + 1):
        for column in range(left, right + 1):
            t = min(max(((column - x0) * along_x + (row - y0) * along_y) * scale, 0.0), 1.0)
            off_x = column - x0 - t * along_x
            off_y = row - y0 - t * along_y
            cover = reach - math.sqrt(off_x * off_x + off_y * off_y)
            canvas[row, column] = max(canvas[row, column], ink * min(cover, 1.0))


@numba.njit(nogil=True, cache=True)
def _draw_distractors(key: np.uint64, canvas: np.ndarray) -> None:
    """Draw up to three specks or short strokes beside a glyph, which mean nothing."""
    for number in range(20, 20 + 6 * int(uniform(key, 11, 0.0, 4.0)), 6):
        x = uniform(key, number, 0.0, SIDE)
        y = uniform(key, number + 1, 0.0, SIDE)
        length = uniform(key, number + 2, 0.0, 5.0)
        angle = uniform(key, number + 3, 0.0, 2 * math.pi)
        radius = uniform(key, number + 4, 0.3, 1.0)
        ink = uniform(key, number + 5, 0.3, 0.9)
        _draw_line(canvas, (x, y), (x + length * math.cos(angle), y + length * math.sin(angle)), radius, ink)


@numba.njit(nogil=True, cache=True)
def _develop(key: np.uint64, canvas: np.ndarray, image: np.ndarray) -> None:
    """Turn the ink of a glyph into gray levels, with grain of a strength that differs from image to image."""
    grain = uniform(key, 12, 0.0, 0.16)
    for row in range(SIDE):
        for column in range(SIDE):
            number = 1000 + row * SIDE + column
            level = canvas[row, column] + uniform(key, number, -grain, grain)
            image[row, column] = np.uint8(255.0 * min(max(level, 0.0), 1.0))


SEED = 1
"""The seed of glyphs: like a set of files, they are the same in every run."""


def open_parts() -> dict[str, Source]:
    """Return the parts of the built-in data set of glyphs."""
    return {"train": _glyph_source("train", TRAIN), "test": _glyph_source("test", TEST)}


def _glyph_source(part: str, count: int) -> Source:
    """Return a part of the built-in data set of glyphs."""

    def rows(indices: np.ndarray) -> np.ndarray:
        return draw_glyphs(SEED, part, indices)[0]

    return Source(
        name=lambda index: f"glyph {index}",
        shape=(1, SIDE, SIDE),
        dtype=np.dtype(np.uint8),
        labels=np.arange(count) % CLASSES,
        rows=rows,
        classes=CLASSES,
    )
