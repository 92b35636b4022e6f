"""Evaluate the weights of a run, a snapshot or a file, in one process or on ranks with a strip of the network each."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.base.log import format_bytes
from adam_mpi.checkpoint import model_file
from adam_mpi.checkpoint.hdf5_file import open_file
from adam_mpi.config import Config
from adam_mpi.data.batch_loader import BatchLoader, LoadedBatch
from adam_mpi.data.sets import DataSet, open_set
from adam_mpi.inference.trained import weights_file
from adam_mpi.model import parameters
from adam_mpi.model.layers import LayerShape
from adam_mpi.planning.plan import model, network
from adam_mpi.sharding.training_state import Phase

if TYPE_CHECKING:
    from mpi4py import MPI

PARTS = ("validation", "test")
Evaluator = Callable[[LoadedBatch], tuple[float, int]]
"""LoadedBatch -> sum of the losses, number of correct images."""


def evaluate_parts(path: Path) -> int:
    """Print a line for the validation part and for the test part of the data; return the exit code."""
    comm = _world()
    try:
        lines = _evaluate(comm, path)
    except UserError as error:
        # Every rank has the same error; one prints it.
        if comm is None or comm.rank == 0:
            print(f"adam_mpi: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        if comm is None:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        # Only a death reaches the ranks that wait for this one inside MPI.
        os.kill(os.getpid(), signal.SIGKILL)
    if comm is None or comm.rank == 0:
        print("\n".join(lines))
    return 0


def _world() -> "MPI.Intracomm | None":
    """Return the communicator of all ranks where there are several; a single process needs no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def _evaluate(comm: "MPI.Intracomm | None", path: Path) -> list[str]:
    """Return a line about each part of the data, from this process alone or together with the ranks of `comm`."""
    file = weights_file(path)
    with open_file(file, model_file.KIND) as opened:
        if "config" not in opened.attrs:
            raise UserError(f"{file}: does not describe its network; give a run or a snapshot")
        settings = config.from_toml(str(opened.attrs["config"]), str(file))
        group = "ema/" if "ema" in opened else ""
    data = open_set(settings.data)
    shapes = model(settings, data.description)
    loader = BatchLoader(data, settings.run.seed)
    if comm is None:
        evaluator = _alone(settings, data, shapes, file, group)
        return [_line(part, loader, evaluator, settings.train.batch) for part in PARTS]
    from adam_mpi.inference.strip_evaluation import Evaluation

    strips = Evaluation(comm, settings, data.description, shapes, file=file, group=group)
    lines = [_line(part, loader, strips.evaluate, strips.images) for part in PARTS]
    strips.close()
    return lines


def _alone(settings: Config, data: DataSet, shapes: tuple[LayerShape, ...], file: Path, group: str) -> Evaluator:
    """Return what evaluates blocks in this process; raise UserError if the weights exceed layout.memory."""
    limit = settings.layout.memory
    size = 4 * parameters.total(shapes)
    if limit and size > limit:
        raise UserError(
            f"{file}: {format_bytes(size)} of weights, layout.memory = {format_bytes(limit)}; evaluate on several "
            "ranks: "
            f"mpirun -n RANKS python -m adam_mpi eval {file}"
        )
    weights = model_file.read_model(file, parameters.tensors(shapes), group)
    context = network(settings, data.description, shapes).context()
    return lambda block: context.evaluate(weights, block.pixels, block.labels)


def _line(part: str, loader: BatchLoader, evaluator: Evaluator, images: int) -> str:
    """Return accuracy and loss of one part of the data as text; blocks have `images` images at most."""
    wanted = getattr(loader.data.description, part)
    count = 0
    loss = 0.0
    correct = 0
    for first in range(0, wanted, images):
        block = loader.prepare(Phase(0, part, 0), np.arange(first, min(first + images, wanted)))
        block_loss, block_correct = evaluator(block)
        count += len(block.ids)
        loss += block_loss
        correct += block_correct
    return f"{part}: accuracy {correct / max(count, 1):.4f}, loss {loss / max(count, 1):.4f}, {count} images"
