"""Evaluate on strips: all ranks together hold one replica of a network, each its strip; no servers, no data ranks."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file
from adam_mpi.cluster.layout import Layout, Place
from adam_mpi.cluster.world import World
from adam_mpi.config import Config
from adam_mpi.data.batch_loader import LoadedBatch
from adam_mpi.data.sets import Description
from adam_mpi.model import parameters
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.partition import Partition, partition
from adam_mpi.planning.plan import network
from adam_mpi.runtime import compile
from adam_mpi.sharding.batches import image_batch
from adam_mpi.sharding.shards import Spans
from adam_mpi.worker import link
from adam_mpi.worker.flow import Flow
from adam_mpi.worker.link import Link


class Evaluation:
    """A replica that all ranks evaluate the same blocks of at most `images` images on; collective."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        config: Config,
        description: Description,
        shapes: tuple[LayerShape, ...],
        file: Path,
        group: str,
    ) -> None:
        """Cut the network into a strip for each rank of `comm`, and read its weights, those in `group`, from `file`."""
        cut = _cut(shapes, comm.size)
        # Injected faults were meant for training.
        config.inject.faults = []
        self.world = World(comm, config, arrange)
        self.strip = cut.strips[comm.rank]
        net = network(config, description, self.strip.shapes, strip=self.strip)
        compile.compile_once(self.world, net)
        self.weights = self._read(file, shapes, group)
        self.images = net.images
        self.number = 0
        context = net.strip_context()
        no_gradient = np.zeros(0, np.float32)
        self.flow = Flow([context], [no_gradient], self.world.injector)
        self.link = Link(self.world, link.plan_channels(cut, 1, context.room))
        self.flow.attach(self.link)
        self.flow.start(1)

    def _read(self, file: Path, shapes: tuple[LayerShape, ...], group: str) -> np.ndarray:
        """Return the weights of this strip to evaluate with; those of other strips are not read."""
        spans = [(piece.start, piece.start + piece.size) for piece in self.strip.pieces]
        weights = Spans(spans)
        for start, values in model_file.model_pieces(file, parameters.tensors(shapes), group, spans):
            weights.put(start, values.reshape(-1))
        return weights.flat

    def evaluate(self, block: LoadedBatch) -> tuple[tuple[float, int], np.ndarray]:
        """Return (sum of losses of `block`, number of correct images) of all strips, and the network's outputs."""
        first, last = self.strip.columns
        pixels = np.ascontiguousarray(block.pixels[..., first:last])
        batch = image_batch(self.number, block.ids, block.labels, pixels)
        self._wait(lambda: self.flow.takes(self.number))
        self.flow.begin(self.number, batch, None, self.weights, training=False)
        self._wait(self._landed)
        flight = self.flow.landed.popleft()
        context = self.flow.contexts[flight.context]
        result = context.result, context.outputs_of(len(block.ids)).copy()
        self.flow.release_flight(flight)
        self.number += 1
        return result

    def _landed(self) -> bool:
        """Step the flow of the strip; return whether the evaluated block is through all layers."""
        self.flow.step()
        return bool(self.flow.landed)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, for other strips that evaluate the block."""
        self.world.wait(done, f"other strips with block {self.number}", self.world.config.cluster.seconds)

    def close(self) -> None:
        """Stop the threads of the evaluating strip, and free the exchange window; collective."""
        self.flow.end_threads()
        self.world.finish()
        self.link.window.free()


def arrange(hosts: Sequence[str], _: object) -> Layout:
    """Return the layout for an evaluation in which all ranks are the strips of one replica."""
    places = [Place(rank, host, ("worker",), 0, rank) for rank, host in enumerate(hosts)]
    return Layout(tuple(places), len(hosts))


def _cut(shapes: tuple[LayerShape, ...], ranks: int) -> Partition:
    """Return the network's partition into `ranks` strips to evaluate; raise UserError where it has too few columns."""
    try:
        return partition(shapes, ranks)
    except UserError as error:
        raise UserError(f"eval on {ranks} ranks, a strip for each: {error}") from None
