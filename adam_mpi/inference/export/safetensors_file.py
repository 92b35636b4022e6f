"""safetensors: the tensors under PyTorch's kind of names, configuration and inputs as metadata."""

from pathlib import Path

from safetensors.numpy import save_file

from adam_mpi.config import to_toml
from adam_mpi.inference.export import named
from adam_mpi.inference.trained import Trained


def write(model: Trained, path: Path) -> None:
    save_file(named(model), path, {"config": to_toml(model.config), "inputs": model.inputs.to_json()})
