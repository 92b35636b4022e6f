"""Evaluate the final weights of a run: in one process, or on several ranks, each with a strip of the network."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi import config
from adam_mpi.config import Config
from adam_mpi.data.course import Phase
from adam_mpi.data.preparation import Block, Preparation
from adam_mpi.data.sets import DataSet, open_set
from adam_mpi.durable import model as model_file
from adam_mpi.errors import UserError
from adam_mpi.model import parameters
from adam_mpi.model.layers import LayerShape
from adam_mpi.plan import amount, model, network

PARTS = ("validation", "test")
Judge = Callable[[Block], tuple[float, int]]


def evaluate(run: Path) -> int:
    """The command: prints a line for each part of the data that was not trained on; returns the exit code."""
    comm = _world()
    try:
        lines = _evaluate(comm, run)
    except UserError as error:
        # Every rank has the same error; one tells it.
        if comm is None or comm.rank == 0:
            print(f"adam_mpi: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        if comm is None:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        # Only a death reaches those who wait for us inside MPI.
        os.kill(os.getpid(), signal.SIGKILL)
    if comm is None or comm.rank == 0:
        print("\n".join(lines))
    return 0


def _world() -> Any:
    """The ranks, where there are several; one process needs no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def _evaluate(comm: Any, run: Path) -> list[str]:
    file = run / "weights.h5"
    if not file.exists():
        raise UserError(f"{run}: no weights.h5; give the directory of a finished run")
    settings = config.load(run / "config.toml")
    data = open_set(settings.data)
    shapes = model(settings, data.description)
    preparation = Preparation(data, settings.run.seed)
    if comm is None:
        judge = _alone(settings, data, shapes, file)
        return [_line(part, preparation, judge, settings.train.batch) for part in PARTS]
    from adam_mpi.worker.evaluation import Evaluation

    strips = Evaluation(comm, settings, data.description, shapes, file)
    lines = [_line(part, preparation, strips.judge, strips.images) for part in PARTS]
    strips.end()
    return lines


def _alone(settings: Config, data: DataSet, shapes: tuple[LayerShape, ...], file: Path) -> Judge:
    limit, size = settings.layout.memory, 4 * parameters.total(shapes)
    if limit and size > limit:
        raise UserError(
            f"{file}: {amount(size)} of weights, layout.memory = {amount(limit)}; evaluate on several ranks: "
            f"mpirun -n RANKS python -m adam_mpi eval {file.parent}"
        )
    weights = model_file.read(file, parameters.tensors(shapes))
    context = network(settings, data.description, shapes).context()
    return lambda block: context.evaluate(weights, block.pixels, block.labels)


def _line(part: str, preparation: Preparation, judge: Judge, images: int) -> str:
    wanted, count, loss, correct = getattr(preparation.data.description, part), 0, 0.0, 0
    for first in range(0, wanted, images):
        block = preparation.prepare(Phase(0, part, 0), np.arange(first, min(first + images, wanted)))
        more = judge(block)
        count, loss, correct = count + len(block.ids), loss + more[0], correct + more[1]
    return f"{part}: accuracy {correct / max(count, 1):.4f}, loss {loss / max(count, 1):.4f}, {count} images"
