"""The parameter server for any MPI program: push and pull of ranges or of (index, value) pairs, with dependencies.

    server = ParameterServer(MPI.COMM_WORLD, size=1_000_000, servers=2)     # collective
    if not server.serve():                                                   # servers return when everybody is done
        pull = server.pull(first=0, count=100)
        values = server.wait(pull)
        server.push(gradient, first=0, after=[...])
    server.close()                                                           # collective

Everything returns a handle at once; transfers go on inside `step`, `wait` and `close`.
`after` names handles that must be complete before a push or pull starts: sequential consistency is `after=[the last]`,
bounded delay `after=[the one k before]`, eventual consistency no `after` at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster import layout as layouts
from adam_mpi.cluster.post import Post
from adam_mpi.cluster.windows import choose_kind
from adam_mpi.cluster.world import Idle, World
from adam_mpi.config import Config, Optimiser
from adam_mpi.errors import UserError
from adam_mpi.model.parameters import Tensor
from adam_mpi.server import mailbox, shelves
from adam_mpi.server.published import Published
from adam_mpi.server.serving import Server
from adam_mpi.server.shards import Shard
from adam_mpi.worker.lane import Lane

Filter = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(indices, values) -> which of them to send now; the rest is carried forward into the next push."""


def significant(threshold: float) -> Filter:
    """Send only values of at least this size."""
    return lambda indices, values: np.abs(values) >= threshold


@dataclass(eq=False)
class Handle:
    """A push or pull under way."""

    after: Sequence["Handle"]
    start: Callable[["Handle"], None]
    pending: int = -1
    """Transfers that are not complete; -1 before they have started."""
    values: np.ndarray | None = None
    """What a pull has read."""
    requests: list[MPI.Request] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.pending == 0

    @property
    def ready(self) -> bool:
        return all(handle.done for handle in self.after)


@dataclass(frozen=True)
class RangeLetter:
    """Values of consecutive parameters of one shard, or (index, value) pairs of it."""

    server: "ParameterServer"
    handle: Handle
    shard: Shard
    sequence: int
    values: np.ndarray
    first: int = 0
    indices: np.ndarray | None = None

    @property
    def lane(self) -> Lane["RangeLetter"]:
        return self.server.lanes[self.server.shelves.holders[self.shard.index][0]]

    def write(self, body: np.ndarray) -> np.ndarray:
        header, size = np.zeros((), mailbox.HEADER), self.values.size
        if self.indices is None:
            header["kind"], header["words"], header["first"] = mailbox.DELTA, size, self.first
            header["finite"] = self.lane.copy(body, self.values.view(np.uint32))
        else:
            header["kind"], header["words"] = mailbox.SPARSE, 2 * size
            body[:size] = self.indices
            header["finite"] = self.lane.copy(body[size:], self.values.view(np.uint32))
        header["pusher"], header["sequence"], header["values"] = self.server.ring, self.sequence, size
        header["shard"], header["last"] = self.shard.index, 1
        return header

    def batches(self) -> np.ndarray:
        return np.empty(0, np.int64)

    def settled(self) -> None:
        self.handle.pending -= 1


class ParameterServer:
    def __init__(
        self, comm: MPI.Comm, size: int, servers: int = 1, optimiser: str = "additive", rate: float = 1.0,
        initial: np.ndarray | None = None, keep: Filter | None = None, shard: int = 262_144, transport: str = "shared",
        copies: int = 1, threads: int = 1,
    ) -> None:  # fmt: skip
        """Collective. The last `servers` ranks serve (with one rank, it does both); all others may push and pull.

        With several `copies` a push is done when as many servers have it. Each server applies with so many `threads`.
        `optimiser` is "additive", "adagrad" or "descent" (the last two take gradients and step by `rate`).
        """
        if not 0 < servers < max(comm.size, 2):
            raise UserError(f"servers = {servers}: must leave a client among {comm.size} ranks")
        config = _config(optimiser, rate, shard, transport)
        config.server.copies, config.server.threads = copies, threads
        self.world = World(comm, config, lambda hosts, _: _arrange(hosts, servers))
        tensor = Tensor("parameters/values", "parameters", (size,), 0, size)
        places = self.world.layout.places
        self.shelves = shelves.plan(
            [tensor], {rank: places[rank].host for rank in self.world.layout.servers}, self.world.layout.workers, config
        )
        self.post, self.keep, self.size = Post(self.world.control), keep, size
        self.carried = np.zeros(size if keep else 0, np.float32)
        self.server = self._start_server(np.zeros(size, np.float32) if initial is None else initial)
        self.ring = self.shelves.pushers.index(self.world.rank) if self.client else -1
        self.lanes = {server: self._lane(server) for server in self.shelves.servers} if self.client else {}
        self.waiting: list[Handle] = []
        self.reading: list[Handle] = []
        self.sequence = 0
        self.world.wait(self.world.comm.Ibarrier().Test, "all ranks to start", config.cluster.seconds)

    @property
    def client(self) -> bool:
        return "worker" in self.world.place.roles

    def serve(self) -> bool:
        """On a server rank: serve until every client has closed, then True. On a client: False, at once."""
        if self.client:
            return False
        assert self.server is not None
        idle, gone = Idle("sleep"), 0
        while gone < len(self.world.layout.workers):
            worked = self.server.step()
            gone += sum(1 for _ in self.post.receive())
            self.world.check()
            idle.back_off(worked)
        return True

    def push(
        self, values: np.ndarray, first: int = 0, indices: np.ndarray | None = None, after: Sequence[Handle] = ()
    ) -> Handle:
        """Push values for parameters `first`, `first + 1`, ... or for those at `indices` (each at most once).

        The array must not be changed before the handle is done.
        """
        values = np.ascontiguousarray(values, np.float32)
        if self.keep is not None or indices is not None:
            return self._push_pairs(values, first, indices, after)
        self._check_range(first, values.size)

        def start(handle: Handle) -> None:
            for shard in self._touched(first, first + values.size):
                low, high = max(first, shard.start), min(first + values.size, shard.stop)
                part = values[low - first : high - first]
                self._send(RangeLetter(self, handle, shard, self._next(), part, first=low - shard.start))

        return self._begin(Handle(after, start))

    def pull(
        self, first: int = 0, count: int | None = None, indices: np.ndarray | None = None,
        after: Sequence[Handle] = (), into: np.ndarray | None = None,
    ) -> Handle:  # fmt: skip
        """Read parameters: a range, or those at `indices` (in increasing order); into a given array or a new one."""
        wanted = [(first, self.size - first if count is None else count)]
        if indices is not None:
            chosen = np.asarray(indices, np.int64)
            pieces = np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1)
            wanted = [(int(piece[0]), piece.size) for piece in pieces if piece.size]
        for start, size in wanted:
            self._check_range(start, size)
        total = sum(size for _, size in wanted)
        if into is not None and (into.dtype != np.float32 or into.shape != (total,) or not into.flags.c_contiguous):
            raise UserError(f"into: {into.dtype} of shape {into.shape}: must be {total} float32 without gaps")

        def begin(handle: Handle) -> None:
            handle.values = np.empty(total, np.float32) if into is None else into
            handle.pending, place = 1, 0
            for start, size in wanted:
                self._read(handle, handle.values[place : place + size], start)
                place += size
            self.reading.append(handle)

        return self._begin(Handle(after, begin))

    def wait(self, handle: Handle) -> np.ndarray | None:
        """Until the handle is complete; what a pull has read."""
        self.world.wait(lambda: self.step() and handle.done, "a push or pull", self.world.config.cluster.seconds)
        return handle.values

    def step(self) -> bool:
        """Move what is under way; True, so that it can stand in a condition."""
        if self.server is not None:
            self.server.step()
        self.mail.sync()
        self.window.sync()
        self.waiting = [handle for handle in self.waiting if not self._start_ready(handle)]
        for lane in self.lanes.values():
            lane.step()
        for handle in [handle for handle in self.reading if MPI.Request.Testall(handle.requests)]:
            self.reading.remove(handle)
            handle.pending = 0
        return True

    def close(self) -> None:
        """Collective: complete everything, let the servers go, free the windows."""
        seconds = self.world.config.cluster.seconds
        if self.client:
            self.world.wait(lambda: self.step() and self.idle, "pushes to be applied", seconds)
            # A rank that does both serves no loop that would receive its own word.
            for rank in self.world.layout.servers:
                if rank != self.world.rank:
                    self.post.send({"kind": "bye"}, rank)
        barrier = self.world.comm.Ibarrier()
        self.world.wait(lambda: self.step() and self.post.idle and barrier.Test(), "everybody to close", seconds)
        for window in (self.mail, self.window, self.mirror):
            if window is not None:
                window.free()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        lanes = any(lane.waiting or lane.sent for lane in self.lanes.values())
        return not (lanes or self.waiting or self.reading)

    def _start_server(self, initial: np.ndarray) -> Server | None:
        world, kind = self.world, choose_kind(self.world.config.cluster.transport, self.world.survivable)
        serves = "server" in world.place.roles
        size = self.shelves.published_bytes(world.rank) if serves else 0
        self.mail = kind.to_write(world.comm, world.node, self.shelves.mailbox_bytes if serves else 0)
        self.window = kind.to_read(world.comm, world.node, size)
        self.mirror, peers = None, self.shelves.peers
        if peers.count:
            self.mirror = kind.to_write(world.comm, world.node, self.shelves.mirror_bytes if serves else 0)
        if not serves:
            return None
        published = Published(self.shelves, world.rank, self.window.memory)
        server = Server(world, self.shelves, published, self.mail, self.window, self.post, 0, None, self.mirror)
        server.start({"weights": np.asarray(initial, np.float32)})
        return server

    def _lane(self, server: int) -> Lane[RangeLetter]:
        return Lane(self.shelves.rings, server, self.ring, self.mail, self.window)

    def _begin(self, handle: Handle) -> Handle:
        if not self._start_ready(handle):
            self.waiting.append(handle)
        return handle

    def _start_ready(self, handle: Handle) -> bool:
        if handle.ready:
            handle.pending = 0
            handle.start(handle)
        return handle.ready

    def _push_pairs(
        self, values: np.ndarray, first: int, indices: np.ndarray | None, after: Sequence[Handle]
    ) -> Handle:
        """Pairs, sent as far as the filter keeps them now."""
        chosen = np.arange(first, first + values.size) if indices is None else np.array(indices, np.int64)
        if chosen.size:
            self._check_range(int(chosen.min()), int(chosen.max()) - int(chosen.min()) + 1)
        if self.keep is not None:
            self.carried[chosen] += values
            kept = np.asarray(self.keep(chosen, self.carried[chosen]), bool)
            chosen = chosen[kept]
            values = self.carried[chosen]
            self.carried[chosen] = 0
        order = np.argsort(chosen, kind="stable")
        chosen, values = chosen[order], values[order]
        room = (self.shelves.slot_bytes // 4 - mailbox.HEADER_WORDS) // 2

        def start(handle: Handle) -> None:
            for shard in self._touched(int(chosen[0]), int(chosen[-1]) + 1) if chosen.size else ():
                low, high = np.searchsorted(chosen, [shard.start, shard.stop])
                for cut in range(low, high, room):
                    part = slice(cut, min(cut + room, high))
                    places = (chosen[part] - shard.start).astype(np.uint32)
                    self._send(RangeLetter(self, handle, shard, self._next(), values[part], indices=places))

        return self._begin(Handle(after, start))

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def _send(self, letter: RangeLetter) -> None:
        letter.handle.pending += 1
        letter.lane.waiting.append(letter)

    def _touched(self, first: int, last: int) -> list[Shard]:
        return [shard for shard in self.shelves.shards if shard.start < last and first < shard.stop]

    def _read(self, handle: Handle, into: np.ndarray, first: int) -> None:
        """Read consecutive parameters from the servers that hold them."""
        for server in self.shelves.servers:
            for start, size, offset in self.shelves.runs(server, "weights"):
                low, high = max(first, start), min(first + into.size, start + size)
                if low < high:
                    part = into[low - first : high - first]
                    handle.requests.append(self.window.get(part, server, offset + 4 * (low - start)))

    def _check_range(self, first: int, count: int) -> None:
        if first < 0 or first + count > self.size:
            raise UserError(f"parameters {first} to {first + count - 1}: there are {self.size}, numbered from 0")


def _config(optimiser: str, rate: float, shard: int, transport: str) -> Config:
    kinds: dict[str, dict[str, Any]] = {
        "additive": {"where": "worker"},
        "adagrad": {"kind": "adagrad"},
        "descent": {"kind": "momentum"},
    }
    if optimiser not in kinds:
        raise UserError(f"optimiser = {optimiser!r}: must be one of {', '.join(kinds)}")
    config = Config(optimiser=Optimiser(rate=rate, schedule="constant", **kinds[optimiser]))
    config.train.batch, config.server.shard, config.cluster.transport = 1, shard, transport
    return config


def _arrange(hosts: Sequence[str], servers: int) -> layouts.Layout:
    """The last ranks serve; alone, a rank is both."""
    clients = max(1, len(hosts) - servers)
    places = []
    for rank, host in enumerate(hosts):
        roles = (("worker",) if rank < clients else ()) + (("server",) if rank >= len(hosts) - servers else ())
        places.append(layouts.Place(rank, host, roles, rank if rank < clients else None, 0))
    return layouts.Layout(tuple(places), 1)
