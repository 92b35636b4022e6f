"""The pull client: reads the servers' weights one-sidedly, while the trainer threads go on."""

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from adam_mpi.base import trace
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.sharding.codecs import bfloat16
from adam_mpi.sharding.memory_layout import LINE
from adam_mpi.sharding.worker_shards import WorkerShards
from adam_mpi.transport.generation import Generation


class PullClient:
    """`start`, then `step` until it says that the weights have arrived, in `latest`.

    With a least clock: the clocks first, again and again until every server has reached it, then all weights (one
    read over both might bring a new clock with old weights). Without: versions first, then the shards that changed.
    """

    def __init__(self, generation: Generation, holding: WorkerShards | None = None) -> None:
        self.world = world = generation.world
        self.memory_layout = memory_layout = generation.memory_layout
        self.weights_window = generation.weights_window
        self.holding = holding or WorkerShards(memory_layout)
        self.ring = memory_layout.pushers.index(world.rank)
        self.servers = [server for server in memory_layout.servers if self.holding.pulls(server)]
        size = self.holding.size
        self.latest = np.zeros(size, np.float32)
        """The weights as last read: for the caller to copy, and while a pull is active neither old nor new."""
        self.halves = np.zeros(size if "short" in memory_layout.regions else 0, np.uint16)
        self.versions = {server: np.zeros(len(memory_layout.held[server]), np.int64) for server in self.servers}
        self.known = {server: np.full(len(memory_layout.held[server]), -1, np.int64) for server in self.servers}
        self.clocks, self.lines = np.zeros((2, len(self.servers), LINE // 8), np.int64)
        self.requests: list[MPI.Request] = []
        self.targets: list[int] = []
        """The server that each request is to."""
        self.reads = 0
        self.active, self.reading = False, ""
        self.least: int | None = None
        self.region = "weights"
        self.runs: list[tuple[int, int]] = []
        self.began = self.waited = 0.0
        self.count = self.bytes = 0
        self.traffic: Counter[str] = Counter()
        """Bytes of weights, by layer: "conv1 pull"."""

    def start(self, least: int | None = None, ema: bool = False) -> None:
        assert not self.active, "one pull at a time"
        self.world.injector.at("pull")
        region = "ema" if ema and "ema" in self.memory_layout.regions else self._training_region()
        if region != self.region:
            self.region = region
            for known in self.known.values():
                known[:] = -1
        self.active, self.least, self.began = True, least, time.perf_counter()
        self._read_heads()

    def step(self) -> bool:
        """Go on with the pull; True when it has just been completed."""
        if not self.active or not MPI.Request.Testall(self.requests):
            return False
        if self.reading == "heads":
            if self.least is not None and self.clocks[:, 0].min() < self.least:
                self._read_heads()
                return False
            self.waited += time.perf_counter() - self.began if self.least is not None else 0.0
            self._read_weights()
            # Inside a node they are here already.
            if not MPI.Request.Testall(self.requests):
                return False
        self._finish()
        return True

    def awaits(self) -> Iterator[Wait]:
        """The servers whose answer is missing, and those whose clock is not there yet."""
        if not self.active:
            return
        under_way = zip(self.targets, self.requests, strict=True)
        missing = {server for server, request in under_way if not request.Test()}
        for server, clock in zip(self.servers, self.clocks, strict=True):
            if server in missing:
                yield Wait(f"the {self.reading} of pull {self.count}", server, self.reads)
            if self.reading == "heads" and self.least is not None and clock[0] < self.least:
                yield Wait(f"clock {self.least}, which has come to {clock[0]},", server, self.count, patient=True)

    @property
    def applied(self) -> dict[int, int]:
        """How much of our ring each server had applied when its weights were read."""
        return {server: int(line[0]) for server, line in zip(self.servers, self.lines, strict=True)}

    @property
    def rate(self) -> float:
        """The learning rate the servers use."""
        return float(self.clocks[0, 1:2].view(np.float64)[0])

    def seen(self, versions: np.ndarray) -> None:
        """Write the version of each shard that this pull brought."""
        for server in self.servers:
            versions[[shard.index for shard in self.memory_layout.held[server]]] = self.versions[server]

    def _training_region(self) -> str:
        return "short" if "short" in self.memory_layout.regions else "weights"

    def _get(self, into: np.ndarray, server: int, offset: int) -> None:
        self.requests.append(self.weights_window.get(into, server, offset))
        self.targets.append(server)
        self.bytes += into.nbytes

    def _read_heads(self) -> None:
        self.reading, self.requests, self.targets, self.reads = "heads", [], [], self.reads + 1
        for server, clock in zip(self.servers, self.clocks, strict=True):
            self._get(clock, server, 0)
            self._get(self.versions[server], server, self.memory_layout.version_offset)

    def _read_weights(self) -> None:
        # Between the clock, or the versions, and the weights that they promise.
        self.weights_window.sync()
        self.reading, self.requests, self.targets, self.runs = "weights", [], [], []
        self.reads += 1
        into = self.halves if self.region == "short" else self.latest
        for server, line in zip(self.servers, self.lines, strict=True):
            wanted = self._wanted(server)
            for start, size, offset in self.memory_layout.runs(server, self.region, wanted):
                start = self.holding.starts[start]
                self._get(into[start : start + size], server, offset)
                self.runs.append((start, size))
            for shard in self.memory_layout.held[server]:
                if shard.index in wanted:
                    self.traffic[f"{shard.layer} pull"] += into.itemsize * shard.size
            # After the weights: an own push taken for applied too early is only late, one too late counts twice.
            self._get(line, server, self.memory_layout.line_offset(self.ring))

    def _wanted(self, server: int) -> frozenset[int]:
        """Shards that have changed since we read them; with clocks all of them, whose versions may be on the way."""
        if self.least is not None:
            return self.holding.pulled
        changed = self.versions[server] != self.known[server]
        held = self.memory_layout.held[server]
        return self.holding.pulled.intersection(held[place].index for place in np.flatnonzero(changed))

    def _finish(self) -> None:
        for start, size in self.runs if self.region == "short" else ():
            part = slice(start, start + size)
            bfloat16.lengthen(self.halves[part], self.latest[part].view(np.uint32))
        for server in self.servers:
            self.known[server][:] = self.versions[server]
        trace.record("pull", int(self.began * 1e9), row="pull")
        self.active = False
        self.count += 1
