"""The channels between the strips of a replica: one for each context, exchange and direction, and some for sums. Pure.

Every strip lays out its memory the same way, so that the others know where to read:
| a number per channel: its last use | a number per context, and one for sums: the last use read | pieces for others |
"""

from collections.abc import Iterator
from dataclasses import dataclass

from adam_mpi.model.exchange_buffers import BACK, FORWARD
from adam_mpi.model.partition import Partition

LINE = 64
SUMS = 2
"""The most sums of gradients that are under way at once."""
Key = tuple[int, int, int]
"""Context, exchange, direction; the numbers of sums follow those of the contexts."""


@dataclass(frozen=True)
class Channels:
    """Describe the channels of a replica; all its strips have the same description."""

    keys: tuple[Key, ...]
    floats: tuple[tuple[tuple[int, ...], ...], ...]
    """Of each channel: the floats that each strip sends to each other strip."""
    contexts: int

    def index(self, key: Key) -> int:
        """Return the number of the channel with `key`."""
        return self.keys.index(key)

    @property
    def numbers(self) -> int:
        """Return how many numbers precede the pieces in the memory of a strip."""
        return len(self.keys) + self.contexts + 1

    def pieces(self, strip: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (channel, target, offset in bytes, floats) of each piece that `strip` sends."""
        offset = _lined(8 * self.numbers)
        for channel, table in enumerate(self.floats):
            for target, floats in enumerate(table[strip]):
                if floats:
                    yield channel, target, offset, floats
                    offset += _lined(4 * floats)

    def bytes(self, strip: int) -> int:
        """Return the size of the memory of `strip`."""
        ends = [offset + 4 * floats for _, _, offset, floats in self.pieces(strip)]
        return _lined(max(ends, default=8 * self.numbers))


def plan(partition: Partition, contexts: int, images: int, own: int = 0) -> Channels:
    """Return the channels for `contexts` contexts with room for `images` images, `own` of them of one hybrid rank."""
    strips = range(len(partition))
    found: dict[Key, tuple[tuple[int, ...], ...]] = {}
    for context in range(contexts):
        for number, exchange in enumerate(partition.exchanges.values()):
            forward = [[exchange.floats(s, t, images, own) for t in strips] for s in strips]
            found[context, number, FORWARD] = _others(forward)
            if exchange.summed:
                found[context, number, BACK] = _others([list(column) for column in zip(*forward, strict=True)])
    for number in range(SUMS):
        common = [sum(_size(spans[target]) for spans in partition.common) for target in strips]
        found[contexts + number, 0, FORWARD] = _others([common for _ in strips])
    return Channels(tuple(found), tuple(found.values()), contexts)


def _others(floats: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    """Return `floats` without what strips would send to themselves."""
    return tuple(tuple(count * (s != t) for t, count in enumerate(row)) for s, row in enumerate(floats))


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _lined(size: int) -> int:
    return -(-size // LINE) * LINE
