"""Evaluate the final weights of a run, in one process."""

from pathlib import Path

import numpy as np

from adam_mpi import config
from adam_mpi.data.course import Phase
from adam_mpi.data.preparation import Preparation
from adam_mpi.data.sets import open_set
from adam_mpi.durable import model as model_file
from adam_mpi.errors import UserError
from adam_mpi.model import parameters
from adam_mpi.model.context import Context
from adam_mpi.model.engine.context import EngineContext
from adam_mpi.plan import model, network


def evaluate(run: Path) -> str:
    """A line for each part of the data that was not trained on."""
    if not (run / "weights.h5").exists():
        raise UserError(f"{run}: no weights.h5; give the directory of a finished run")
    settings = config.load(run / "config.toml")
    data = open_set(settings.data)
    shapes = model(settings, data.description)
    weights = model_file.read(run / "weights.h5", parameters.tensors(shapes))
    context = network(settings, data.description, shapes).context()
    preparation = Preparation(data, settings.run.seed)
    batch = settings.train.batch
    return "\n".join(_line(part, preparation, context, weights, batch) for part in ("validation", "test"))


def _line(
    part: str, preparation: Preparation, context: Context | EngineContext, weights: np.ndarray, batch: int
) -> str:
    wanted, count, loss, correct = getattr(preparation.data.description, part), 0, 0.0, 0
    for first in range(0, wanted, batch):
        block = preparation.prepare(Phase(0, part, 0), np.arange(first, min(first + batch, wanted)))
        more = context.evaluate(weights, block.pixels, block.labels)
        count, loss, correct = count + len(block.ids), loss + more[0], correct + more[1]
    return f"{part}: accuracy {correct / max(count, 1):.4f}, loss {loss / max(count, 1):.4f}, {count} images"
