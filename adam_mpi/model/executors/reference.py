"""Compute a graph with numpy: slow, exact to the precision asked for, and made of the operators' reference rules."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike

from adam_mpi.base.errors import UserError
from adam_mpi.model import ops  # noqa: F401
from adam_mpi.model.graph import Graph, Node, Value, shape_text
from adam_mpi.model.kernels.activations_and_loss import image_keys
from adam_mpi.model.ops.operator import Run
from adam_mpi.model.passes.gradient import differentiate
from adam_mpi.model.passes.simplify import simplify

Feed = Mapping[str, np.ndarray]
TYPES: dict[str, np.dtype] = {"integer": np.dtype(np.int64), "byte": np.dtype(np.uint8)}


class ReferenceExecutor:
    """Trains and evaluates `graph` in precision `dtype`; `seed` is that of its random numbers.

    Weights and gradients are flat vectors. `feed` has an array per input of the graph, samples first.
    """

    def __init__(self, graph: Graph, seed: int = 0, dtype: DTypeLike = np.float32) -> None:
        self.graph = simplify(graph)
        self.training = simplify(differentiate(graph)) if graph.losses else self.graph
        self.seed = seed
        self.dtype = np.dtype(dtype)
        self.outputs: list[np.ndarray] = []
        """Outputs of the last batch."""

    def train(
        self,
        weights: np.ndarray,
        gradient: np.ndarray,
        feed: Feed,
        ids: np.ndarray,
        epoch: int = 0,
        overwrite: bool = False,
    ) -> dict[str, float]:
        """Add the gradient of the losses, summed over samples, to `gradient`, or overwrite it; return the sums.

        `ids` number the samples: with `epoch` they are what random numbers depend on.
        """
        if overwrite:
            gradient[:] = 0
        keys = np.zeros(len(ids), np.uint64)
        image_keys(self.seed, epoch, np.asarray(ids, np.int64), keys)
        run = Run(True, keys, self.dtype)
        graph = self.training
        arrays = self._compute(graph, weights, feed, run, [*graph.wanted])
        for parameter, value in graph.gradients:
            start = graph.offsets[parameter]
            gradient[start : start + arrays[value].size] += arrays[value].ravel()
        self.outputs = [arrays[name] for name in graph.outputs]
        return sums(graph, arrays)

    def evaluate(self, weights: np.ndarray, feed: Feed) -> dict[str, float]:
        """Return the sums over the samples, as in `train`, computed as outside training."""
        run = Run(False, None, self.dtype)
        arrays = self._compute(self.graph, weights, feed, run, [*self.graph.wanted])
        self.outputs = [arrays[name] for name in self.graph.outputs]
        return sums(self.graph, arrays)

    def run(self, weights: np.ndarray, feed: Feed, fetch: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the values named in `fetch`, samples first, computed as outside training."""
        for name in fetch:
            if name not in self.graph.values:
                raise UserError(f"the model has no value {name!r}; it has {', '.join(self.graph.values)}")
        return self._compute(self.graph, weights, feed, Run(False, None, self.dtype), fetch)

    def _compute(
        self, graph: Graph, weights: np.ndarray, feed: Feed, run: Run, fetch: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Return the values in `fetch`, by the nodes that they depend on."""
        needed = graph.ancestors(fetch)
        read = {name for node in graph.nodes if node.name in needed for name in node.inputs} | set(fetch)
        arrays = self._parameters(graph, weights)
        arrays |= {value.name: fed(value, feed, self.dtype) for value in graph.inputs if value.name in read}
        for node in graph.nodes:
            if node.name in needed:
                _apply(node, arrays, run)
        return {name: arrays[name] for name in fetch}

    def _parameters(self, graph: Graph, weights: np.ndarray) -> dict[str, np.ndarray]:
        if len(weights) != graph.size:
            raise UserError(f"{len(weights)} weights are given; the model has {graph.size}")
        return {
            p.name: weights[start : start + p.size].reshape(p.shape).astype(self.dtype, copy=False)
            for p, start in zip(graph.parameters, graph.offsets.values(), strict=True)
        }


def fed(value: Value, feed: Feed, dtype: np.dtype) -> np.ndarray:
    """Return the array that is fed for input `value`, in its type; raise UserError if it is missing or misshaped."""
    if value.name not in feed:
        raise UserError(f"nothing is fed for input {value}; given are {', '.join(feed) or 'no fields'}")
    array = np.asarray(feed[value.name])
    if array.shape[1:] != value.shape:
        raise UserError(f"input {value} is fed samples of {shape_text(array.shape[1:])}")
    return array.astype(TYPES.get(value.dtype, dtype), copy=False)


def checked_feed(graph: Graph, feed: Feed, dtype: np.dtype) -> list[np.ndarray]:
    """Return one contiguous array per input of `graph`; raise UserError if they have different numbers of samples."""
    arrays = [np.ascontiguousarray(fed(value, feed, dtype)) for value in graph.inputs]
    if len({len(array) for array in arrays}) > 1:
        counts = ", ".join(f"{value.name}: {len(a)}" for value, a in zip(graph.inputs, arrays, strict=True))
        raise UserError(f"inputs are fed different numbers of samples ({counts}); feed equally many")
    return arrays


def _apply(node: Node, arrays: dict[str, np.ndarray], run: Run) -> None:
    made = node.op.reference(run, *(arrays[name] for name in node.inputs))
    for value, array in zip(node.outputs, made, strict=True):
        arrays[value.name] = array


def sums(graph: Graph, arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the weighted losses as "loss", and the metrics by name, summed over samples."""
    found = {"loss": float(sum(loss.weight * arrays[loss.value].sum(dtype=np.float64) for loss in graph.losses))}
    return found | {name: float(arrays[value].sum(dtype=np.float64)) for name, value in graph.sums}
