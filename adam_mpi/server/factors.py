"""Factor pushes: activations and errors of a dense layer travel, and the server multiplies. The plan of it is pure.

The gradient of a weight matrix over n images is (outputs x n) (n x inputs), errors times activations: n * (inputs +
outputs) numbers instead of inputs * outputs. A server gets all activations, and the errors of the rows it holds:

    body = activations (n x inputs) | errors (n x rows) | gradient of the biases it holds
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adam_mpi.model.parameters import Tensor
from adam_mpi.server.shards import Shard


@dataclass(frozen=True)
class Matrix:
    """Where a dense layer's weights lie in the flat vector; its biases follow them."""

    offset: int
    inputs: int
    outputs: int

    @property
    def biases(self) -> int:
        return self.offset + self.inputs * self.outputs

    def rows(self, shard: Shard) -> tuple[int, int]:
        """Rows of weights in a shard."""
        first, last = (min(edge, self.biases) - self.offset for edge in (shard.start, shard.stop))
        return first // self.inputs, last // self.inputs

    def bias_range(self, shard: Shard) -> tuple[int, int]:
        """Biases in a shard, as places in the flat vector."""
        return max(shard.start, self.biases), max(shard.stop, self.biases)


@dataclass(frozen=True)
class FactorPlan:
    """What one server gets of a layer's factors."""

    matrix: Matrix
    shards: tuple[Shard, ...]

    @cached_property
    def rows(self) -> int:
        return sum(last - first for first, last in map(self.matrix.rows, self.shards))

    @cached_property
    def biases(self) -> int:
        return sum(last - first for first, last in map(self.matrix.bias_range, self.shards))

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Shard index -> rows and biases that come before its own in a message."""
        places, row, bias = {}, 0, 0
        for shard in self.shards:
            places[shard.index] = row, bias
            row += self.matrix.rows(shard)[1] - self.matrix.rows(shard)[0]
            bias += self.matrix.bias_range(shard)[1] - self.matrix.bias_range(shard)[0]
        return places

    def words(self, images: int) -> int:
        return images * (self.matrix.inputs + self.rows) + self.biases

    def images(self, words: int) -> int:
        """How many images fit so many words."""
        return (words - self.biases) // (self.matrix.inputs + self.rows)

    def write(self, body: np.ndarray, activations: np.ndarray, errors: np.ndarray, gradient: np.ndarray) -> int:
        """Write the factors of some images; `gradient` is the flat vector, for the biases. Returns the words used."""
        images, inputs = activations.shape
        floats = body[: self.words(images)].view(np.float32)
        floats[: images * inputs].reshape(images, inputs)[...] = activations
        end = images * (inputs + self.rows)
        held = floats[images * inputs : end].reshape(images, self.rows)
        for shard in self.shards:
            (row, bias), (first, last) = self.places[shard.index], self.matrix.rows(shard)
            held[:, row : row + last - first] = errors[:, first:last]
            low, high = self.matrix.bias_range(shard)
            floats[end + bias : end + bias + high - low] = gradient[low:high]
        return floats.size

    def multiply(self, body: np.ndarray, images: int, shard: Shard, out: np.ndarray) -> None:
        """The gradient of one shard, from the body of a message (as float32)."""
        inputs, rows = self.matrix.inputs, self.rows
        activations = body[: images * inputs].reshape(images, inputs)
        errors = body[images * inputs : images * (inputs + rows)].reshape(images, rows)
        row, bias = self.places[shard.index]
        first, last = self.matrix.rows(shard)
        size = (last - first) * inputs
        np.dot(errors[:, row : row + last - first].T, activations, out=out[:size].reshape(-1, inputs))
        start = images * (inputs + rows) + bias
        out[size : shard.size] = body[start : start + shard.size - size]


def matrices(tensors: Sequence[Tensor]) -> dict[str, Matrix]:
    """The dense layers."""
    return {t.layer: Matrix(t.offset, t.shape[1], t.shape[0]) for t in tensors if len(t.shape) == 2}


def plans(matrix: Matrix, layer: str, held: Mapping[int, Sequence[Shard]]) -> dict[int, FactorPlan] | None:
    """What each server gets; None where shards cut through rows."""
    result = {}
    for server, shards in held.items():
        mine = tuple(shard for shard in shards if shard.layer == layer)
        if any((min(shard.start, matrix.biases) - matrix.offset) % matrix.inputs for shard in mine):
            return None
        if mine:
            result[server] = FactorPlan(matrix, mine)
    return result
