"""First weights of the comparison with DDP: drawn by the rule of either side, for the one that begins with them."""

from pathlib import Path
from typing import Any

import numpy as np
from _models import MODELS, in_torch

from adam_mpi.config import Config
from adam_mpi.inference.import_weights import import_weights
from adam_mpi.model import parameters

SHAPES = MODELS["mnist"].shapes


def module(first: str, seed: int) -> Any:
    """For PyTorch."""
    import torch

    torch.manual_seed(seed)
    made = in_torch(SHAPES)
    if first == "adam_mpi":
        drawn = parameters.views(parameters.initial(SHAPES, seed), parameters.tensors(SHAPES))
        made.load_state_dict(
            {name: torch.from_numpy(values) for name, values in zip(made.state_dict(), drawn.values(), strict=True)}
        )
    return made


def settings(first: str, seed: int, config: Config, folder: Path) -> list[str]:
    """For adam_mpi, which needs nothing to draw its own."""
    if first == "adam_mpi":
        return []
    drawn = {name: values.numpy() for name, values in module(first, seed).state_dict().items()}
    np.savez(folder / "first.npz", **drawn)
    import_weights(folder / "first.npz", config, folder / "first.h5")
    return [f"model.weights={folder / 'first.h5'}"]
