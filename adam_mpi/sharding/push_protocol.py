"""The push protocol of each layer, deltas or factors, chosen by estimated time; and the factors of dense layers. Pure.

The gradient of a weight matrix over n images is (outputs x n) (n x inputs), errors times activations: n * (inputs +
outputs) numbers instead of inputs * outputs. A server receives all activations, and the errors of the rows it holds:

    body = activations (n x inputs) | errors (n x rows) | gradient of the biases it holds

Activations and errors may be sent as IEEE halves, padded to a whole word; biases are always float32.

Bytes are those that a pusher sends, activations repeated for every server that holds rows of the layer; replication
sends the folded gradient in both protocols, and makes no difference. A server has to multiply factors, which takes time
that a delta does not; time on the wire and time of the multiplication are added.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from adam_mpi.base import native
from adam_mpi.base.errors import UserError
from adam_mpi.config import Config
from adam_mpi.model.parameters import Tensor
from adam_mpi.optimizer.rules import rule_of
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.codecs.float16 import LARGEST
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.message_formats import HEADER_WORDS
from adam_mpi.sharding.shards import Shard


@dataclass(frozen=True)
class Matrix:
    """The place of a dense layer's weights in the flat vector; its biases follow them."""

    offset: int
    inputs: int
    outputs: int

    @property
    def biases(self) -> int:
        """Return where the biases of a dense layer's matrix begin in the flat vector."""
        return self.offset + self.inputs * self.outputs

    def rows(self, shard: Shard) -> tuple[int, int]:
        """Return (first, end) of the rows of a dense layer's weights in `shard`."""
        first, last = (min(edge, self.biases) - self.offset for edge in (shard.start, shard.stop))
        return first // self.inputs, last // self.inputs

    def bias_range(self, shard: Shard) -> tuple[int, int]:
        """Return (start, stop) of a dense layer's biases in `shard`, in the flat vector."""
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
        """Return how many rows of weights the server of a factor push has."""
        return _count(self.matrix.rows, self.shards)

    @cached_property
    def biases(self) -> int:
        """Return how many biases the server of a factor push has."""
        return _count(self.matrix.bias_range, self.shards)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Return shard index -> rows and biases that come before its own in a factor message."""
        places = {}
        row = 0
        bias = 0
        for shard in self.shards:
            places[shard.index] = row, bias
            row += _count(self.matrix.rows, [shard])
            bias += _count(self.matrix.bias_range, [shard])
        return places

    def words(self, images: int) -> int:
        """Return how many words the body of a factor message of `images` images has."""
        return self._number_words(images) + self.biases

    def images(self, words: int) -> int:
        """Return the images whose factors fit into `words` words: the same for all servers, so that cuts agree."""
        per_word = 2 if self.half else 1
        return (words - self.matrix.outputs) * per_word // (self.matrix.inputs + self.matrix.outputs)

    def write(self, body: np.ndarray, activations: np.ndarray, errors: np.ndarray, gradient: np.ndarray | None) -> int:
        """Write a layer's factors into the message's `body`; return the words used. `gradient` has the biases."""
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
        """Return the body of a factor message as float32: itself, or converted in `out`."""
        if not self.half:
            return body.view(np.float32)
        count = images * (self.matrix.inputs + self.rows)
        end = self._number_words(images)
        out[:count] = body[:end].view(np.float16)[:count]
        out[count : count + self.biases] = body[end:].view(np.float32)
        return out[: count + self.biases]

    def multiply(self, body: np.ndarray, images: int, band: Sequence[Shard], out: np.ndarray) -> None:
        """Write the gradient of `band`, neighboring shards, into `out` from the factors in `body`, as float32.

        One after the other, neighbors are rows, then biases: the same as one large shard.
        """
        activations, errors, biases = self._split(body, images, band)
        size = out.size - biases.size
        np.dot(errors.T, activations, out=out[:size].reshape(-1, self.matrix.inputs))
        out[size:] = biases

    def add_product(
        self, body: np.ndarray, images: int, band: Sequence[Shard], scale: float, weights: np.ndarray
    ) -> None:
        """Add the gradient of `band`, neighboring shards, from factors, times `scale`, to their `weights`."""
        activations, errors, biases = self._split(body, images, band)
        size = weights.size - biases.size
        if size and images:
            native.add_product(errors, activations, scale, weights[:size].reshape(-1, self.matrix.inputs))
        weights[size:] += np.float32(scale) * biases

    def _split(self, body: np.ndarray, images: int, band: Sequence[Shard]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return activations, errors and the biases' gradient of `band`, in a factor message's body."""
        inputs = self.matrix.inputs
        end = images * (inputs + self.rows)
        row, bias = self.places[band[0].index]
        errors = body[images * inputs : end].reshape(images, self.rows)[:, row : row + _count(self.matrix.rows, band)]
        biases = body[end + bias : end + bias + _count(self.matrix.bias_range, band)]
        return body[: images * inputs].reshape(images, inputs), errors, biases

    def _number_words(self, images: int) -> int:
        """Return how many words the factors of `images` images take: activations and errors."""
        numbers = images * (self.matrix.inputs + self.rows)
        return (numbers + 1) // 2 if self.half else numbers

    def _put(self, values: np.ndarray, out: np.ndarray) -> None:
        """Write `values` of factors into `out`; as halves they are clipped to the largest half."""
        if self.half:
            np.clip(values, -LARGEST, LARGEST, out=out, casting="unsafe")
        else:
            out[...] = values


def _count(edges: Callable[[Shard], tuple[int, int]], shards: Sequence[Shard]) -> int:
    """Return for a factor plan the sum of the lengths of the spans that `edges` gives for each of `shards`."""
    return sum(last - first for first, last in map(edges, shards))


def matrices(tensors: Sequence[Tensor]) -> dict[str, Matrix]:
    """Return layer -> its matrix, of the dense layers, which can push factors."""
    return {t.layer: Matrix(t.offset, t.shape[1], t.shape[0]) for t in tensors if t.factored and len(t.shape) == 2}


def plans(
    matrix: Matrix, layer: str, held: Mapping[int, Sequence[Shard]], half: bool = False
) -> dict[int, FactorPlan] | None:
    """Return server -> the factor plan of `layer`; None where shards cut through rows."""
    result = {}
    for server, shards in held.items():
        mine = tuple(shard for shard in shards if shard.layer == layer)
        if any((min(shard.start, matrix.biases) - matrix.offset) % matrix.inputs for shard in mine):
            return None
        if mine:
            result[server] = FactorPlan(matrix, mine, half)
    return result


WIRE = 1.25e9  # bytes per second of a 10 Gb/s link between hosts
MEMORY = 5e9  # bytes per second of a push inside one host
MULTIPLY = 60e9  # operations per second of one core's BLAS


@dataclass(frozen=True)
class Choice:
    """What one layer pushes, and the bytes of a push by either protocol."""

    layer: str
    delta_bytes: int
    factor_bytes: int | None
    """None where factors are not possible."""
    factors: dict[int, FactorPlan] | None
    """Server -> its plan, where factors are chosen."""

    @property
    def protocol(self) -> str:
        """Return the name of the chosen push protocol."""
        return "delta" if self.factors is None else "factor"


def choose_protocols(
    memory_layout: MemoryLayout, config: Config, images: int, hosts: int, kept: Collection[str] | None = None
) -> dict[str, Choice]:
    """Return layer -> the push protocol chosen for pushes of `images` images in a job on `hosts` hosts.

    `kept`: the layers that push factors in a job that is running; networks are compiled for them. Raises UserError if
    the configuration asks for factors that are not possible.
    """
    _check_wanted(memory_layout, config)
    dense = matrices(memory_layout.tensors)
    gradients = config.optimizer.where == "server" and config.optimizer.momentum_where != "replica"
    multipliable = gradients and memory_layout.strips == 1
    frozen = {memory_layout.shards[index].layer for index in memory_layout.frozen}
    choices = {}
    for layer in dict.fromkeys(shard.layer for shard in memory_layout.shards):
        matrix = dense.get(layer) if multipliable and layer not in frozen else None
        choice = _estimate(memory_layout, config, layer, matrix, images)
        faster = choice.factor_bytes is not None and _factors_are_faster(memory_layout, choice, images, hosts)
        auto = config.push.protocol == "auto" and faster and config.push.codec == "none"
        use = (config.push.protocol == "factor" or auto) if kept is None else layer in kept
        choices[layer] = choice if use else replace(choice, factors=None)
    return choices


def _check_wanted(memory_layout: MemoryLayout, config: Config) -> None:
    """Raise UserError if the configuration asks for factors that are not possible."""
    if config.push.protocol != "factor":
        return
    if config.optimizer.where == "worker":
        raise UserError('push.protocol = "factor": needs optimizer.where = "server"; workers that step push deltas')
    if memory_layout.strips > 1:
        raise UserError('push.protocol = "factor": strips push deltas; set "auto", or layout.partitions = 1')


def _estimate(memory_layout: MemoryLayout, config: Config, layer: str, matrix: Matrix | None, images: int) -> Choice:
    """Return the choice of factors for `layer`, with a push's bytes; of deltas where factors are not possible."""
    codec = CODECS[config.push.codec]
    shards = [shard for shard in memory_layout.shards if shard.layer == layer]
    sizes = [0 if shard.index in memory_layout.frozen else shard.size for shard in shards]
    delta = sum(4 * (HEADER_WORDS + codec.words(size)) for size in sizes)
    half = config.push.factor_codec == "float16"
    planned = plans(matrix, layer, memory_layout.served, half) if matrix is not None else None
    if planned is None or not _sendable(planned, memory_layout, config, images):
        return Choice(layer, delta, None, None)
    factor = sum(4 * (HEADER_WORDS + plan.words(images)) for plan in planned.values())
    return Choice(layer, delta, factor, planned)


def _factors_are_faster(memory_layout: MemoryLayout, choice: Choice, images: int, hosts: int) -> bool:
    """Return whether a push of factors takes less time than a delta, including their multiplication."""
    assert choice.factor_bytes is not None, "asked where factors are possible"
    speed = WIRE if hosts > 1 else MEMORY
    operations = 2 * images * sum(shard.size for shard in memory_layout.shards if shard.layer == choice.layer)
    return choice.factor_bytes / speed + operations / MULTIPLY < choice.delta_bytes / speed


def _sendable(planned: Mapping[int, FactorPlan], memory_layout: MemoryLayout, config: Config, images: int) -> bool:
    """Return whether factors of `images` images can be sent.

    A message has to have room for one image, and a ring for all parts of a push in synchronous training, because the
    server waits for all of them. Rules that are not linear take the gradient of a push as a whole: it is one message.
    """
    room = min(plan.images(memory_layout.body_words) for plan in planned.values())
    if config.consistency.staleness == 0:
        return room >= 1 and -(-images // room) <= memory_layout.slots
    return room >= (1 if rule_of(config.optimizer).linear else images)


def captured_layers(choices: Mapping[str, Choice]) -> list[str]:
    """Return the layers that push factors, whose activations and errors have to be captured."""
    return [layer for layer, choice in choices.items() if choice.factors is not None]


def largest_push(config: Config) -> int:
    """Return how many images one push has at most, where layers push factors."""
    if not config.asynchronous:
        return config.train.batch
    return -(-config.push.images // config.train.batch) * config.train.batch
