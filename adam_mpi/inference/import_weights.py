"""Import the weights of other programs; match their tensors to ours by name, or by shape if unambiguous."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file
from adam_mpi.config import Config, to_toml
from adam_mpi.data.batch_loader import BatchLoader
from adam_mpi.data.inputs import Inputs
from adam_mpi.data.sets import open_set
from adam_mpi.inference.trained import infer_shapes
from adam_mpi.model import parameters
from adam_mpi.model.parameters import Tensor

# The last part of the names that a layer's tensors have in PyTorch and its kin.
KINDS = ("weight", "bias")
Shape = tuple[int, ...]
Layer = dict[str, tuple[str, Shape]]
"""Name and shape of each tensor of a layer, by kind."""
Shapes = frozenset[tuple[str, Shape]]


def match(tensors: Sequence[Tensor], given: Mapping[str, Shape], path: Path) -> dict[str, str]:
    """Return the imported tensor for each of our tensors; raise a UserError unless every one, of both, has one place.

    Tensors with our names are matched by them. Else layers, `NAME.weight` and `NAME.bias` together, are matched by
    their shapes; where several have the same ones, numbers in their names give the order. Tensors whose names only
    number them are matched one by one.
    """
    names = {tensor.name: tensor.name.replace("/", ".") for tensor in tensors}
    ours = {names[tensor.name]: tensor.shape for tensor in tensors}
    if set(ours) == set(given):
        _check_shapes(ours, given, path)
        return names
    named = any(name.rpartition(".")[2] in KINDS for name in given)
    if not named and len({re.sub(r"\d+", "", name) for name in given}) > 1:
        raise UserError(
            f"{path}: {', '.join(given)}: not our names, and none ends in weight or bias: shapes alone would decide; "
            f"rename them to {', '.join(ours)}"
        )
    own = _group_by_layer(ours, named)
    others = _group_by_layer(given, named)
    chosen: dict[str, str] = {}
    for shapes in dict.fromkeys(map(_shapes_by_kind, own.values())):
        for layer, other in _pair_layers(_layers_alike(own, shapes), _layers_alike(others, shapes), named, path):
            chosen |= {name: other[kind][0] for kind, (name, _) in layer.items()}
    if left := [name for name in given if name not in chosen.values()]:
        raise UserError(
            f"{path}: {', '.join(left)} fit nowhere; model.layers has no layers for them: change it, or import a "
            "network that has none (batch normalization can be folded into the layer before it)"
        )
    return {tensor.name: chosen[names[tensor.name]] for tensor in tensors}


def _check_shapes(ours: Mapping[str, Shape], given: Mapping[str, Shape], path: Path) -> None:
    """Raise UserError for the first tensor to import in `given` that has another shape than ours."""
    for name, shape in ours.items():
        if given[name] != shape:
            raise UserError(f"{path}: {name} is {_shape_text(given[name])}, but {_shape_text(shape)} in model.layers")


def _group_by_layer(tensors: Mapping[str, Shape], named: bool) -> dict[str, Layer]:
    """Group imported tensors by layer; each is a layer of its own where names say nothing (not `named`)."""
    layers: dict[str, Layer] = {}
    for name, shape in tensors.items():
        layer, _, kind = name.rpartition(".") if named else (name, "", "tensor")
        layers.setdefault(layer, {})[kind] = name, shape
    return layers


def _shapes_by_kind(layer: Layer) -> Shapes:
    """Return the shapes of an imported layer's tensors by kind, without names."""
    return frozenset((kind, shape) for kind, (_, shape) in layer.items())


def _layers_alike(layers: Mapping[str, Layer], shapes: Shapes) -> dict[str, Layer]:
    """Return those imported `layers` that have `shapes`."""
    return {name: layer for name, layer in layers.items() if _shapes_by_kind(layer) == shapes}


def _pair_layers(
    own: Mapping[str, Layer], others: Mapping[str, Layer], named: bool, path: Path
) -> list[tuple[Layer, Layer]]:
    """Pair imported layers of equal shapes with ours; raise UserError where that is ambiguous."""
    wanted_shapes = " and ".join(
        f"{kind} {_shape_text(shape)}" for kind, (_, shape) in next(iter(own.values())).items()
    )
    if len(own) != len(others):
        held = ", ".join(others) or "nothing"
        raise UserError(f"{path}: {held} with {wanted_shapes}, but {', '.join(own)} of model.layers need it")
    numbered = named and len({re.sub(r"\d+", "0", name) for name in others}) == 1
    if len(others) > 1 and not numbered:
        wanted = ", ".join(name for layer in own.values() for name, _ in layer.values())
        raise UserError(
            f"{path}: {', '.join(others)} all have {wanted_shapes}: their order is unknown; rename them to {wanted}"
        )
    return list(zip(own.values(), (others[name] for name in sorted(others, key=natural)), strict=True))


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names of imported tensors in which numbers count as numbers."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _shape_text(shape: Shape) -> str:
    """Return the shape of an imported tensor as text, such as "4x16"."""
    return "x".join(map(str, shape)) or "one number"


def import_weights(path: Path, config: Config, output: Path) -> str:
    """Write a file of weights for the configured model; return the lines that say which tensor has become which."""
    inputs = Inputs.of(BatchLoader(open_set(config.data), config.run.seed))
    tensors = parameters.tensors(infer_shapes(config, inputs))
    given = read_tensors(path)
    chosen = match(tensors, {name: values.shape for name, values in given.items()}, path)
    flat = np.zeros(sum(tensor.size for tensor in tensors), np.float32)
    for name, view in parameters.views(flat, tensors).items():
        view[...] = given[chosen[name]]
    model_file.write_model(output, flat, tensors, to_toml(config), inputs.to_json())
    rows = [f"  {name:16} <- {other}" for name, other in chosen.items()]
    return "\n".join([*rows, f"{output}: start training from it with --set model.weights={output}"])


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file to import, in the order of layers as far as it has one; raise UserError if not."""
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
    """Return the tensors to import of a safetensors file."""
    from safetensors.numpy import load_file

    # The file has its tensors in the order of characters, in which 10 comes before 2.
    return dict(sorted(load_file(path).items(), key=lambda item: natural(item[0])))


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors to import of an npz file."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files if file[name].dtype.kind == "f"}


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors to import of a file that PyTorch has written."""
    import torch

    # Only tensors and plain containers are read: a file cannot run code.
    held = torch.load(path, map_location="cpu", weights_only=True)
    held = held.get("state_dict", held) if isinstance(held, dict) else held
    if not isinstance(held, dict) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise UserError(f"{path}: not a state dict; save one: torch.save(model.state_dict(), FILE)")
    return {name: value.float().numpy() for name, value in held.items() if value.is_floating_point()}
