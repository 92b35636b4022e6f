"""Evaluate the weights of a run, a snapshot or a file, in one process or on ranks with a strip of the network each."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
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
from adam_mpi.data.sets import DataSet, Description, describe_inputs, open_set
from adam_mpi.inference.trained import weights_file
from adam_mpi.model import parameters
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.metrics import MetricSet, class_rows, count_confusions
from adam_mpi.planning.plan import metrics, model, network
from adam_mpi.sharding.training_state import Phase

if TYPE_CHECKING:
    from mpi4py import MPI

PARTS = ("validation", "test")
Evaluator = Callable[[LoadedBatch], tuple[tuple[float, int], np.ndarray]]
"""LoadedBatch -> (sum of the losses, number of correct images), outputs of the network."""
MOST_CLASSES = 20
"""Classes up to which the confusion matrix is printed."""


def evaluate_parts(path: Path, classes: bool = False) -> int:
    """Print an evaluation line for the validation part and for the test part of the data; return the exit code.

    `classes`: print the accuracy of each class and the confusion matrix too.
    """
    comm = _common_communicator()
    try:
        lines = _evaluate(comm, path, classes)
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


def _common_communicator() -> "MPI.Intracomm | None":
    """Return the communicator of all evaluating ranks if there are several; a single process needs no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def _evaluate(comm: "MPI.Intracomm | None", path: Path, classes: bool) -> list[str]:
    """Return evaluation lines about each part of the data, from this process alone or with the ranks of `comm`."""
    file = weights_file(path)
    with open_file(file, model_file.KIND) as opened:
        if "config" not in opened.attrs:
            raise UserError(f"{file}: does not describe its network; give a run or a snapshot")
        settings = config.from_toml(str(opened.attrs["config"]), str(file))
        group = "ema/" if "ema" in opened else ""
    data = open_set(settings.data)
    description = describe_inputs(data)
    shapes = model(settings, description)
    scores = {part: Scores(part, metrics(settings, description), data, classes) for part in PARTS}
    loader = BatchLoader(data, settings.run.seed)
    if comm is None:
        evaluator = _evaluator_alone(settings, description, shapes, file, group)
        return [line for part in PARTS for line in _part_lines(scores[part], loader, evaluator, settings.train.batch)]
    from adam_mpi.inference.strip_evaluation import Evaluation

    strips = Evaluation(comm, settings, description, shapes, file=file, group=group)
    lines = [line for part in PARTS for line in _part_lines(scores[part], loader, strips.evaluate, strips.images)]
    strips.close()
    return lines


def _evaluator_alone(
    settings: Config, description: Description, shapes: tuple[LayerShape, ...], file: Path, group: str
) -> Evaluator:
    """Return what evaluates blocks of images in this process; raise UserError if weights exceed layout.memory."""
    limit = settings.layout.memory
    size = 4 * parameters.total(shapes)
    if limit and size > limit:
        raise UserError(
            f"{file}: {format_bytes(size)} of weights, layout.memory = {format_bytes(limit)}; evaluate on several "
            "ranks: "
            f"mpirun -n RANKS python -m adam_mpi eval {file}"
        )
    weights = model_file.read_model(file, parameters.tensors(shapes), group)
    context = network(settings, description, shapes).context()

    def evaluator(block: LoadedBatch) -> tuple[tuple[float, int], np.ndarray]:
        result = context.evaluate(weights, block.pixels, block.labels)
        return result, context.outputs_of(len(block.ids))

    return evaluator


class Scores:
    """The sums of all metrics over one part of the data and, where they are wanted, the errors by class."""

    def __init__(self, part: str, metrics: MetricSet, data: DataSet, classes: bool) -> None:
        """Begin to score an evaluation without images; `classes`: whether to count the errors by class."""
        self.part = part
        self.metrics = metrics
        self.sums = np.zeros(metrics.size(training=False))
        self.images = 0
        self.names = data.sources["train"].names or tuple(map(str, range(data.classes)))
        self.confusion = np.zeros((data.classes,) * 2, np.int64) if classes else None

    def add(self, result: tuple[float, int], outputs: np.ndarray, labels: np.ndarray) -> None:
        """Add an evaluated block of images, whose loss and number correct are `result`, to the scores."""
        self.sums += self.metrics.measure(result, lambda: outputs, labels, training=False)
        self.images += len(labels)
        if self.confusion is not None:
            count_confusions(outputs, labels, self.confusion)

    def lines(self) -> Iterator[str]:
        """Yield the evaluation's metrics and loss, the classes, and the confusion matrix where it is small."""
        figures = self.metrics.values(self.sums, self.images, self.images)
        *names, loss = [*self.metrics.names[1:], self.metrics.names[0]]
        shown = ", ".join(f"{name.replace('_', ' ')} {figures[name]:.4f}" for name in [*names, loss])
        yield f"{self.part}: {shown}, {self.images} images"
        if self.confusion is None:
            return
        for name, images, share, other in class_rows(self.confusion, self.names):
            yield f"  {name}: {share:.4f} of {images} images" + (f", most often taken for {other}" if other else "")
        if len(self.names) <= MOST_CLASSES:
            width = max(5, *(len(name) + 2 for name in self.names))
            yield "  class \\ predicted" + "".join(f"{name:>{width}}" for name in self.names)
            for name, row in zip(self.names, self.confusion, strict=True):
                yield f"  {name:<17}" + "".join(f"{count:>{width}}" for count in row)


def _part_lines(scores: Scores, loader: BatchLoader, evaluator: Evaluator, images: int) -> list[str]:
    """Return evaluation lines about the part of the data of `scores`; blocks have at most `images` images."""
    wanted = getattr(loader.data.description, scores.part)
    for first in range(0, wanted, images):
        block = loader.prepare(Phase(0, scores.part, 0), np.arange(first, min(first + images, wanted)))
        scores.add(*evaluator(block), block.labels)
    return list(scores.lines())
