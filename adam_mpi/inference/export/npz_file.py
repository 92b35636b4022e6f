"""Write NumPy's npz: an array for each tensor, the configuration and the inputs beside them as text."""

from pathlib import Path

import numpy as np

from adam_mpi.config import to_toml
from adam_mpi.inference.export import named_tensors
from adam_mpi.inference.trained import Trained


def write(model: Trained, path: Path) -> None:
    """Export `model` to `path` as an npz file."""
    texts = {"config": np.array(to_toml(model.config)), "inputs": np.array(model.inputs.to_json())}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **named_tensors(model), **texts)
