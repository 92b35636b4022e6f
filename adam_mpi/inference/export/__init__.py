"""A trained network for other programs, one file per format: `write(model, path)`."""

import importlib
from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.inference.trained import Trained

FORMATS = ("onnx", "safetensors", "npz")


def export(model: Trained, path: Path, kind: str | None) -> str:
    """Write the network; its format is given, or the ending of the file's name says it."""
    kind = kind or path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise UserError(f"{path}: give --format {', '.join(FORMATS)}, or a file name that ends in one of them")
    try:
        writer = importlib.import_module(f"adam_mpi.inference.export.{kind}_file")
    except ImportError as error:
        raise UserError(f"{kind} needs {error.name}; install it: pip install 'adam-mpi[export]'") from None
    part = path.with_name(path.name + ".part")
    writer.write(model, part)
    part.replace(path)
    return f"{path}: {kind}, {len(model.weights):,} parameters, {path.stat().st_size / 1e6:.1f} MB"


def named(model: Trained) -> dict[str, np.ndarray]:
    """The weights under the names they would have as attributes of layers: `conv1.weight`."""
    return {name.replace("/", "."): values for name, values in model.tensors.items()}
