"""Factor pushes: activations and errors of a dense layer are sent, and the server multiplies them. Pure.

The gradient of a weight matrix over n images is (outputs x n) (n x inputs), errors times activations: n * (inputs +
outputs) numbers instead of inputs * outputs. A server receives all activations, and the errors of the rows it holds:

    body = activations (n x inputs) | errors (n x rows) | gradient of the biases it holds

Activations and errors may be sent as IEEE halves, padded to a whole word; biases are always float32.
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
    """The place of a dense layer's weights in the flat vector; its biases follow them."""

    offset: int
    inputs: int
    outputs: int

    @property
    def biases(self) -> int:
        """Return where the biases begin in the flat vector."""
        return self.offset + self.inputs * self.outputs

    def rows(self, shard: Shard) -> tuple[int, int]:
        """Return (first, end) of the rows of weights in `shard`."""
        first, last = (min(edge, self.biases) - self.offset for edge in (shard.start, shard.stop))
        return first // self.inputs, last // self.inputs

    def bias_range(self, shard: Shard) -> tuple[int, int]:
        """Return (start, stop) of the biases in `shard`, in the flat vector."""
        return max(shard.start, self.biases), max(shard.stop, self.biases)


@dataclass(frozen=True)
class FactorPlan:
    """What one server receives of a layer's factors."""

    matrix: Matrix
    shards: tuple[Shard, ...]
    half: bool = False
    """Whether activations and errors are sent as halves."""

    @cached_property
    def rows(self) -> int:
        """Return how many rows of weights the server has."""
        return _count(self.matrix.rows, self.shards)

    @cached_property
    def biases(self) -> int:
        """Return how many biases the server has."""
        return _count(self.matrix.bias_range, self.shards)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Return shard index -> rows and biases that come before its own in a message."""
        places = {}
        row = 0
        bias = 0
        for shard in self.shards:
            places[shard.index] = row, bias
            row += _count(self.matrix.rows, [shard])
            bias += _count(self.matrix.bias_range, [shard])
        return places

    def words(self, images: int) -> int:
        """Return how many words the body of a message of `images` images has."""
        return self._number_words(images) + self.biases

    def images(self, words: int) -> int:
        """Return how many images fit into `words` words: the same for all servers, so that all cut a push alike."""
        per_word = 2 if self.half else 1
        return (words - self.matrix.outputs) * per_word // (self.matrix.inputs + self.matrix.outputs)

    def write(self, body: np.ndarray, activations: np.ndarray, errors: np.ndarray, gradient: np.ndarray | None) -> int:
        """Write factors into `body`; return the words used. `gradient` is the flat vector, for the biases."""
        images, inputs = activations.shape
        end = self._number_words(images)
        words = self.words(images)
        body[end - 1 : words] = 0
        numbers = body[:end].view(np.float16 if self.half else np.float32)
        held = numbers[images * inputs : images * (inputs + self.rows)].reshape(images, self.rows)
        self._put(activations, numbers[: images * inputs].reshape(images, inputs))
        biases = body[end:words].view(np.float32)
        for shard in self.shards:
            row, bias = self.places[shard.index]
            first, last = self.matrix.rows(shard)
            self._put(errors[:, first:last], held[:, row : row + last - first])
            low, high = self.matrix.bias_range(shard)
            if gradient is not None:
                biases[bias : bias + high - low] = gradient[low:high]
        return words

    def unpack(self, body: np.ndarray, images: int, out: np.ndarray) -> np.ndarray:
        """Return a body as float32: itself, or converted in `out`."""
        if not self.half:
            return body.view(np.float32)
        count = images * (self.matrix.inputs + self.rows)
        end = self._number_words(images)
        out[:count] = body[:end].view(np.float16)[:count]
        out[count : count + self.biases] = body[end:].view(np.float32)
        return out[: count + self.biases]

    def multiply(self, body: np.ndarray, images: int, band: Sequence[Shard], out: np.ndarray) -> None:
        """Write the gradient of `band`, neighboring shards, into `out`; `body` is that of a message as float32.

        One after the other, neighbors are rows, then biases: the same as one large shard.
        """
        activations, errors, biases = self._split(body, images, band)
        size = out.size - biases.size
        np.dot(errors.T, activations, out=out[:size].reshape(-1, self.matrix.inputs))
        out[size:] = biases

    def add_product(
        self, body: np.ndarray, images: int, band: Sequence[Shard], scale: float, weights: np.ndarray
    ) -> None:
        """Add the gradient of `band`, neighboring shards, times `scale`, to their `weights`."""
        activations, errors, biases = self._split(body, images, band)
        size = weights.size - biases.size
        if size and images:
            native.add_product(errors, activations, scale, weights[:size].reshape(-1, self.matrix.inputs))
        weights[size:] += np.float32(scale) * biases

    def _split(self, body: np.ndarray, images: int, band: Sequence[Shard]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return activations, errors and the biases' gradient of `band`, in a body as float32."""
        inputs = self.matrix.inputs
        end = images * (inputs + self.rows)
        row, bias = self.places[band[0].index]
        errors = body[images * inputs : end].reshape(images, self.rows)[:, row : row + _count(self.matrix.rows, band)]
        biases = body[end + bias : end + bias + _count(self.matrix.bias_range, band)]
        return body[: images * inputs].reshape(images, inputs), errors, biases

    def _number_words(self, images: int) -> int:
        """Return how many words activations and errors of `images` images take."""
        numbers = images * (self.matrix.inputs + self.rows)
        return (numbers + 1) // 2 if self.half else numbers

    def _put(self, values: np.ndarray, out: np.ndarray) -> None:
        """Write `values` into `out`; as halves they are clipped to the largest half."""
        if self.half:
            np.clip(values, -LARGEST, LARGEST, out=out, casting="unsafe")
        else:
            out[...] = values


def _count(edges: Callable[[Shard], tuple[int, int]], shards: Sequence[Shard]) -> int:
    """Return the sum of the lengths of the spans that `edges` gives for each of `shards`."""
    return sum(last - first for first, last in map(edges, shards))


def matrices(tensors: Sequence[Tensor]) -> dict[str, Matrix]:
    """Return layer -> its matrix, of the dense layers."""
    return {t.layer: Matrix(t.offset, t.shape[1], t.shape[0]) for t in tensors if len(t.shape) == 2}


def plans(
    matrix: Matrix, layer: str, held: Mapping[int, Sequence[Shard]], half: bool = False
) -> dict[int, FactorPlan] | None:
    """Return server -> what it receives of the factors of `layer`; None where shards cut through rows."""
    result = {}
    for server, shards in held.items():
        mine = tuple(shard for shard in shards if shard.layer == layer)
        if any((min(shard.start, matrix.biases) - matrix.offset) % matrix.inputs for shard in mine):
            return None
        if mine:
            result[server] = FactorPlan(matrix, mine, half)
    return result
