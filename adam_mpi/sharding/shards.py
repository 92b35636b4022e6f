"""Shards of the flat parameter vector, their placement on servers, and spans of it that a rank holds. Pure.

A shard is a run of consecutive parameters of one layer; a bucket is one or more shards that are placed together, on
a primary server and on secondaries of other hosts. The placement depends on the model and the servers only.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import numpy as np

from adam_mpi.model.parameters import Tensor

Piece = tuple[int, dict[str, np.ndarray]]
"""Where it begins in the flat vector, and its values by name: weights, state vectors, ema, and numbers of the piece."""


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans of the flat vector in order, neighbors joined into one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


def meets(spans: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Return whether anything from `start` to `stop` of the flat vector is in `spans`, which are in order."""
    before = bisect_left(spans, (stop, 0)) - 1
    return before >= 0 and spans[before][1] > start


class Spans:
    """Reads like a vector, but has only the values of the spans (start, stop) that it was made for."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        spans = sorted(spans)
        places = np.cumsum([0, *(stop - start for start, stop in spans)]).tolist()
        self.flat = np.zeros(places[-1], np.float32)
        """The values of all spans, one after the other."""
        self.values = {start: self.flat[a:b] for (start, _), (a, b) in zip(spans, pairwise(places), strict=True)}
        self.starts = list(self.values)

    def put(self, start: int, values: np.ndarray) -> None:
        """Take over the values of a piece of the flat vector from `start`, as far as they are in our spans."""
        stop = start + len(values)
        for first in self.starts[max(0, bisect_right(self.starts, start) - 1) : bisect_left(self.starts, stop)]:
            mine = self.values[first]
            low = max(first, start)
            high = min(first + len(mine), stop)
            if low < high:
                mine[low - first : high - first] = values[low - start : high - start]

    def add(self, other: "Spans") -> None:
        """Add the values of `other`, which has the same spans of the flat vector."""
        self.flat += other.flat

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return the values of `span` of the flat vector, which begins where one of our spans begins."""
        return self.values[span.start][: span.stop - span.start]


class SpanNumbers:
    """A number for each of the spans (start, stop) that it was made for: the largest one of the pieces that meet it."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.spans = sorted(spans)
        self.numbers = {start: 0.0 for start, _ in self.spans}

    def put(self, start: int, values: np.ndarray) -> None:
        """Take over the number of a piece of the flat vector from `start`; it is repeated in `values`."""
        stop = start + len(values)
        first = max(0, bisect_right(self.spans, (start, start)) - 1)
        for low, high in self.spans[first : bisect_left(self.spans, (stop, stop))]:
            if low < stop and start < high:
                self.numbers[low] = max(float(values[0]), self.numbers[low])

    def __getitem__(self, span: slice) -> float:
        """Return the number of the span of the flat vector that begins where `span` does."""
        return self.numbers[span.start]


Gathered = dict[str, Spans | SpanNumbers]
"""Values in some spans of the flat vector, by name."""


def gathered(pieces: Iterator[Piece], spans: Iterable[tuple[int, int]]) -> Gathered:
    """Return the values of `pieces` of the flat vector that are in `spans`, by name."""
    found: Gathered = {}
    spans = tuple(spans)
    for start, values in pieces:
        size = max(map(np.size, values.values()))
        for name, array in values.items():
            if name not in found:
                found[name] = (Spans if np.ndim(array) else SpanNumbers)(spans)
            found[name].put(start, np.broadcast_to(array, size))
    return found


# No server carries more than this share above the average, as far as the sizes of buckets allow.
LOAD_BOUND = 1.15

# As many buckets as shards up to this number; beyond it, shards share buckets.
MOST_BUCKETS = 4096


@dataclass(frozen=True)
class Shard:
    """`size` parameters from `start` of the flat vector, all of one layer."""

    index: int
    layer: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        """Return the end of the shard in the flat vector."""
        return self.start + self.size


def cut(tensors: Sequence[Tensor], size: int, edges: Sequence[int] = ()) -> tuple[Shard, ...]:
    """Return shards of at most `size` parameters of each layer, cut between rows of its weights where these fit.

    No shard reaches across one of the `edges`.
    """
    shards: list[Shard] = []
    for layer, group in groupby(tensors, key=lambda tensor: tensor.layer):
        members = list(group)
        weight = members[0]
        start = weight.offset
        stop = members[-1].offset + members[-1].size
        row = weight.size // weight.shape[0]
        step = size - size % row if row <= size else size
        while start < stop:
            # The last rows and the bias are one shard when both fit.
            end = stop if stop - start <= size else min(start + step, stop)
            place = bisect_right(edges, start)
            end = min([end, *edges[place : place + 1]])
            shards.append(Shard(len(shards), layer, start, end - start))
            start = end
    return tuple(shards)


def buckets(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Return the shards of each bucket."""
    if len(shards) <= MOST_BUCKETS:
        return [[shard] for shard in shards]
    grouped: list[list[Shard]] = [[] for _ in range(MOST_BUCKETS)]
    for shard in shards:
        grouped[_hash(shard.layer, shard.start) % MOST_BUCKETS].append(shard)
    return [group for group in grouped if group]


def place(shards: Sequence[Shard], servers: Mapping[int, str], copies: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the placement of each shard: its servers, the primary first; `servers` maps each server to its host.

    Rendezvous hashing with a bound on the load: a bucket goes to the servers that score highest for it and still
    have room, so that adding or removing a server moves little more than its own share. Large buckets choose first.
    """
    total = sum(shard.size for shard in shards)
    rooms = [dict.fromkeys(servers, LOAD_BOUND * total * held / len(servers)) for held in (1, copies)]
    holders: dict[int, tuple[int, ...]] = {}
    sized = [(sum(shard.size for shard in bucket), bucket) for bucket in buckets(shards)]
    for size, bucket in sorted(sized, key=lambda pair: (-pair[0], pair[1][0].index)):
        key = bucket[0]
        ranked = sorted(servers, key=lambda server: _hash(key.layer, key.start, server), reverse=True)
        chosen: list[int] = []
        for _ in range(min(copies, len(servers))):
            room = rooms[1] if chosen else rooms[0]
            chosen.append(_choose(ranked, chosen, room, size, servers))
        for server in chosen:
            rooms[1][server] -= size
        rooms[0][chosen[0]] -= size
        holders.update({shard.index: tuple(chosen) for shard in bucket})
    return tuple(holders[shard.index] for shard in shards)


def _choose(
    ranked: Sequence[int], chosen: Sequence[int], room: Mapping[int, float], size: int, servers: Mapping[int, str]
) -> int:
    """Return the best server to place one more copy of a shard: on another host, then with room, then by score."""
    free = [server for server in ranked if server not in chosen]
    hosts = {servers[server] for server in chosen}
    elsewhere = [server for server in free if servers[server] not in hosts] or free
    fitting = [server for server in elsewhere if room[server] >= size]
    return fitting[0] if fitting else max(elsewhere, key=lambda server: room[server])


@lru_cache(maxsize=1 << 18)
def _hash(*key: object) -> int:
    """Return a hash of `key` to place a shard by, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
