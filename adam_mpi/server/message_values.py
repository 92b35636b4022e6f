"""The values that messages in a mailbox carry: decoded, multiplied out of factors, and summed."""

from collections.abc import Mapping, Sequence

import numpy as np

from adam_mpi.base.pools import EMPTY, BufferPool
from adam_mpi.optimizer import kernels
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.codecs import BY_NUMBER, NUMBERS
from adam_mpi.sharding.push_protocol import FactorPlan
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.mailbox import ReceivedMessage

UNCODED = NUMBERS["none"]
ScaledMessage = tuple[ReceivedMessage, float]
"""A message, and what its values are multiplied by."""


class MessageValues:
    """Reads messages of one mailbox; a band is neighboring shards that are stepped together."""

    def __init__(self, memory: np.ndarray, factors: Mapping[str, FactorPlan], arena: np.ndarray = EMPTY) -> None:
        """Read messages of the mailbox `memory`; `fold` puts sums into `arena`, where other servers can read them."""
        self.words = memory.view(np.uint32)
        self.floats = memory.view(np.float32)
        self.factors = factors
        self.pool = BufferPool()
        self.folds = BufferPool(arena)

    def unpack(self, message: ReceivedMessage, plan: FactorPlan) -> None:
        """Unpack the factors of `message` to float32, once, before any of its shards is stepped."""
        size = message.values * (plan.matrix.inputs + plan.rows) + plan.biases
        out = self.pool.take(size) if plan.half else self.floats[:0]
        message.buffer = out if plan.half else None
        message.factors = plan.unpack(self._body(message), message.values, out)

    def release(self, message: ReceivedMessage) -> None:
        """Return the buffer that `unpack` took, if it took one."""
        if message.buffer is not None:
            self.pool.give_back(message.buffer)

    def decode(self, band: Sequence[Shard], message: ReceivedMessage, values: np.ndarray) -> None:
        """Write the values of `message` for `band` into `values`: decoded, or its factors multiplied."""
        if message.kind == message_formats.FACTOR:
            self.plan(band).multiply(unpacked(message), message.values, band, values)
        else:
            BY_NUMBER[message.codec].decode(self._body(message), values)

    def pairs(self, message: ReceivedMessage) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of a sparse message, each at most once, and their values."""
        middle = message.start + message.values
        indices = self.words[message.start : middle].astype(np.int64)
        return indices, self.floats[middle : middle + message.values]

    def sum_into(
        self, band: Sequence[Shard], scaled: Sequence[ScaledMessage], total: np.ndarray, first: int = 0
    ) -> None:
        """Write the scaled sum of messages of any kind into `total`, which begins at parameter `first` of the band."""
        values = self.pool.take(total.size)
        total[:] = 0
        for message, scale in scaled:
            if message.kind == message_formats.SPARSE:
                indices, numbers = self.pairs(message)
                total[indices - first] += numbers * np.float32(scale)
                continue
            whole = message.kind == message_formats.FACTOR
            part = total if whole else total[message.first - first :][: message.values]
            self.decode(band, message, values[: part.size])
            kernels.add(part, values[: part.size], np.float32(scale))
        self.pool.give_back(values)

    def fold(self, band: Sequence[Shard], scaled: Sequence[ScaledMessage], partial: bool) -> np.ndarray | None:
        """Return a buffer of `folds` with the sum of the finite messages for `band`; None if there is none.

        `partial`: it is one message for some of the parameters, and NaN for the others.
        """
        finite = [(message, scale) for message, scale in scaled if message.finite]
        if not finite:
            return None
        size = band_size(band)
        buffer = self.folds.take(size)
        messages = [message for message, _ in finite]
        if are_plain(messages, size):
            starts = [message.start for message in messages]
            kernels.fold(buffer[:size], self.floats, *kernel_messages(starts, [scale for _, scale in finite]))
        else:
            self.sum_into(band, finite, buffer[:size])
        if partial:
            self._mark_others(finite[0][0], buffer[:size])
        return buffer

    def _mark_others(self, message: ReceivedMessage, total: np.ndarray) -> None:
        """Make `total` NaN for the parameters that `message` has no values for."""
        others = np.ones(total.size, bool)
        named = slice(message.first, message.first + message.values)
        others[self.pairs(message)[0] if message.kind == message_formats.SPARSE else named] = False
        total[others] = np.nan

    def plan(self, band: Sequence[Shard]) -> FactorPlan:
        """Return how factors of the layer of `band` are multiplied."""
        return self.factors[band[0].layer]

    def _body(self, message: ReceivedMessage) -> np.ndarray:
        """Return the words of the body of `message`."""
        return self.words[message.start : message.start + message.words]


def unpacked(message: ReceivedMessage) -> np.ndarray:
    """Return the factors of `message` as float32."""
    assert message.factors is not None, "factors are unpacked when a message arrives"
    return message.factors


def is_plain(message: ReceivedMessage) -> bool:
    """Return whether the values of `message` lie in the mailbox as float32, one after the other."""
    return message.kind == message_formats.DELTA and message.codec == UNCODED


def is_partial(message: ReceivedMessage, size: int) -> bool:
    """Return whether `message` has values for some of the `size` parameters of its shard only."""
    return message.kind == message_formats.SPARSE or (message.kind == message_formats.DELTA and message.values < size)


def are_plain(messages: Sequence[ReceivedMessage], size: int) -> bool:
    """Return whether all messages can be folded where they lie, each for all `size` parameters."""
    for message in messages:
        if not (message.values == size and message.finite and is_plain(message)):
            return False
    return True


def kernel_messages(starts: Sequence[int], scales: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return `starts` and `scales` as the kernels take them."""
    return np.array(starts, np.int64), np.array(scales, np.float32)


def band_size(band: Sequence[Shard]) -> int:
    """Return how many parameters `band` has."""
    return band[0].size if len(band) == 1 else sum(shard.size for shard in band)
