"""Import the weights of other programs: safetensors, npz, or a state dict that PyTorch saved."""

from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file
from adam_mpi.config import Config, to_toml
from adam_mpi.data.batch_loader import BatchLoader
from adam_mpi.data.inputs import Inputs
from adam_mpi.data.sets import open_set
from adam_mpi.inference.export.matching import match, natural
from adam_mpi.inference.trained import infer_shapes
from adam_mpi.model import parameters


def import_weights(path: Path, config: Config, output: Path) -> str:
    """Write a file of weights for the configured model; return the lines that say which tensor has become which."""
    inputs = Inputs.of(BatchLoader(open_set(config.data), config.run.seed))
    tensors = parameters.tensors(infer_shapes(config, inputs))
    given = read(path)
    chosen = match(tensors, {name: values.shape for name, values in given.items()}, path)
    flat = np.zeros(sum(tensor.size for tensor in tensors), np.float32)
    for name, view in parameters.views(flat, tensors).items():
        view[...] = given[chosen[name]]
    model_file.write(output, flat, tensors, to_toml(config), inputs.to_json())
    rows = [f"  {name:16} <- {other}" for name, other in chosen.items()]
    return "\n".join([*rows, f"{output}: start training from it with --set model.weights={output}"])


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, in the order of layers as far as the file has one; raise UserError if it cannot."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a .safetensors, .npz, .pt or .pth file")
    kinds = {".safetensors": _read_safetensors, ".npz": _read_npz, ".pt": _read_torch, ".pth": _read_torch}
    if path.suffix not in kinds:
        raise UserError(f"{path}: give a file that ends in {', '.join(kinds)}")
    try:
        return kinds[path.suffix](path)
    except ImportError as error:
        raise UserError(f"{path}: needs {error.name}; install it: pip install {error.name}") from None
    except UserError:
        raise
    except Exception as error:  # each library has errors of its own for damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: cannot be read as {path.suffix}: {reason}") from None


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    # The file has its tensors in the order of characters, in which 10 comes before 2.
    return dict(sorted(load_file(path).items(), key=lambda item: natural(item[0])))


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files if file[name].dtype.kind == "f"}


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    import torch

    # Only tensors and plain containers are read: a file cannot run code.
    held = torch.load(path, map_location="cpu", weights_only=True)
    held = held.get("state_dict", held) if isinstance(held, dict) else held
    if not isinstance(held, dict) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise UserError(f"{path}: not a state dict; save one: torch.save(model.state_dict(), FILE)")
    return {name: value.float().numpy() for name, value in held.items() if value.is_floating_point()}
