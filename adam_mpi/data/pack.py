"""Pack a data set into one chunked HDF5 file, from which single images are read quickly."""

import os
from pathlib import Path

import h5py
import numpy as np
from tqdm import tqdm

from adam_mpi.base.errors import UserError
from adam_mpi.config import Data
from adam_mpi.data import sets
from adam_mpi.data.sets import DataSet

CHUNK_BYTES = 1 << 14
"""Bytes of a chunk of the file."""
BLOCK_BYTES = 1 << 24
"""Bytes that are read at a time."""


def pack(source: str, target: Path, size: int, on_bad: str) -> str:
    """Write the data set at `source` to `target`; return a sentence about what was written.

    `size` and `on_bad` are those of the config's `data`. Raises UserError when the file cannot be written.
    """
    data = sets.open_set(Data(set=source, size=size, on_bad=on_bad, cache=0))
    part = target.with_name(target.name + ".part")
    try:
        with h5py.File(part, "w", locking=False) as file:
            file.attrs["classes"] = data.classes
            counts = {name: _pack_part(data, name, file.create_group(name)) for name in data.sources}
        os.replace(part, target)
    except OSError as error:
        raise UserError(f"pack: {target} cannot be written ({error})") from None
    finally:
        part.unlink(missing_ok=True)
    images = " and ".join(f"{count} {name} images" for name, count in counts.items())
    shape = "x".join(map(str, data.sources["train"].shape))
    return f"{target}: {images} of {shape}, {data.classes} classes; {len(data.bad())} bad ones left out"


def _pack_part(data: DataSet, name: str, group: h5py.Group) -> int:
    """Write the part `name` of `data` into `group`; return the number of images written."""
    source = data.sources[name]
    rows = min(max(1, CHUNK_BYTES // source.image_bytes), len(source))
    # Features are one row each, as in the files that they were read from.
    shape = source.shape[:1] if source.shape[1:] == (1, 1) else source.shape
    sizes = (len(source), *shape)
    images = group.create_dataset("images", sizes, source.dtype, maxshape=(None, *shape), chunks=(rows, *shape))
    labels = []
    written = 0
    step = max(1, BLOCK_BYTES // source.image_bytes)
    with tqdm(desc=name, total=len(source), unit=" images", disable=None) as bar:
        for first in range(0, len(source), step):
            wanted = np.arange(first, min(first + step, len(source)))
            _, pixels, more = data.read_source(name, wanted)
            images[written : written + len(pixels)] = pixels.reshape(len(pixels), *shape)
            labels.append(more)
            written += len(pixels)
            bar.update(len(wanted))
    images.resize(written, axis=0)
    group["labels"] = np.concatenate(labels)
    return written
