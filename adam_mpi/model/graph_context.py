"""Compute batches of images on a graph, as contexts of stacks do: one thread at a time may use a context."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import DTypeLike

from adam_mpi.model.executors.generated import GeneratedExecutor
from adam_mpi.model.executors.reference import ReferenceExecutor
from adam_mpi.model.graph_layers import GraphLayers

CORRECT = "correct"
"""The metric that counts right classes, if the graph has it."""


class GraphContext:
    """Trains or evaluates blocks of up to `images` images by the generated engine, or by reference kernels."""

    def __init__(
        self, layers: GraphLayers, images: int, seed: int, dtype: DTypeLike = np.float32, generated: bool = False
    ) -> None:
        self.layers = layers
        self.executor: GeneratedExecutor | ReferenceExecutor
        if generated:
            self.executor = GeneratedExecutor(layers.graph, images, seed)
        else:
            self.executor = ReferenceExecutor(layers.graph, seed, dtype)

    def train(
        self,
        weights: np.ndarray,
        gradient: np.ndarray,
        pixels: np.ndarray,
        labels: np.ndarray,
        ids: np.ndarray,
        epoch: int,
        overwrite: bool = False,
    ) -> tuple[float, int]:
        """Add the sum of the block's gradients to `gradient`, or overwrite it; return loss sum and number correct."""
        feed = self._feed(pixels, labels)
        return _result(self.executor.train(weights, gradient, feed, ids, epoch, overwrite))

    def evaluate(self, weights: np.ndarray, pixels: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
        """Return the loss sum and the number correct, as outside training."""
        return _result(self.executor.evaluate(weights, self._feed(pixels, labels)))

    def predict(self, weights: np.ndarray, pixels: np.ndarray) -> np.ndarray:
        """Return the first output of the graph, samples first."""
        name = self.layers.graph.outputs[0]
        return self.executor.run(weights, self._feed(pixels), [name])[name]

    def outputs_of(self, count: int) -> np.ndarray:
        """Return the first output of the graph for the `count` samples of the last batch."""
        return self.executor.outputs[0][:count].reshape(count, -1)

    def walk(self, weights: np.ndarray, pixels: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the outputs of the nodes that need no target, one after the other, without dropout."""
        yield from self.outputs(weights, pixels, [shape.name for shape in self.layers]).values()

    def outputs(self, weights: np.ndarray, pixels: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the values of nodes by name, without those that depend on a target."""
        graph = self.layers.graph
        fed = [self.layers.fed.name]
        return self.executor.run(weights, self._feed(pixels), [name for name in names if graph.needs_only(name, fed)])

    def _feed(self, pixels: np.ndarray, labels: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return what the graph is fed; data sets give every sample three axes, the graph may have fewer or more."""
        fed = self.layers.fed
        feed = {fed.name: pixels.reshape(len(pixels), *fed.shape)}
        if self.layers.target is not None and labels is not None:
            feed[self.layers.target.name] = labels
        return feed


def _result(sums: dict[str, float]) -> tuple[float, int]:
    """Return the loss, and how many classes are right."""
    return sums["loss"], round(sums.get(CORRECT, 0))
