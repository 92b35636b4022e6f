"""Folders of images, class/name.png or .jpg, with or without train/ and test/ above; decoded in parallel."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats.source import BadImages, Shape, Source

ENDINGS = (".png", ".jpg", ".jpeg")
MOST_PIXELS = 100_000_000
"""Pixels that an image may announce before memory is allocated for it."""


def open_parts(path: Path, size: int = 0) -> dict[str, Source]:
    """Open the parts in a folder of images; with a `size` all images are scaled to squares of that side."""
    parts = {part: path / part for part in ("train", "test") if (path / part).is_dir()}
    folders = parts if "train" in parts else {"train": path}
    classes = sorted(entry.name for entry in os.scandir(folders["train"]) if entry.is_dir())
    listed = {part: list(_image_files(folder, classes)) for part, folder in folders.items()}
    if not listed["train"]:
        raise UserError(f"data set {path}: no format known here; a folder of images has class/name.png or .jpg")
    shape = _first_shape(path, listed["train"], size)
    return {part: _source_of_files(files, shape, tuple(classes), size > 0) for part, files in listed.items() if files}


def _image_files(folder: Path, classes: list[str]) -> Iterator[tuple[Path, int]]:
    """Yield the image files below `folder` with their labels."""
    for label, name in enumerate(classes):
        if (folder / name).is_dir():
            found = (file for file in (folder / name).iterdir() if file.suffix.lower() in ENDINGS)
            yield from ((file, label) for file in sorted(found))


def _first_shape(path: Path, files: list[tuple[Path, int]], size: int) -> Shape:
    """Return the shape of the first image file that can be read; with a `size` only its channels are used."""
    for file, _ in files:
        try:
            with _pillow().open(file) as image:
                channels = 1 if image.mode in ("1", "L", "LA", "I", "I;16") else 3
                width, height = (size, size) if size else image.size
                return channels, height, width
        except Exception:  # reported when the image is read
            continue
    raise UserError(f"data set {path}: none of its {len(files)} images can be read")


def _source_of_files(files: list[tuple[Path, int]], shape: Shape, names: tuple[str, ...], fit: bool) -> Source:
    """Return the source of image `files`, which are scaled to `shape` if they may be (`fit`)."""
    paths = [file for file, _ in files]
    labels = np.array([label for _, label in files], np.int64)

    def rows(indices: np.ndarray) -> np.ndarray:
        results = list(_decoding_threads().map(lambda index: decode_image(paths[index], shape, fit), indices))
        bad = [position for position, result in enumerate(results) if isinstance(result, str)]
        if bad:
            raise BadImages(bad, f"{paths[indices[bad[0]]]}, image {indices[bad[0]]}: {results[bad[0]]}")
        return np.stack(results) if results else np.empty((0, *shape), np.uint8)

    return Source(
        name=lambda index: f"{paths[index]}, image {index}",
        shape=shape,
        dtype=np.dtype(np.uint8),
        labels=labels,
        rows=rows,
        classes=len(names),
        names=names,
    )


def decode_image(path: Path, shape: Shape, fit: bool) -> np.ndarray | str:
    """Return the image of a PNG or JPEG file as (channels, height, width), or a text about what is wrong with it."""
    channels, height, width = shape
    try:
        with _pillow().open(path) as image:
            if image.size[0] * image.size[1] > MOST_PIXELS:
                return f"announces {image.size[0]} x {image.size[1]} pixels, more than {MOST_PIXELS}"
            plain = image.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # at damaged files Pillow raises almost anything
        return f"cannot be read ({error})"
    if plain.size != (width, height):
        if not fit:
            return f"is {plain.size[0]} x {plain.size[1]}, the first one {width} x {height}; set data.size = SIDE"
        plain = _scale_and_crop(plain, height)
    pixels = np.asarray(plain, np.uint8)
    return np.ascontiguousarray(pixels.reshape(height, width, channels).transpose(2, 0, 1))


def _scale_and_crop(image: Any, side: int) -> Any:
    """Scale a decoded `image` until its shorter side has `side` pixels, and crop the middle."""
    scale = side / min(image.size)
    wide, high = (max(side, round(length * scale)) for length in image.size)
    left = (wide - side) // 2
    top = (high - side) // 2
    return image.resize((wide, high)).crop((left, top, left + side, top + side))


@cache
def _decoding_threads() -> ThreadPoolExecutor:
    """Return the threads that decode image files."""
    return ThreadPoolExecutor(min(32, os.cpu_count() or 1), "decode")


@cache
def _pillow() -> Any:
    """Return Pillow's module of images; raise UserError when it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("folders of images need Pillow; install it: pip install 'adam-mpi[images]'") from None
    return Image
