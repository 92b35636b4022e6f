"""`adam_mpi merge`: one plain HDF5 file of a snapshot, for readers that know nothing of us."""

from pathlib import Path

import h5py
import numpy as np

from adam_mpi.durable import model, snapshot
from adam_mpi.durable.files import new_file, open_file
from adam_mpi.errors import UserError


def merge(path: Path, output: Path) -> str:
    """Copy every tensor of a snapshot, or of a run's newest one, into one file."""
    folder = path if (path / snapshot.MANIFEST).exists() else newest(path)
    snapshot.check(folder)
    count = 0
    with open_file(folder / snapshot.MODEL, model.KIND) as source, new_file(output, model.KIND) as file:
        for key, value in source.attrs.items():
            file.attrs[key] = value

        def copy(name: str, item: object) -> None:
            nonlocal count
            if isinstance(item, h5py.Dataset):
                file[name] = item[()]
                count += item.dtype == np.float32

        source.visititems(copy)
    return f"{output}: {count} tensors of {folder.name}"


def newest(run: Path) -> Path:
    """The newest snapshot of a run that is whole."""
    for folder in sorted(run.glob("snapshots/[!.]*"), reverse=True):
        try:
            snapshot.check(folder)
            return folder
        except UserError:
            continue
    raise UserError(f"{run}: no whole snapshot; give the folder of a snapshot or of a run")
