"""The link between the strips of a replica: channels for each context, exchange and direction, and transfers over them.

Every strip lays out its memory the same way, so that the others know where to read:
| a number per channel: its last use | a number per context, and one for sums: the last use read | pieces for others |

Inside a node a strip reads where its neighbor has packed, in shared memory; a number beside it is the last use of the
channel. To other nodes the same memory is sent. It is packed again when every strip of the node has published that it
is done with the batch, and all sends are complete.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.windows import Window, choose_kind
from adam_mpi.cluster.world import World
from adam_mpi.model.exchange import BACK, FORWARD
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


def plan_channels(partition: Partition, contexts: int, images: int, own: int = 0) -> Channels:
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


TAGS = 1 << 14
"""The number of different tags."""
Used = Mapping[int, int]
"""Target strip -> how many of the floats of a piece are used."""


class Link:
    """Connect the strips of a replica; `out` and `into` are the pieces of each channel, by strip."""

    def __init__(self, world: World, channels: Channels) -> None:
        """Make the memory of `channels`; collective over the replica of `world`."""
        assert world.replica is not None, "a worker has a replica"
        self.channels = channels
        self.comm = world.replica
        self.strip = self.comm.rank
        self.latency = world.injector.latency("exchange")
        together = self.strip if world.config.cluster.transport != "shared" else 0
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        shared: Any = node.Split(together)
        kind = choose_kind("shared", world.survivable)
        self.window: Window = kind.to_write(shared, shared, channels.bytes(self.strip))
        strips = MPI.Group.Translate_ranks(shared.Get_group(), None, self.comm.Get_group())
        # The window has a communicator of its own.
        for comm in (shared, node):
            comm.Free()
        memory = {strip: self.window.memory_of(place, 0, channels.bytes(strip)) for place, strip in enumerate(strips)}
        self.near = {strip: view for strip, view in memory.items() if view is not None}
        self.numbers = {strip: view[: 8 * channels.numbers].view(np.int64) for strip, view in self.near.items()}
        self.out: list[dict[int, np.ndarray]] = [{} for _ in channels.keys]
        self.into: list[dict[int, np.ndarray]] = [{} for _ in channels.keys]
        for strip in range(self.comm.size):
            self._place(strip)
        self.sends: list[list[MPI.Request]] = [[] for _ in channels.keys]
        self.receives: list[list[MPI.Request]] = [[] for _ in channels.keys]
        self.held: deque[tuple[float, int, int, Used]] = deque()
        """What an injected delay holds back: until when, channel, number, used."""
        self.bytes = 0

    def _place(self, strip: int) -> None:
        """Map the pieces between `strip` and this one."""
        for channel, target, offset, floats in self.channels.pieces(strip):
            if strip == self.strip:
                self.out[channel][target] = self.near[strip][offset : offset + 4 * floats].view(np.float32)
            elif target == self.strip and strip in self.near:
                self.into[channel][strip] = self.near[strip][offset : offset + 4 * floats].view(np.float32)
            elif target == self.strip:
                self.into[channel][strip] = np.zeros(floats, np.float32)

    def post(self, channel: int, number: int, used: Used) -> None:
        """Pass on what is packed for the others, of which the floats in `used` are used.

        `number` grows from one use of a channel to the next.
        """
        if self.latency:
            self.held.append((time.perf_counter() + self.latency, channel, number, used))
        else:
            self._post(channel, number, used)
        tag = self._tag(channel, number)
        self.receives[channel] = [
            self.comm.Irecv(values, source, tag)
            for source, values in self.into[channel].items()
            if source not in self.near
        ]

    def step(self) -> None:
        """Pass on what an injected delay has held back long enough."""
        while self.held and self.held[0][0] <= time.perf_counter():
            self._post(*self.held.popleft()[1:])

    def _post(self, channel: int, number: int, used: Used) -> None:
        self.window.sync()
        self.numbers[self.strip][channel] = number
        self.bytes += 4 * sum(used.values())
        self.sends[channel] = [
            self.comm.Isend(values[: used[target]], target, self._tag(channel, number))
            for target, values in self.out[channel].items()
            if target not in self.near
        ]

    def arrived(self, channel: int, number: int) -> bool:
        """Return whether what the others have packed for use `number` of `channel` has arrived."""
        for source in self.into[channel]:
            if source in self.near and self.numbers[source][channel] != number:
                return False
        if not MPI.Request.Testall(self.receives[channel]):
            return False
        self.window.sync()
        return True

    def missing(self, channel: int, number: int) -> list[int]:
        """Return the strips whose part of use `number` of `channel` has not arrived."""
        sources = self.into[channel]
        near = [source for source in sources if source in self.near and self.numbers[source][channel] != number]
        far = [source for source in sources if source not in self.near]
        pairs = zip(far, self.receives[channel], strict=True)
        return near + [source for source, request in pairs if not request.Get_status()]

    def clear(self, channel: int) -> bool:
        """Return whether all sends of `channel` are complete."""
        return not self.held and MPI.Request.Testall(self.sends[channel])

    def unread(self, user: int, number: int, channels: Iterable[int]) -> list[int]:
        """Return the strips that have not read all that was sent in use `number` of the `channels` of `user`."""
        place = len(self.channels.keys) + user
        near = [strip for strip, numbers in self.numbers.items() if int(numbers[place]) < number]
        far: set[int] = set()
        for channel in channels:
            targets = [target for target in self.out[channel] if target not in self.near]
            # Nothing was sent yet in this generation, or all sends are complete.
            pairs = zip(targets, self.sends[channel], strict=False)
            far |= {target for target, request in pairs if not request.Get_status()}
        return near + sorted(far)

    def finish(self, user: int, number: int) -> None:
        """Publish that this strip has read all of use `number` of the channels of `user`: a context, or the sums."""
        self.window.sync()
        self.numbers[self.strip][len(self.channels.keys) + user] = number

    def finished(self, user: int, number: int) -> bool:
        """Return whether all strips of the node have read all of use `number` of the channels of `user`."""
        place = len(self.channels.keys) + user
        return all(int(numbers[place]) >= number for numbers in self.numbers.values())

    def _tag(self, channel: int, number: int) -> int:
        """Return the tag of use `number` of `channel`."""
        count = len(self.channels.keys)
        return channel + count * (number % max(1, TAGS // count))


def shaped(pieces: Mapping[int, np.ndarray], shapes: Mapping[int, tuple[int, ...]]) -> dict[int, np.ndarray]:
    """Return the pieces of a channel, by strip, in the `shapes` that exchange buffers pack and unpack."""
    return {strip: pieces[strip].reshape(shape) for strip, shape in shapes.items()}
