"""The pull client: reads the servers' weights one-sidedly, while the replica continues to compute."""

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from adam_mpi.base import trace
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.sharding.codecs import bfloat16
from adam_mpi.sharding.memory_layout import WorkerShards
from adam_mpi.sharding.rings import LINE, STEPPED
from adam_mpi.transport.generation import Generation


class PullClient:
    """Pull the weights of one worker: `start`, then `step` until it returns True; the weights are in `latest`.

    With a least clock it reads the clocks until every server has reached it, then all weights (one read of both might
    bring a new clock with old weights). Without one it reads the versions, then the shards that changed.
    """

    def __init__(self, generation: Generation, worker_shards: WorkerShards | None = None) -> None:
        """Pull the `worker_shards`, by default all, from the servers of `generation`."""
        self.world = generation.world
        self.memory_layout = memory_layout = generation.memory_layout
        self.weights_window = generation.weights_window
        self.worker_shards = worker_shards or WorkerShards(memory_layout)
        self.ring = memory_layout.pushers.index(self.world.rank)
        self.servers = [server for server in memory_layout.servers if self.worker_shards.pulls(server)]
        size = self.worker_shards.size
        self.latest = np.zeros(size, np.float32)
        """The weights that were read last, for the caller to copy; while a pull is active neither old nor new."""
        self.halves = np.zeros(size if "short" in memory_layout.regions else 0, np.uint16)
        self.versions = {server: np.zeros(len(memory_layout.served[server]), np.int64) for server in self.servers}
        self.known = {server: np.full(len(memory_layout.served[server]), -1, np.int64) for server in self.servers}
        self.clocks = np.zeros((len(self.servers), LINE // 8), np.int64)
        """Of each server: the clock, and the learning rate."""
        self.lines = np.zeros((len(self.servers), LINE // 8), np.int64)
        """Of each server: how much of this worker's ring it has stepped on."""
        self.requests: list[MPI.Request] = []
        self.targets: list[int] = []
        """The server of each request."""
        self.reads = 0
        self.active = False
        self.reading = ""
        """What is read now: "heads" (clocks and versions) or "weights"."""
        self.least: int | None = None
        """The clock that every server must reach before weights are read."""
        self.region = "weights"
        self.runs: list[tuple[int, int]] = []
        """The spans (start, size) of the worker's vector that are read now."""
        self.began = 0.0
        self.waited = 0.0
        """Seconds spent waiting for a clock."""
        self.count = 0
        self.bytes = 0
        self.traffic: Counter[str] = Counter()
        """Bytes of weights, by layer: "conv1 pull"."""

    def start(self, least: int | None = None, ema: bool = False) -> None:
        """Start a pull of weights of clock `least` or later, or of the newest; of their running average if `ema`."""
        assert not self.active, "one pull at a time"
        self.world.injector.at("pull")
        region = "ema" if ema and "ema" in self.memory_layout.regions else self._training_region()
        if region != self.region:
            self.region = region
            for known in self.known.values():
                known[:] = -1
        self.active = True
        self.least = least
        self.began = time.perf_counter()
        self._read_heads()

    def step(self) -> bool:
        """Continue the pull; return whether it has just been completed."""
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
        """Yield the servers whose answer is missing, and those that have not reached the clock."""
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
    def stepped(self) -> dict[int, int]:
        """Return how much of this worker's ring was in the weights of each server when they were read."""
        return {server: int(line[STEPPED]) for server, line in zip(self.servers, self.lines, strict=True)}

    @property
    def totals(self) -> dict[str, float]:
        """Return the number of pulls, their bytes, and the seconds spent waiting for clocks."""
        return {"count": self.count, "bytes": self.bytes, "waited": self.waited}

    @property
    def rate(self) -> float:
        """Return the learning rate that the servers use."""
        return float(self.clocks[0, 1:2].view(np.float64)[0])

    def seen(self, versions: np.ndarray) -> None:
        """Write the version of each shard that this pull brought into `versions`."""
        for server in self.servers:
            versions[[shard.index for shard in self.memory_layout.served[server]]] = self.versions[server]

    def _training_region(self) -> str:
        return "short" if "short" in self.memory_layout.regions else "weights"

    def _get(self, into: np.ndarray, server: int, offset: int) -> None:
        self.requests.append(self.weights_window.get(into, server, offset))
        self.targets.append(server)
        self.bytes += into.nbytes

    def _begin_reads(self, what: str) -> None:
        self.reading = what
        self.requests = []
        self.targets = []
        self.reads += 1

    def _read_heads(self) -> None:
        self._begin_reads("heads")
        for server, clock in zip(self.servers, self.clocks, strict=True):
            self._get(clock, server, 0)
            self._get(self.versions[server], server, self.memory_layout.version_offset)

    def _read_weights(self) -> None:
        # The clock, or the versions, must be read before the weights that they promise.
        self.weights_window.sync()
        self._begin_reads("weights")
        self.runs = []
        into = self.halves if self.region == "short" else self.latest
        for server, line in zip(self.servers, self.lines, strict=True):
            wanted = self._wanted(server)
            for global_start, size, offset in self.memory_layout.runs(server, self.region, wanted):
                start = self.worker_shards.starts[global_start]
                self._get(into[start : start + size], server, offset)
                self.runs.append((start, size))
            for shard in self.memory_layout.served[server]:
                if shard.index in wanted:
                    self.traffic[f"{shard.layer} pull"] += into.itemsize * shard.size
            # After the weights: a push that is taken for applied too early is only late, too late it counts twice.
            self._get(line, server, self.memory_layout.line_offset(self.ring))

    def _wanted(self, server: int) -> frozenset[int]:
        """Return the shards that have changed since they were read; with clocks all, whose versions may lag."""
        if self.least is not None:
            return self.worker_shards.pulled
        changed = self.versions[server] != self.known[server]
        held = self.memory_layout.served[server]
        return self.worker_shards.pulled.intersection(held[place].index for place in np.flatnonzero(changed))

    def _finish(self) -> None:
        for start, size in self.runs if self.region == "short" else ():
            part = slice(start, start + size)
            bfloat16.lengthen(self.halves[part], self.latest[part].view(np.uint32))
        for server in self.servers:
            self.known[server][:] = self.versions[server]
        trace.record("pull", int(self.began * 1e9), row="pull")
        self.active = False
        self.count += 1
