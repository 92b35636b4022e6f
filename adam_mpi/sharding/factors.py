"""Factor pushes: activations and errors of a dense layer travel, and the server multiplies. The plan of it is pure.

The gradient of a weight matrix over n images is (outputs x n) (n x inputs), errors times activations: n * (inputs +
outputs) numbers instead of inputs * outputs. A server gets all activations, and the errors of the rows it holds:

    body = activations (n x inputs) | errors (n x rows) | gradient of the biases it holds

Activations and errors may travel as IEEE halves, filled up to a whole word; biases are always float32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adam_mpi.base import native
from adam_mpi.model.parameters import Tensor
from adam_mpi.sharding.codecs.float16 import LARGEST
from adam_mpi.sharding.shards import Shard


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
    half: bool = False
    """Whether activations and errors travel as halves."""

    @cached_property
    def rows(self) -> int:
        return _count(self.matrix.rows, self.shards)

    @cached_property
    def biases(self) -> int:
        return _count(self.matrix.bias_range, self.shards)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Shard index -> rows and biases that come before its own in a message."""
        places, row, bias = {}, 0, 0
        for shard in self.shards:
            places[shard.index] = row, bias
            row += _count(self.matrix.rows, [shard])
            bias += _count(self.matrix.bias_range, [shard])
        return places

    def words(self, images: int) -> int:
        return self._number_words(images) + self.biases

    def images(self, words: int) -> int:
        """How many images go into so many words: the same for all servers, so that a push is always cut alike."""
        matrix = self.matrix
        return (words - matrix.outputs) * (2 if self.half else 1) // (matrix.inputs + matrix.outputs)

    def write(self, body: np.ndarray, activations: np.ndarray, errors: np.ndarray, gradient: np.ndarray | None) -> int:
        """Write the factors of some images; `gradient` is the flat vector, for the biases. Returns the words used."""
        images, inputs = activations.shape
        end, words = self._number_words(images), self.words(images)
        body[end - 1 : words] = 0
        numbers = body[:end].view(np.float16 if self.half else np.float32)
        held = numbers[images * inputs : images * (inputs + self.rows)].reshape(images, self.rows)
        self._put(activations, numbers[: images * inputs].reshape(images, inputs))
        biases = body[end:words].view(np.float32)
        for shard in self.shards:
            (row, bias), (first, last) = self.places[shard.index], self.matrix.rows(shard)
            self._put(errors[:, first:last], held[:, row : row + last - first])
            low, high = self.matrix.bias_range(shard)
            if gradient is not None:
                biases[bias : bias + high - low] = gradient[low:high]
        return words

    def unpack(self, body: np.ndarray, images: int, out: np.ndarray) -> np.ndarray:
        """A body as float32: itself, or worked out in `out`."""
        if not self.half:
            return body.view(np.float32)
        count, end = images * (self.matrix.inputs + self.rows), self._number_words(images)
        out[:count] = body[:end].view(np.float16)[:count]
        out[count : count + self.biases] = body[end:].view(np.float32)
        return out[: count + self.biases]

    def multiply(self, body: np.ndarray, images: int, band: Sequence[Shard], out: np.ndarray) -> None:
        """The gradient of neighboring shards, from the body of a message as float32.

        One after the other they are rows, then biases: the same as one large shard.
        """
        activations, errors, biases = self._split(body, images, band)
        size = out.size - biases.size
        np.dot(errors.T, activations, out=out[:size].reshape(-1, self.matrix.inputs))
        out[size:] = biases

    def add_product(
        self, body: np.ndarray, images: int, band: Sequence[Shard], scale: float, weights: np.ndarray
    ) -> None:
        """Add the gradient of neighboring shards, times `scale`, to their weights in one go."""
        activations, errors, biases = self._split(body, images, band)
        size = weights.size - biases.size
        if size and images:
            native.add_product(errors, activations, scale, weights[:size].reshape(-1, self.matrix.inputs))
        weights[size:] += np.float32(scale) * biases

    def _split(self, body: np.ndarray, images: int, band: Sequence[Shard]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Activations, errors and the biases' gradient of neighboring shards, in a body as float32."""
        inputs, rows, end = self.matrix.inputs, self.rows, images * (self.matrix.inputs + self.rows)
        row, bias = self.places[band[0].index]
        errors = body[images * inputs : end].reshape(images, rows)[:, row : row + _count(self.matrix.rows, band)]
        biases = body[end + bias : end + bias + _count(self.matrix.bias_range, band)]
        return body[: images * inputs].reshape(images, inputs), errors, biases

    def _number_words(self, images: int) -> int:
        """Words of activations and errors."""
        numbers = images * (self.matrix.inputs + self.rows)
        return (numbers + 1) // 2 if self.half else numbers

    def _put(self, values: np.ndarray, out: np.ndarray) -> None:
        if self.half:
            np.clip(values, -LARGEST, LARGEST, out=out, casting="unsafe")
        else:
            out[...] = values


def _count(edges: Callable[[Shard], tuple[int, int]], shards: Sequence[Shard]) -> int:
    return sum(last - first for first, last in map(edges, shards))


def matrices(tensors: Sequence[Tensor]) -> dict[str, Matrix]:
    """The dense layers."""
    return {t.layer: Matrix(t.offset, t.shape[1], t.shape[0]) for t in tensors if len(t.shape) == 2}


def plans(
    matrix: Matrix, layer: str, held: Mapping[int, Sequence[Shard]], half: bool = False
) -> dict[int, FactorPlan] | None:
    """What each server gets; None where shards cut through rows."""
    result = {}
    for server, shards in held.items():
        mine = tuple(shard for shard in shards if shard.layer == layer)
        if any((min(shard.start, matrix.biases) - matrix.offset) % matrix.inputs for shard in mine):
            return None
        if mine:
            result[server] = FactorPlan(matrix, mine, half)
    return result
