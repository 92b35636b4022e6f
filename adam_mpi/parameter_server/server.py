"""The parameter server for any MPI program: push and pull of ranges or of (index, value) pairs, with dependencies.

    with ParameterServer(MPI.COMM_WORLD, size=1_000_000, servers=2) as server:   # collective
        if not server.serve():                                  # servers return when everybody is done
            pull = server.pull(first=0, count=100)
            values = server.wait(pull)
            server.push(gradient, first=0, after=[...])         # float32

Everything returns a handle at once; transfers go on inside `step`, `wait` and `close` (the end of the `with` block).
`after` names handles that must be complete before a push or pull starts: sequential consistency is `after=[the last]`,
bounded delay `after=[the one k before]`, eventual consistency no `after` at all.

All of it belongs to the main thread. An exception that nobody catches while a server is open, or inside its `with`
block, ends the job on all ranks, and so does an exit without `close`: the others would wait for ever.

Under Open MPI's `mpirun --with-ft ulfm` the others go on when a rank dies: with several `copies` another server takes
over, and what was pushed and not acknowledged is sent again under its old number, so that each push is applied once.
Whoever is left finds together inside of `step`, `wait`, `serve` and `close`; a client that calls none of them for
`seconds` ends the job. `MPI_Finalize` would wait for the dead: such a program ends without it.
"""

import signal
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.base.errors import JobEnded, LostState, RankFailure, Stall, UserError
from adam_mpi.cluster import layout as layouts
from adam_mpi.cluster.control_channel import ControlChannel
from adam_mpi.cluster.messages import ClientClosed, RankRaised
from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import Idle, World, gather
from adam_mpi.config import Config, Optimizer
from adam_mpi.model.parameters import Tensor
from adam_mpi.parameter_server import arguments, shutdown
from adam_mpi.parameter_server.handles import Handle, Landing, RangeMessage
from adam_mpi.runtime.rank_runtime import LATE_SECONDS, Abandoned
from adam_mpi.runtime.recovery import RecoveryPlan, plan_recovery
from adam_mpi.server.server import Server
from adam_mpi.sharding import memory_layout, message_format
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.sharding.shards import Shard
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.ring_sender import RingSender

Filter = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(indices, values) -> which of them to send now; the rest is carried forward into the next push."""
BARRIER_SECONDS = 2.0
"""How long a barrier that everybody has reached may take to be complete everywhere."""


def significant(threshold: float) -> Filter:
    """Send only values of at least this size."""
    return lambda indices, values: np.abs(values) >= threshold


class ParameterServer:
    def __init__(
        self,
        comm: MPI.Comm,
        size: int,
        servers: int = 1,
        optimizer: str = "additive",
        rate: float = 1.0,
        initial: np.ndarray | None = None,
        keep: Filter | None = None,
        shard: int = 262_144,
        transport: str = "shared",
        copies: int = 1,
        threads: int = 1,
        seconds: float = 60.0,
    ) -> None:
        """Collective. The last `servers` ranks serve (with one rank, it does both); all others may push and pull.

        With several `copies` a push is done when as many servers have it. Each server applies with so many `threads`.
        `optimizer` is "additive", "adagrad" or "descent" (the last two take gradients and step by `rate`).
        No wait takes longer than `seconds`.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UserError(f"made in thread {threading.current_thread().name}: it belongs to the main thread")
        if not 0 < servers < max(comm.size, 2):
            raise UserError(f"servers = {servers}: must leave a client among {comm.size} ranks")
        for name, number in {"size": size, "shard": shard, "copies": copies, "threads": threads}.items():
            if number < 1:
                raise UserError(f"{name} = {number}: must be at least 1")
        if not seconds > 0:
            raise UserError(f"seconds = {seconds}: must be above 0")
        config = _config(optimizer, rate, shard, transport)
        config.server.copies, config.server.threads, config.cluster.seconds = copies, threads, seconds
        first = np.zeros(size, np.float32) if initial is None else arguments.floats(initial, "initial values")
        if first.size != size:
            raise UserError(f"initial has {first.size} values: must have size = {size}")
        self.keep, self.size, self.seconds = keep, size, seconds
        self.memory_layout: memory_layout.MemoryLayout
        self.carried = np.zeros(size if keep else 0, np.float32)
        self.waiting: list[Handle] = []
        self.reading: list[Handle] = []
        self.letters: list[RangeMessage] = []
        """What is to be sent again in the next generation."""
        self.left: set[int] = set()
        """Clients, by their numbers for life, that have closed."""
        self.abandoned: list[Abandoned] = []
        self.sequence = 0
        self.server: Server | None = None
        self.lanes: dict[int, RingSender[RangeMessage]] = {}
        self.windows: list[Window] = []
        self._open(World(comm, config, lambda hosts, _: _arrange(hosts, servers)))
        if self.server is not None:
            self.server.start({"weights": first})
        self._meet("all ranks to start")
        self.world.begun = True
        shutdown.opened(self)

    def __enter__(self) -> "ParameterServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; or after an exception end the job, which would wait for this rank."""
        if error is None:
            self.close()
        elif self.world.comm.size > 1:
            shutdown.end(self.world, error)
        else:
            self._free()

    @property
    def client(self) -> bool:
        return "worker" in self.world.place.roles

    def serve(self) -> bool:
        """On a server rank: serve until every client has closed, then True. On a client: False, at once."""
        self._check_thread()
        if self.client:
            return False
        idle = Idle("sleep")
        while not all(self.world.layout.places[rank].member in self.left for rank in self.world.layout.workers):
            idle.back_off(self._carry_on(self._step))
        return True

    def push(
        self, values: np.ndarray, first: int = 0, indices: np.ndarray | None = None, after: Sequence[Handle] = ()
    ) -> Handle:
        """Push values for parameters `first`, `first + 1`, ... or for those at `indices`, summed where one comes twice.

        The array, of float32, must not be changed before the handle is done. Of a push with a NaN or an infinity the
        message that it is in is not applied: `refused` of the handle says so, and `wait` raises it.
        """
        self._check_thread()
        values = arguments.floats(values, "values")
        if indices is not None:
            chosen = arguments.places(indices, self.size, values.size)
            return self._push_pairs(*arguments.summed(chosen, values), after)
        first, count = arguments.range_of(first, values.size, self.size)
        if self.keep is not None:
            return self._push_pairs(np.arange(first, first + count), values, after)

        def start(handle: Handle) -> None:
            for shard in self._touched(first, first + count):
                low, high = max(first, shard.start), min(first + count, shard.stop)
                part = values[low - first : high - first]
                self._send(RangeMessage(self, handle, shard, self._next(), part, first=low - shard.start))

        return self._begin(Handle(after, start, f"push of {count} parameters from {first}"))

    def pull(
        self,
        first: int = 0,
        count: int | None = None,
        indices: np.ndarray | None = None,
        after: Sequence[Handle] = (),
        into: np.ndarray | None = None,
    ) -> Handle:
        """Read parameters: a range, or those at `indices`, in their order; into a given array or a new one."""
        self._check_thread()
        if indices is None:
            first, total = arguments.range_of(first, self.size - first if count is None else count, self.size)
            read, what = partial(self._read_range, first=first), f"pull of {total} parameters from {first}"
        else:
            chosen = arguments.places(indices, self.size)
            total, read, what = chosen.size, partial(self._read_chosen, chosen=chosen), f"pull of {chosen.size} indices"
        if into is not None and (into.dtype != np.float32 or into.shape != (total,) or not into.flags.c_contiguous):
            raise UserError(f"into: {into.dtype} of shape {into.shape}: must be {total} float32 without gaps")

        def begin(handle: Handle) -> None:
            handle.values = np.empty(total, np.float32) if into is None else into
            handle.pending, handle.requests, handle.landings = 1, [], []
            if handle not in self.reading:
                self.reading.append(handle)
            # Between what was seen to be applied and the weights that have it.
            self.generation.weights_window.sync()
            read(handle, handle.values)

        return self._begin(Handle(after, begin, what))

    def wait(self, handle: Handle) -> np.ndarray | None:
        """Until the handle is complete; what a pull has read. Raises UserError if something of a push was refused."""
        self._check_thread()
        self._carry_on(lambda: self._until(lambda: handle.done, handle.what))
        if handle.refused:
            raise UserError(handle.refused)
        return handle.values

    def step(self) -> bool:
        """Move what is under way; True, so that it can stand in a condition."""
        self._check_thread()
        self._carry_on(self._step)
        return True

    def close(self) -> None:
        """Collective: complete everything, let the servers go, free the windows."""
        self._check_thread()
        self._carry_on(self._leave)
        self._free()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        lanes = any(lane.waiting or lane.sent for lane in self.lanes.values())
        return not (lanes or self.waiting or self.reading)

    def _step(self) -> bool:
        """One round; whether a server had something to do."""
        worked = self.server is not None and self.server.step()
        self._hear()
        self.world.check()
        self.generation.mailbox_window.sync()
        self.generation.weights_window.sync()
        self.waiting = [handle for handle in self.waiting if not self._start_ready(handle)]
        for lane in self.lanes.values():
            lane.step()
        for handle in [handle for handle in self.reading if MPI.Request.Testall(handle.requests)]:
            self.reading.remove(handle)
            for landing in handle.landings:
                landing.land()
            handle.pending, handle.landings = 0, []
        return worked

    def _hear(self) -> None:
        """Take in what others say: that they have closed, or have raised."""
        for source, message in self.channel.receive():
            if isinstance(message, RankRaised):
                raise JobEnded(message.text)
            self.left.add(self.world.layout.places[source].member)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        """Step until it is done; raise Stall, with the names of those who do not answer, after `seconds`."""
        idle, limit = Idle(self.world.config.cluster.poll), time.monotonic() + self.seconds
        while not done():
            idle.back_off(self._step())
            if time.monotonic() > limit and not done():
                owing = [str(self.world.layout.places[lane.server]) for lane in self.lanes.values() if lane.sent]
                whom = f" from {'; '.join(owing)}" if owing else ""
                raise Stall(f"{self.world.place} has waited seconds = {self.seconds:g} for {what}{whom}")

    def _meet(self, what: str) -> None:
        """Collective: go on when everybody is here."""
        self.world.wait(self.world.comm.Ibarrier().Test, what, self.seconds)

    def _leave(self) -> None:
        """Complete everything, tell the servers that this client is done, and wait until everybody is."""
        self._until(lambda: self.idle, "pushes to be applied")
        if self.client:
            # A rank that does both serves no loop that would receive its own word.
            for rank in self.world.layout.servers:
                if rank != self.world.rank:
                    self.channel.send(ClientClosed(), rank)
        barrier = self.world.comm.Ibarrier()
        try:
            self._until(lambda: self.channel.idle and barrier.Test(), "everybody to close")
        except (RankFailure, MPI.Exception):
            # Who is lost after everybody has come is missed by nobody, and some have left already.
            if not self._completes(barrier):
                raise
            self.world.broken = True

    def _completes(self, barrier: MPI.Request) -> bool:
        limit = time.monotonic() + BARRIER_SECONDS
        with suppress(MPI.Exception):
            while self.world.survivable and time.monotonic() < limit:
                if barrier.Test():
                    return True
                time.sleep(1e-3)
        return False

    def _free(self) -> None:
        """Give the windows back; after a loss that would wait for the dead."""
        shutdown.closed(self)
        for window in self.windows if not self.world.broken else ():
            window.free()

    def _check_thread(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UserError(f"used in thread {threading.current_thread().name}: it belongs to the main thread")

    # What belongs to one generation, and how the next one is entered.

    def _carry_on(self, work: Callable[[], Any]) -> Any:
        """Do something in which a rank may be found dead; then it is done again, in the next generation."""
        while True:
            try:
                return work()
            except (RankFailure, MPI.Exception) as failure:
                self._recover(failure)

    def _recover(self, failure: Exception) -> None:
        """Go on without whoever is lost, where MPI can; raise what has happened where it cannot."""
        world = self.world
        world.broken = True
        if not world.survivable:
            text = world.describe(failure) if isinstance(failure, MPI.Exception) else str(failure)
            raise RankFailure(text) from failure
        with suppress(MPI.Exception):
            # Whoever has raised has told so before it went.
            self._hear()
        self._abandon()
        with shutdown.watched(world, self.seconds), _own_signals():
            while True:
                try:
                    world = world.recover()
                    world.layout = _same_roles(world.layout, self.world.layout)
                    world.place = world.layout.places[world.rank]
                    self._enter(world)
                    break
                except (RankFailure, MPI.Exception):
                    self._abandon()

    def _abandon(self) -> None:
        """Keep what may still be touched by late transfers, and what has to be sent again, in the order of pushes."""
        sent = [letter for lane in self.lanes.values() for letter in (*lane.sent, *lane.waiting)]
        self.letters = sorted([*self.letters, *sent], key=lambda letter: letter.sequence)
        transfers = [self.channel, *self.lanes.values(), *(self.server.transfers() if self.server else ())]
        transfers += [request for handle in self.reading for request in handle.requests]
        for earlier in self.abandoned:
            if time.monotonic() - earlier.since > LATE_SECONDS:
                earlier.forget()
        self.abandoned.append(Abandoned(self.windows, transfers))
        self.lanes = {}

    def _enter(self, world: World) -> None:
        """Collective: begin the next generation with what everybody has, and go on with what is under way."""
        states = gather(world.comm, self._export_state(world))
        if not world.layout.workers:
            # Nobody is left to be served.
            self.world, self.channel, self.server, self.windows = world, ControlChannel(world.control), None, []
            return
        config, gone = world.config, "; ".join(f"{place} died" for place in world.gone)
        try:
            settled = plan_recovery(states, world.layout, self.memory_layout.shards, config.server.copies, np.inf)
        except LostState as loss:
            raise LostState(f"{gone}; {loss}; the job ends") from None
        self._open(world, settled)
        self._meet("all ranks to go on")
        world.begun = True
        for letter in self.letters:
            letter.lane.waiting.append(letter)
        self.letters = []
        for handle in self.reading:
            handle.start(handle)

    def _export_state(self, world: World) -> RankState:
        """What this rank brings into the next generation."""
        state = RankState(world.place.member, detected=time.time(), unacknowledged=len(self.letters))
        if self.server is not None:
            self.server.export_state(state)
        return state

    def _open(self, world: World, settled: RecoveryPlan | None = None) -> None:
        """Collective: the plan, the windows, and the roles of this rank, in the first generation or in the next one."""
        config, layout = world.config, world.layout
        tensor = Tensor("parameters/values", "parameters", (self.size,), 0, self.size)
        hosts = {rank: layout.places[rank].host for rank in layout.servers}
        shards, holders = ((), ()) if settled is None else (self.memory_layout.shards, settled.holders)
        self.memory_layout = memory_layout.plan([tensor], hosts, layout.workers, config, None, shards, holders)
        self.world = world
        self.starts = [shard.start for shard in self.memory_layout.shards]
        self.runs = {server: self.memory_layout.runs(server, "weights") for server in self.memory_layout.servers}
        self.generation = Generation.open(world, self.memory_layout, {})
        self.channel = self.generation.channel
        self.windows = self.generation.windows
        if "server" in world.place.roles:
            self._open_server(settled)
        self.ring = self.memory_layout.pushers.index(world.rank) if self.client else -1
        self.lanes = {server: self._lane(server) for server in self.memory_layout.servers} if self.client else {}

    def _open_server(self, settled: RecoveryPlan | None) -> None:
        if self.server is None or settled is None:
            self.server = Server(self.generation, 0)
        else:
            self.server.discard([shard for rank, shard in settled.stale if rank == self.world.rank])
            self.server.rewind(Position.unpack(settled.position.pack()), None, 0)
            self.server.begin(self.generation, settled.clocks, settled.lacking)

    def _lane(self, server: int) -> RingSender[RangeMessage]:
        return RingSender(
            self.memory_layout.rings,
            server,
            self.ring,
            self.generation.mailbox_window,
            self.generation.weights_window,
        )

    # Pushes and pulls.

    def _begin(self, handle: Handle) -> Handle:
        if not self._carry_on(partial(self._start_ready, handle)):
            self.waiting.append(handle)
        return handle

    def _start_ready(self, handle: Handle) -> bool:
        if handle.ready and handle.pending < 0:
            handle.pending = 0
            handle.start(handle)
        return handle.ready

    def _push_pairs(self, chosen: np.ndarray, values: np.ndarray, after: Sequence[Handle]) -> Handle:
        """Pairs in increasing order, sent as far as the filter keeps them now."""
        if self.keep is not None:
            self.carried[chosen] += values
            kept = np.asarray(self.keep(chosen, self.carried[chosen]), bool)
            chosen = chosen[kept]
            values = self.carried[chosen]
            self.carried[chosen] = 0
        room = (self.memory_layout.slot_bytes // 4 - message_format.HEADER_WORDS) // 2

        def start(handle: Handle) -> None:
            for shard in self._touched(int(chosen[0]), int(chosen[-1]) + 1) if chosen.size else ():
                low, high = np.searchsorted(chosen, [shard.start, shard.stop])
                for cut in range(low, high, room):
                    part = slice(cut, min(cut + room, high))
                    pairs = (chosen[part] - shard.start).astype(np.uint32)
                    self._send(RangeMessage(self, handle, shard, self._next(), values[part], indices=pairs))

        return self._begin(Handle(after, start, f"push of {chosen.size} indices"))

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def _send(self, letter: RangeMessage) -> None:
        letter.handle.pending += 1
        letter.lane.waiting.append(letter)

    def _touched(self, first: int, last: int) -> Sequence[Shard]:
        """The shards of these parameters."""
        if first >= last:
            return ()
        return self.memory_layout.shards[bisect_right(self.starts, first) - 1 : bisect_left(self.starts, last)]

    def _read_range(self, handle: Handle, into: np.ndarray, first: int) -> None:
        """Read consecutive parameters from the servers that hold them."""
        for server, runs in self.runs.items():
            for start, size, offset in runs:
                low, high = max(first, start), min(first + into.size, start + size)
                if low < high:
                    part = into[low - first : high - first]
                    handle.requests.append(self.generation.weights_window.get(part, server, offset + 4 * (low - start)))

    def _read_chosen(self, handle: Handle, into: np.ndarray, chosen: np.ndarray) -> None:
        """Read parameters at indices: picked where they lie if we can reach them there, else out of what is read."""
        order = np.argsort(chosen, kind="stable")
        ordered = chosen[order]
        for server, runs in self.runs.items():
            for start, size, offset in runs:
                low, high = np.searchsorted(ordered, [start, start + size])
                picked, where = ordered[low:high] - start, order[low:high]
                near = self.generation.weights_window.direct(server, offset, 4 * size) if picked.size else None
                if near is not None:
                    Landing(near.view(np.float32), picked, into, where).land()
                    continue
                for piece in arguments.pieces(picked) if picked.size else ():
                    first, last = int(picked[piece][0]), int(picked[piece][-1]) + 1
                    read = np.empty(last - first, np.float32)
                    handle.requests.append(self.generation.weights_window.get(read, server, offset + 4 * first))
                    handle.landings.append(Landing(read, picked[piece] - first, into, where[piece]))


def _config(optimizer: str, rate: float, shard: int, transport: str) -> Config:
    kinds: dict[str, dict[str, Any]] = {
        "additive": {"where": "worker"},
        "adagrad": {"kind": "adagrad"},
        "descent": {"kind": "momentum"},
    }
    if optimizer not in kinds:
        raise UserError(f"optimizer = {optimizer!r}: must be one of {', '.join(kinds)}")
    config = Config(optimizer=Optimizer(learning_rate=rate, schedule="constant", **kinds[optimizer]))
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


def _same_roles(layout: layouts.Layout, before: layouts.Layout) -> layouts.Layout:
    """Everybody who is left does what it did, under its new rank: a program's clients are not made into servers."""
    known = {place.member: place for place in before.places}
    places = [replace(known[p.member], rank=p.rank, host=p.host, born=p.member) for p in layout.places]
    return layouts.Layout(tuple(places), 1)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Signals stay the program's own, whatever a new generation does about them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
