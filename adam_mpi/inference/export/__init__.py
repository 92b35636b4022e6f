"""Export a trained network for other programs; each format is a module with `write(model, path)`."""

import importlib
from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.inference.trained import Trained

FORMATS = ("onnx", "safetensors", "npz")


def export(model: Trained, path: Path, kind: str | None) -> str:
    """Export `model` to `path` in the format `kind`, or in that of the file's ending; return a line about the file.

    Raises UserError for a format that is unknown or whose library is not installed.
    """
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


def named_tensors(model: Trained) -> dict[str, np.ndarray]:
    """Return the weights to export of `model` by PyTorch's names for them, such as `conv1.weight`."""
    return {name.replace("/", "."): values for name, values in model.tensors.items()}
