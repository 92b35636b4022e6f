"""Write safetensors: the tensors by the names of PyTorch, configuration and inputs as metadata."""

from pathlib import Path

from safetensors.numpy import save_file

from adam_mpi.config import to_toml
from adam_mpi.inference.export import named_tensors
from adam_mpi.inference.trained import Trained


def write(model: Trained, path: Path) -> None:
    """Export `model` to `path` as a safetensors file."""
    save_file(named_tensors(model), path, {"config": to_toml(model.config), "inputs": model.inputs.to_json()})
