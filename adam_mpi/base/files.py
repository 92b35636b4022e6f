"""Small files, replaced as a whole so that a reader finds the old content or the new one; and checksums of data.

It detects mixed versions and single wrong bits, and runs at the speed of memory; crc32 would take longer than the disk.
In numpy: `(words * (2 * arange(n) + 1)).sum() + seed`, in unsigned 64-bit arithmetic.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file `path` atomically by `content` as JSON."""
    write_text(path, _json_text(content))


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` atomically by `text`, after a power loss too: `text` is on disk before the rename."""
    part = _write_part(path, text)
    sync_to_disk(part)
    part.replace(path)


def write_status(path: Path, content: dict[str, Any]) -> None:
    """Replace the small file `path` by `content` as JSON, without waiting for the disk: a status may get lost."""
    _write_part(path, _json_text(content)).replace(path)


def sync_to_disk(path: Path) -> None:
    """Return when `path`, a file or the list of names in a directory, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_part(path: Path, text: str) -> Path:
    """Write `text` into a temporary file beside `path`; return the path of that file."""
    part = path.with_suffix(".part")
    part.write_text(text)
    return part


def _json_text(content: dict[str, Any]) -> str:
    """Return `content` as the text of a JSON file."""
    return json.dumps(content, indent=2) + "\n"


@njit(nogil=True, cache=True)
def _add_checksums(words, edges, sums):  # type: ignore[no-untyped-def]
    """Add the checksums of pieces of `values` to `sums`, compiled by numba."""
    for k in range(sums.size):
        part = words[edges[k] : edges[k + 1]]
        total = sums[k]
        # Unsigned counters: the loop is not vectorized where they may wrap around.
        for i in range(part.size):
            total += np.uint64(part[i]) * np.uint64(np.uint32(2) * np.uint32(i) + np.uint32(1))
        sums[k] = total


def add_checksums(values: np.ndarray, edges: np.ndarray, sums: np.ndarray) -> None:
    """Add to `sums[k]` the checksum for files of the 32-bit words `edges[k]` to `edges[k + 1]` of `values`."""
    _add_checksums(values.reshape(-1).view(np.uint8).view(np.uint32), edges, sums)


def file_checksum(values: np.ndarray, seed: int = 0) -> int:
    """Return the checksum for files of `values`, a contiguous array of whole 32-bit words, added to `seed`."""
    sums = np.array([seed], np.uint64)
    add_checksums(values, np.array([0, values.nbytes // 4]), sums)
    return int(sums[0])
