"""The push client: cuts contributions into letters, one per shard, and sends each to the server of its shard."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World
from adam_mpi.server import mailbox
from adam_mpi.server.codecs import CODECS, NUMBERS
from adam_mpi.server.shards import Shard
from adam_mpi.server.shelves import Shelves
from adam_mpi.worker.contribution import Contribution
from adam_mpi.worker.lane import Lane


@dataclass(frozen=True)
class ShardLetter:
    """The part of a contribution that one shard takes."""

    client: "PushClient"
    contribution: Contribution
    shard: Shard
    last: bool

    @property
    def part(self) -> slice:
        return slice(self.shard.start, self.shard.stop)

    def write(self, body: np.ndarray) -> np.ndarray:
        client, contribution, header = self.client, self.contribution, np.zeros((), mailbox.HEADER)
        values = contribution.values[self.part]
        if client.codec is CODECS["none"]:
            header["words"], header["finite"] = values.size, mailbox.copy(body, values.view(np.uint32))
        else:
            header["finite"] = np.isfinite(values).all()
            header["words"] = client.codec.encode(values, client.residual[self.part], body)
        header["generation"], header["pusher"] = client.world.generation, client.pusher
        header["sequence"], header["clock"] = contribution.sequence, contribution.clock
        header["shard"], header["kind"], header["last"] = self.shard.index, mailbox.DELTA, self.last
        header["codec"] = NUMBERS[client.world.config.push.codec]
        header["values"], header["images"] = self.shard.size, contribution.images
        header["seen"] = client.seen[self.shard.index]
        return header

    def batches(self) -> np.ndarray:
        return np.array([done.number for done in self.contribution.done], np.int64)

    def settled(self) -> None:
        self.contribution.pending -= 1
        if self.contribution.pending == 0:
            self.client.acknowledge(self.contribution)


class PushClient:
    def __init__(
        self, world: World, shelves: Shelves, mail: Window, published: Window
    ) -> None:
        self.world, self.shelves, self.mailbox, self.published = world, shelves, mail, published
        self.ring = shelves.pushers.index(world.rank)
        self.pusher = self.ring
        """Unique for the life of the job; in the first generation the same as the ring."""
        self.lanes: list[Lane[ShardLetter]] = [
            Lane(shelves, server, self.ring, mail, published) for server in shelves.servers if shelves.held[server]
        ]
        self.seen = np.zeros(len(shelves.shards), np.int64)
        """Versions of the shards that the last pull brought."""
        self.unacknowledged: deque[Contribution] = deque()
        self.acknowledged: deque[Contribution] = deque()
        self.codec = CODECS[world.config.push.codec]
        self.residual = np.zeros(shelves.parameters if self.codec.feedback else 0, np.float32)
        """What error feedback carries into later pushes."""
        self.sent = self.settled = 0

    def push(self, contribution: Contribution) -> None:
        self.world.injector.at("push")
        contribution.clock = self.sent
        self.sent += 1
        contribution.sequence, contribution.pending = self.sent, len(self.shelves.shards)
        self.unacknowledged.append(contribution)
        for lane in self.lanes:
            held = self.shelves.held[lane.server]
            lane.waiting.extend(ShardLetter(self, contribution, shard, shard is held[-1]) for shard in held)

    def step(self) -> bool:
        self.mailbox.sync()
        self.published.sync()
        worked = [lane.step() for lane in self.lanes]
        return any(worked)

    def acknowledge(self, contribution: Contribution) -> None:
        """The last message of a push has been dealt with."""
        self.unacknowledged.remove(contribution)
        self.acknowledged.append(contribution)
        self.settled += 1

    @property
    def idle(self) -> bool:
        return not self.unacknowledged

    @property
    def bytes(self) -> int:
        return sum(lane.bytes for lane in self.lanes)
