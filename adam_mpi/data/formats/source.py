"""A source: the images and labels of one part of a data set, read by index; and rows read from where they lie.

Rows are read by position, not mapped: mapped pages count as memory of this process, and a mapped file that is cut
short kills it.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.sharding.fields import CLASS, INPUT, Field

Rows = Callable[[np.ndarray], np.ndarray]


def rows_at(path: Path, dtype: np.dtype, sizes: tuple[int, ...], offset: int) -> Rows:
    """Return a function that reads rows of an array from `offset` of a file; raise UserError when it is too short."""
    return rows_in_chunks(path, dtype, sizes, np.array([offset]), sizes[0])


def rows_in_chunks(path: Path, dtype: np.dtype, sizes: tuple[int, ...], starts: np.ndarray, length: int) -> Rows:
    """Return a function that reads rows of an array whose chunks of `length` rows begin at `starts` in a file."""
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    wanted = int(starts.max(initial=0)) + length * row_bytes
    held = path.stat().st_size
    if held < wanted:
        raise UserError(f"{path}: cut short or damaged: its header announces {wanted} bytes, not {held}")
    file = open(path, "rb", buffering=0)

    def rows(indices: np.ndarray) -> np.ndarray:
        taken = np.empty((len(indices), row_bytes), np.uint8)
        places = starts[indices // max(length, 1)] + indices % max(length, 1) * row_bytes
        # Adjacent rows are read together.
        edges = [0, *(np.flatnonzero(np.diff(places) != row_bytes) + 1).tolist(), len(indices)]
        for first, last in itertools.pairwise(edges):
            _fill_memory(path, file.fileno(), taken[first:last].reshape(-1), int(places[first]) if last else 0)
        return taken.view(dtype).reshape(len(indices), *sizes[1:])

    return rows


def _fill_memory(path: Path, file: int, memory: np.ndarray, offset: int) -> None:
    """Read rows of a source's file from `offset` on until `memory` is full; raise UserError at the end of the file."""
    done = 0
    while done < memory.size:
        more = _read_into(file, memory[done:], offset + done)
        if not more:
            raise UserError(f"{path}: cut short while it was read; do not change a data set that is in use")
        done += more


def _read_into(file: int, memory: np.ndarray, offset: int) -> int:
    """Read once from `offset` of a source's file into `memory`; return the bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [memory.data], offset)
    content = os.pread(file, memory.size, offset)
    memory[: len(content)] = np.frombuffer(content, np.uint8)
    return len(content)


def join_rows(pieces: list[tuple[int, Rows]]) -> Rows:
    """Return a function that reads the rows of several files of a source as one; `pieces` are (length, rows)."""
    edges = np.cumsum([0] + [length for length, _ in pieces])

    def rows(indices: np.ndarray) -> np.ndarray:
        cuts = np.searchsorted(indices, edges)
        return np.concatenate(
            [
                take(indices[a:b] - edge)
                for (_, take), edge, a, b in zip(pieces, edges[:-1], cuts[:-1], cuts[1:], strict=True)
            ]
        )

    return rows


Shape = tuple[int, int, int]
MOST_COMPRESSION = 1032
"""The most that deflate can compress: a header that announces more is wrong."""


class BadImages(UserError):
    """Some of the requested images cannot be used; the message names the first, `positions` has all of them."""

    def __init__(self, positions: Iterable[int], message: str) -> None:
        super().__init__(f'{message}; repair it, or leave such images out with data.on_bad = "skip"')
        self.positions = list(positions)


@dataclass(frozen=True)
class Column:
    """A further input or target of one part of a data set."""

    field: Field
    rows: Rows
    """Returns its values at ascending indices."""


@dataclass(frozen=True)
class Source:
    """The images and labels of one part of a data set, before it is split."""

    name: Callable[[int], str]
    """Returns where an image is, for messages: path and index."""
    shape: tuple[int, ...]
    """(channels, height, width); features are channels of one pixel, integers have any shape."""
    dtype: np.dtype
    """uint8, or the type of numbers that are taken as they are."""
    labels: np.ndarray
    """The first target of each image; see `target`."""
    rows: Callable[[np.ndarray], np.ndarray]
    """Returns the images at ascending indices."""
    classes: int | None = None
    """The number of classes, where the format has it."""
    in_memory: bool = False
    """Whether the images are in memory anyway."""
    names: tuple[str, ...] = ()
    """The names of the classes, where the format has them."""

    input_name: str = INPUT
    """The name of the images among the inputs."""
    target: Field = CLASS
    """The description of `labels`."""
    columns: tuple[Column, ...] = ()
    """Further inputs and targets."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fields(self) -> tuple[Field, ...]:
        """Return the inputs and targets of a source in their order, before any transformation."""
        image = Field(self.input_name, self.dtype.name, self.shape)
        more = [column.field for column in self.columns]
        inputs = [field for field in more if field.role == INPUT]
        return (image, *inputs, self.target, *(field for field in more if field.role != INPUT))

    @property
    def image_shape(self) -> Shape:
        """Return `shape` as (channels, height, width); values of another shape are channels of one pixel."""
        if len(self.shape) == 3:
            channels, height, width = self.shape
            return channels, height, width
        return math.prod(self.shape), 1, 1

    @property
    def image_bytes(self) -> int:
        """Return the bytes of one image of a data source."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return images [n, channels, height, width] and labels [n] of a source at ascending `indices`.

        Raises BadImages for float images that hold NaN or infinity.
        """
        images = self.rows(indices)
        if self.dtype.kind == "f":
            self._check_finite(images, indices)
        return images, self.labels[indices]

    def read_columns(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return a source's further inputs and targets at `indices`; raise BadImages for NaN and infinity."""
        order = np.argsort(indices)
        found = {}
        for column in self.columns:
            values = np.empty((len(indices), *column.field.shape), column.field.dtype)
            values[order] = column.rows(indices[order])
            if values.dtype.kind == "f":
                self._check_finite(values, indices)
            found[column.field.name] = values
        return found

    def _check_finite(self, values: np.ndarray, indices: np.ndarray) -> None:
        """Raise BadImages where `values` of a source hold NaN or infinity."""
        bad = np.flatnonzero(~np.isfinite(values).all(axis=tuple(range(1, values.ndim))))
        if bad.size:
            raise BadImages(bad.tolist(), f"{self.name(indices[bad[0]])}: holds NaN or infinity")


def array_source(
    name: str,
    sizes: tuple[int, ...],
    dtype: np.dtype,
    labels: np.ndarray,
    rows: Callable[[np.ndarray], np.ndarray],
    classes: int | None = None,
    in_memory: bool = False,
) -> Source:
    """Return the source of an array of images or features of `sizes`, whatever the order of its axes.

    Raises UserError for labels that are not one whole number each, and for images of another type.
    """
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{name}: labels are {labels.dtype} of sizes {labels.shape}; give one whole number each")
    if len(labels) != sizes[0]:
        raise UserError(f"{name}: {len(labels)} labels for {sizes[0]} images")
    if dtype != np.uint8 and dtype.kind != "f":
        raise UserError(f"{name}: images are {dtype}; give uint8, or floats that are taken as they are")
    shape, axes = image_axes(name, sizes)
    kind = np.dtype(np.uint8 if dtype == np.uint8 else np.float16 if dtype == np.float16 else np.float32)

    def images(indices: np.ndarray) -> np.ndarray:
        taken = rows(indices)
        taken = taken.transpose(axes) if axes else taken.reshape(len(indices), *shape)
        return np.ascontiguousarray(taken, kind)

    return Source(
        name=lambda index: f"{name}, image {index}",
        shape=shape,
        dtype=kind,
        labels=labels,
        rows=images,
        classes=classes,
        in_memory=in_memory,
    )


def image_axes(name: str, sizes: tuple[int, ...]) -> tuple[Shape, tuple[int, ...] | None]:
    """Return the shape of an image of a source, and the order of axes for it; None where they are in that order."""
    if 0 in sizes:
        raise UserError(f"{name}: holds nothing, its sizes are {sizes}")
    match sizes:
        case (_, features):
            return (features, 1, 1), None
        case (_, height, width):
            return (1, height, width), None
        case (_, channels, height, width) if channels in (1, 3) or width not in (1, 3):
            return (channels, height, width), None
        case (_, height, width, channels):
            return (channels, height, width), (0, 3, 1, 2)
    raise UserError(f"{name}: an array of sizes {sizes}; give (images, features), (images, height, width) or four axes")
