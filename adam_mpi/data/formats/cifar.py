"""CIFAR-10 and CIFAR-100 in their binary version: records of one or two label bytes and 3x32x32 pixels."""

from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats.source import Source, join_rows, rows_at

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
TEN = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
HUNDRED = {"train": ["train.bin"], "test": ["test.bin"]}
NAMES = [name for files in (TEN, HUNDRED) for part in files.values() for name in part]
PICKLED = [name.removesuffix(".bin") for name in TEN["train"]]


def open_parts(path: Path) -> dict[str, Source]:
    """Open the parts in a folder of binary CIFAR files."""
    ten = any((path / name).exists() for name in TEN["train"])
    # CIFAR-100 has two labels per image, and the second, finer one counts.
    files, labels, classes = (TEN, 1, 10) if ten else (HUNDRED, 2, 100)
    found = {part: [path / name for name in names if (path / name).exists()] for part, names in files.items()}
    if not found["train"]:
        raise UserError(f"{path}: {files['train'][0]} does not exist")
    return {part: _source_of_records(paths, labels, classes) for part, paths in found.items() if paths}


def _source_of_records(paths: list[Path], labels: int, classes: int) -> Source:
    """Return the source of CIFAR files whose records have `labels` label bytes, the last of which counts."""
    counts = [_count_records(path, labels + PIXELS) for path in paths]
    pieces = [
        (count, rows_at(path, np.dtype(np.uint8), (count, labels + PIXELS), 0))
        for count, path in zip(counts, paths, strict=True)
    ]
    records = join_rows(pieces)
    starts = np.cumsum([0, *counts])

    def name(index: int) -> str:
        file = int(np.searchsorted(starts, index, side="right")) - 1
        return f"{paths[file]}, image {index - starts[file]}"

    def rows(indices: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(records(indices)[:, labels:]).reshape(-1, *SHAPE)

    fine = np.concatenate([take(np.arange(count))[:, labels - 1] for count, take in pieces]).astype(np.int64)
    return Source(name, SHAPE, np.dtype(np.uint8), labels=fine, rows=rows, classes=classes)


def _count_records(path: Path, size: int) -> int:
    """Return the number of records of `size` bytes in a CIFAR file; raise UserError when they do not fill it."""
    count, rest = divmod(path.stat().st_size, size)
    if rest or not count:
        raise UserError(f"{path}: cut short or damaged: {path.stat().st_size} bytes are no records of {size} each")
    return count
