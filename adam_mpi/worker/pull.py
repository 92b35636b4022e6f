"""The pull client: reads the servers' weights one-sidedly, while the trainer threads go on."""

import time

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World
from adam_mpi.server.shelves import LINE, Shelves


class PullClient:
    """`start`, then `step` until `arrived` has the weights; with a least clock, not before all servers reached it."""

    def __init__(self, world: World, shelves: Shelves, published: Window, size: int) -> None:
        self.world, self.shelves, self.published = world, shelves, published
        self.servers = [server for server in shelves.servers if shelves.held[server]]
        self.arrived = np.zeros(size, np.float32)
        self.versions = {server: np.zeros(len(shelves.held[server]), np.int64) for server in self.servers}
        self.clocks, self.lines = np.zeros((2, len(self.servers), LINE // 8), np.int64)
        self.ring = shelves.pushers.index(world.rank)
        self.requests: list[MPI.Request] = []
        self.active = self.reading_clocks = False
        self.least: int | None = None
        self.began = 0.0
        self.count = self.bytes = 0
        self.waited = 0.0

    def start(self, least: int | None = None) -> None:
        assert not self.active, "one pull at a time"
        self.world.injector.at("pull")
        self.active, self.least, self.began = True, least, time.perf_counter()
        # The clock first, then the weights: one read over both might bring a new clock with old weights.
        if least is None:
            self._read_weights()
        else:
            self._read_clocks()

    def step(self) -> bool:
        """Go on with the pull; True when it has just been completed."""
        if not self.active or not MPI.Request.Testall(self.requests):
            return False
        if not self.reading_clocks:
            self.active = False
            self.count += 1
            return True
        if self.least is not None and self.clocks[:, 0].min() >= self.least:
            self.waited += time.perf_counter() - self.began
            self._read_weights()
        else:
            self._read_clocks()
        return False

    @property
    def applied(self) -> list[int]:
        """How much of our ring each server had applied when its weights were read."""
        return [int(line[0]) for line in self.lines]

    @property
    def rate(self) -> float:
        """The learning rate the servers use."""
        return float(self.clocks[0, 1:2].view(np.float64)[0])

    def seen(self, versions: np.ndarray) -> None:
        """Write the version of each shard that this pull brought."""
        for server in self.servers:
            versions[[shard.index for shard in self.shelves.held[server]]] = self.versions[server]

    def _read_clocks(self) -> None:
        self.reading_clocks = True
        self.requests = [
            self.published.get(line, server, 0) for line, server in zip(self.clocks, self.servers, strict=True)
        ]

    def _read_weights(self) -> None:
        self.reading_clocks = False
        self.requests = []
        get = self.published.get
        for server, clock, line in zip(self.servers, self.clocks, self.lines, strict=True):
            self.requests.append(get(clock, server, 0))
            self.requests.append(get(self.versions[server], server, self.shelves.version_offset(server)))
            for start, size, offset in self.shelves.runs(server):
                self.requests.append(get(self.arrived[start : start + size], server, offset))
            # After the weights: an own push taken for applied too early is only late, one too late counts twice.
            self.requests.append(get(line, server, self.shelves.line_offset(self.ring)))
        self.bytes += self.arrived.nbytes + sum(versions.nbytes for versions in self.versions.values())
