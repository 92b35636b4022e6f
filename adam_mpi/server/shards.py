"""Shards: runs of consecutive parameters of one layer, and the server that holds each. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from adam_mpi.model.parameters import Tensor

# No server carries more than this share above the average, as far as the sizes of shards allow.
LOAD_BOUND = 1.15


@dataclass(frozen=True)
class Shard:
    """`size` parameters from `start` of the flat vector, all of one layer."""

    index: int
    layer: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


def cut(tensors: Sequence[Tensor], size: int) -> tuple[Shard, ...]:
    """Cut each layer into shards of at most `size` parameters, between rows of its weights where they fit."""
    shards: list[Shard] = []
    for layer, group in groupby(tensors, key=lambda tensor: tensor.layer):
        members = list(group)
        weight, start = members[0], members[0].offset
        stop = members[-1].offset + members[-1].size
        row = weight.size // weight.shape[0]
        step = size - size % row if row <= size else size
        while start < stop:
            # The last rows take the bias with them when both fit.
            end = stop if stop - start <= size else min(start + step, stop)
            shards.append(Shard(len(shards), layer, start, end - start))
            start = end
    return tuple(shards)


def place(shards: Sequence[Shard], servers: Sequence[int]) -> tuple[int, ...]:
    """The server of each shard, by rendezvous hashing with a bound on the load.

    A shard goes to the server that scores highest for it and still has room, so that a server that
    comes or goes moves little more than its own share. Large shards choose first: they need the room.
    """
    room = dict.fromkeys(servers, LOAD_BOUND * sum(shard.size for shard in shards) / len(servers))
    owners: dict[int, int] = {}
    for shard in sorted(shards, key=lambda shard: (-shard.size, shard.index)):
        ranked = sorted(servers, key=lambda server: _score(shard, server), reverse=True)
        fitting = [server for server in ranked if room[server] >= shard.size]
        chosen = fitting[0] if fitting else max(ranked, key=lambda server: room[server])
        room[chosen] -= shard.size
        owners[shard.index] = chosen
    return tuple(owners[shard.index] for shard in shards)


def _score(shard: Shard, server: int) -> bytes:
    return hashlib.blake2b(f"{shard.layer} {shard.start} {server}".encode(), digest_size=8).digest()
