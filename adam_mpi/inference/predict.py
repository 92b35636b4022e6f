"""Predict the classes of images in files, for the command `adam_mpi predict`."""

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats.array_names import IMAGES, LABELS
from adam_mpi.data.formats.arrays import Held, members
from adam_mpi.data.formats.folder import ENDINGS, decode_image
from adam_mpi.inference.trained import Trained

BEST = 3
"""Classes that are printed for each image."""
MOST_BYTES = 4 << 30
"""Size of the largest array in an npz file, which is read into memory as a whole."""


def predict_lines(model: Trained, paths: Sequence[Path], output: Path | None) -> Iterator[str]:
    """Yield a line for each image, and the accuracy where there are labels; write all probabilities to `output`."""
    probabilities = []
    for path in paths:
        names, images, labels = read_images(model, path)
        probabilities.append(model.predict(images))
        yield from (f"{name}: {best(model, row)}" for name, row in zip(names, probabilities[-1], strict=True))
        if labels is not None:
            right = np.count_nonzero(probabilities[-1].argmax(axis=1) == labels)
            yield f"{path}: {right} of {len(labels)} right, {right / max(len(labels), 1):.2%}"
    if output is not None:
        with output.open("wb") as file:
            np.savez(file, probabilities=np.concatenate(probabilities), classes=np.array(model.names))
        yield f"probabilities: {output}"


def best(model: Trained, probabilities: np.ndarray) -> str:
    """Return the most probable predicted classes as text, such as "7 99.8% (1 0.1%, 9 0.1%)"."""
    order = np.argsort(-probabilities)[:BEST]
    first, *others = (f"{model.names[number]} {probabilities[number]:.1%}" for number in order)
    return f"{first} ({', '.join(others)})"


def read_images(model: Trained, path: Path) -> tuple[Sequence[str], np.ndarray, np.ndarray | None]:
    """Return the names, the images to predict and, where there are any, the labels of what is at `path`."""
    if path.suffix == ".npz":
        return _read_arrays(path)
    files = _image_files(path)
    images = [_read_image(model, file) for file in files]
    return [str(file) for file in files], np.stack(images), None


def _image_files(path: Path) -> list[Path]:
    """Return `path` itself, or all images to predict in it and in the folders below it if it is a folder."""
    if not path.exists():
        raise UserError(f"{path}: no such file; give images, folders of images or npz files")
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS)
    if not found:
        raise UserError(f"{path}: no images in it; they end in {', '.join(ENDINGS)}")
    return found


def _read_image(model: Trained, file: Path) -> np.ndarray:
    """Return the image to predict in `file` at the size that the model takes; raise UserError if unreadable."""
    _, height, width = model.inputs.shape
    if model.inputs.dtype != "uint8":
        raise UserError(f"{file}: this model takes numbers, not images; give an npz file")
    decoded = decode_image(file, model.inputs.shape, fit=height == width)
    if isinstance(decoded, str):
        raise UserError(f"{file}: {decoded}")
    return decoded


def _read_arrays(path: Path) -> tuple[Sequence[str], np.ndarray, np.ndarray | None]:
    """Return names, images to predict and labels of an npz file, of its test part where it has one."""
    try:
        held = members(path)
        images = _find_array(list(held), IMAGES)
        labels = _find_array(list(held), LABELS)
        if images is None:
            raise UserError(f"{path}: no array called images (or test_images, x_test ...); it has {list(held)}")
        for name in filter(None, (images, labels)):
            _check_size(path, name, held[name])
        values = held[images].all()
        return [f"{path}:{i}" for i in range(len(values))], values, None if labels is None else held[labels].all()
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _check_size(path: Path, name: str, held: Held) -> None:
    """Raise UserError for an array of images to predict that is too large to be read at once."""
    if held.bytes > MOST_BYTES:
        size = f"{path}: {name} has {held.bytes / 2**30:.1f} GiB"
        raise UserError(f"{size}; at most {MOST_BYTES / 2**30:g} GiB are read at once: write several files")


def _find_array(names: Sequence[str], words: Sequence[str]) -> str | None:
    """Return the name of the array of images to predict, the first of `names` that means one of `words`, or None."""
    wanted = [name for word in words for name in (f"test_{word}", f"{word}_test", word)]
    return next((name for name in wanted if name in names), None)
