"""Evaluate the final weights of a run, in one process."""

from pathlib import Path

import numpy as np

from adam_mpi import config
from adam_mpi.data.sets import DataSet, open_set
from adam_mpi.errors import UserError
from adam_mpi.model import parameters
from adam_mpi.model.context import Context
from adam_mpi.model.engine.context import EngineContext
from adam_mpi.model.network import Network
from adam_mpi.server import store
from adam_mpi.start import model


def evaluate(run: Path) -> str:
    """A line for each part of the data that was not trained on."""
    if not (run / "weights.h5").exists():
        raise UserError(f"{run}: no weights.h5; give the directory of a finished run")
    settings = config.load(run / "config.toml")
    data = open_set(settings.data)
    shapes = model(settings, data.description)
    weights = store.read_weights(run / "weights.h5", parameters.tensors(shapes))
    context = Network(shapes, settings.train.batch, settings.run.seed, engine=settings.kernels.engine).context()
    return "\n".join(_line(part, data, context, weights, settings.train.batch) for part in ("validation", "test"))


def _line(part: str, data: DataSet, context: Context | EngineContext, weights: np.ndarray, batch: int) -> str:
    count, loss, correct = getattr(data.description, part), 0.0, 0
    for first in range(0, count, batch):
        pixels, labels = data.read(part, np.arange(first, min(first + batch, count)))
        more = context.evaluate(weights, pixels, labels)
        loss, correct = loss + more[0], correct + more[1]
    return f"{part}: accuracy {correct / max(count, 1):.4f}, loss {loss / max(count, 1):.4f}, {count} images"
