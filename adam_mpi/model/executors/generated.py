"""Compute a graph by compiled kernels that are emitted for it: a whole step is one call without the GIL."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from adam_mpi.base import machine
from adam_mpi.model.engine import graph_program, jit
from adam_mpi.model.engine.engine_context import aligned
from adam_mpi.model.executors.reference import Feed, ReferenceExecutor, checked_feed
from adam_mpi.model.graph import Graph
from adam_mpi.model.kernels.activations_and_loss import image_keys
from adam_mpi.model.passes.training import training_graph


class GeneratedExecutor:
    """Trains and evaluates batches of up to `samples` samples of `graph` in float32; random numbers depend on `seed`.

    Weights and gradients are flat float32 vectors. One thread at a time may use an executor. `compiled`: without it the
    emitted source runs with numpy for vectors, as tests do.
    """

    def __init__(
        self, graph: Graph, samples: int, seed: int = 0, compiled: bool = True, lanes: int | None = None
    ) -> None:
        self.graph = graph
        self.seed = seed
        self.samples = samples
        self.program = graph_program.build(
            training_graph(graph), samples, lanes=lanes or machine.lanes(), registers=machine.registers()
        )
        self._run = self._function(compiled)
        self.memory = aligned(self.program.floats)
        self.keys = np.zeros(samples + self.program.lanes, np.uint64)
        self.sums = np.zeros(1 + len(graph.sums))
        self.outputs = [np.zeros((samples, *graph.values[name].shape), np.float32) for name in graph.outputs]
        self.unused = np.zeros(1, np.float32)

    def _function(self, compiled: bool) -> Callable:
        program = self.program
        if compiled:
            return jit.graph_run(program.text, program.lanes, program.signature)
        return jit.uncompiled(program.text, program.lanes)

    def train(
        self,
        weights: np.ndarray,
        gradient: np.ndarray,
        feed: Feed,
        ids: np.ndarray,
        epoch: int = 0,
        overwrite: bool = False,
    ) -> dict[str, float]:
        """Add the gradient of the losses, summed over samples, to `gradient`, or overwrite it; return the sums."""
        image_keys(self.seed, epoch, np.asarray(ids, np.int64), self.keys)
        return self._compute(True, overwrite, weights, gradient, feed)

    def evaluate(self, weights: np.ndarray, feed: Feed) -> dict[str, float]:
        """Return the sums over the samples, computed as outside training."""
        return self._compute(False, False, weights, self.unused, feed)

    def run(self, weights: np.ndarray, feed: Feed, fetch: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the values named in `fetch`: outputs of the graph by its program, others by reference kernels."""
        if not set(fetch) <= set(self.graph.outputs):
            return ReferenceExecutor(self.graph, self.seed).run(weights, feed, fetch)
        count = len(next(iter(feed.values())))
        missing = {v.name: np.zeros((count, *v.shape)) for v in self.graph.inputs if v.name not in feed}
        self._compute(False, False, weights, self.unused, {**feed, **missing})
        made = dict(zip(self.graph.outputs, self.outputs, strict=True))
        return {name: made[name][:count].copy() for name in fetch}

    def _compute(
        self, training: bool, overwrite: bool, weights: np.ndarray, gradient: np.ndarray, feed: Mapping
    ) -> dict[str, float]:
        arrays = checked_feed(self.graph, feed, np.dtype(np.float32))
        self.sums[:] = 0
        self._run(
            training,
            overwrite,
            np.require(weights, np.float32, ["C", "A", "W"]),
            gradient,
            self.memory,
            self.keys,
            self.program.tables,
            self.sums,
            len(arrays[0]),
            *(array.reshape(-1) for array in arrays),
            *(output.reshape(-1) for output in self.outputs),
        )
        names = ["loss", *(name for name, _ in self.graph.sums)]
        return dict(zip(names, self.sums.tolist(), strict=True))
