"""One rank's part in the generations of a parameter server: how each is opened, and how the next follows a loss."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from adam_mpi.base.errors import JobEnded, LostState, RankFailure, Stall
from adam_mpi.cluster import layout as layouts
from adam_mpi.cluster.control_messages import ClientClosed, ControlChannel, RankRaised
from adam_mpi.cluster.idle import Idle
from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World, gather
from adam_mpi.model.parameters import Tensor
from adam_mpi.parameter_server import shutdown
from adam_mpi.parameter_server.client import Client, Transfers
from adam_mpi.runtime.rank_runtime import LATE_SECONDS, Abandoned
from adam_mpi.runtime.recovery import RecoveryPlan, plan_recovery
from adam_mpi.server.server import Server
from adam_mpi.sharding import memory_layout as memory
from adam_mpi.sharding.training_state import Position, RankState
from adam_mpi.transport.generation import Generation

T = TypeVar("T")
BARRIER_SECONDS = 2.0
"""How long a barrier that every rank has reached may take to complete everywhere."""


class Membership:
    """The world, windows and roles of this rank, which a lost rank replaces by those of the next generation."""

    world: World
    memory_layout: memory.MemoryLayout
    generation: Generation
    channel: ControlChannel

    def __init__(self, size: int, seconds: float, client: Client) -> None:
        """Belong to no generation of the parameter server yet; `_open_generation` enters the first one."""
        self.size = size
        self.seconds = seconds
        self._client = client
        self.server: Server | None = None
        self.windows: list[Window] = []
        self.abandoned: list[Abandoned] = []
        self.left: set[int] = set()
        """Clients, by their member numbers, that have closed."""

    @property
    def client(self) -> bool:
        """Return whether this member of the parameter server may push and pull."""
        return "worker" in self.world.place.roles

    def _open_generation(self, world: World, settled: RecoveryPlan | None = None) -> None:
        """Open a generation of the parameter server: make this rank's windows and roles in `world`; collective."""
        config = world.config
        layout = world.layout
        tensor = Tensor("parameters/values", "parameters", (self.size,), 0, self.size)
        hosts = {rank: layout.places[rank].host for rank in layout.servers}
        shards = () if settled is None else self.memory_layout.shards
        holders = () if settled is None else settled.holders
        self.memory_layout = memory.plan_layout([tensor], hosts, layout.workers, config, shards=shards, holders=holders)
        self.world = world
        self.generation = Generation.open(world, self.memory_layout, {})
        self.channel = self.generation.channel
        self.windows = self.generation.windows
        if "server" in world.place.roles:
            self._open_server_role(settled)
        self._client.transfers = Transfers(self.generation, self.client)

    def _open_server_role(self, settled: RecoveryPlan | None) -> None:
        """Make the server role of this member of the library, or take it into this generation."""
        if self.server is None or settled is None:
            self.server = Server(self.generation, 0)
        else:
            self.server.discard([shard for rank, shard in settled.stale if rank == self.world.rank])
            self.server.rewind(Position.unpack(settled.position.pack()), None, 0)
            self.server.begin(self.generation, settled.clocks, settled.lacking)

    def _meet_members(self, what: str) -> None:
        """Wait until every member of the parameter server has called this; collective."""
        self.world.wait(self.world.comm.Ibarrier().Test, what, self.seconds)

    def _receive(self) -> None:
        """Handle control messages of other members: note who has closed; raise JobEnded if one has raised."""
        for source, message in self.channel.receive():
            if isinstance(message, RankRaised):
                raise JobEnded(message.text)
            self.left.add(self.world.layout.places[source].member)

    def _step(self) -> bool:
        """Do one round of all that this member has to do; return whether its server role had something to do."""
        worked = self.server is not None and self.server.step()
        self._receive()
        self.world.check()
        self._client.transfers.sync()
        self._client.step()
        return worked

    def _step_until(self, done: Callable[[], bool], what: str) -> None:
        """Step this member until `done`; raise Stall, with the servers that owe an answer, after `seconds`."""
        idle = Idle(self.world.config.cluster.poll)
        limit = time.monotonic() + self.seconds
        while not done():
            idle.back_off(self._step())
            if time.monotonic() > limit and not done():
                senders = self._client.transfers.ring_senders.values()
                owing = [str(self.world.layout.places[sender.server]) for sender in senders if sender.sent]
                whom = f" from {'; '.join(owing)}" if owing else ""
                raise Stall(f"{self.world.place} has waited seconds = {self.seconds:g} for {what}{whom}")

    def _leave(self) -> None:
        """Complete everything, send the servers that this member has closed, and wait until every rank closes."""
        self._step_until(lambda: self._client.idle, "pushes to be applied")
        if self.client:
            # A rank that does both has no `serve` loop that waits for its own message.
            for rank in self.world.layout.servers:
                if rank != self.world.rank:
                    self.channel.send(ClientClosed(), rank)
        barrier = self.world.comm.Ibarrier()
        try:
            self._step_until(lambda: self.channel.idle and barrier.Test(), "all ranks to close")
        except (RankFailure, MPI.Exception):
            # A rank that is lost after all have closed is not needed, and some have left already.
            if not self._completes(barrier):
                raise
            self.world.broken = True

    def _completes(self, barrier: MPI.Request) -> bool:
        """Return whether `barrier`, which a rank was lost in, completes nevertheless."""
        limit = time.monotonic() + BARRIER_SECONDS
        with suppress(MPI.Exception):
            while self.world.survivable and time.monotonic() < limit:
                if barrier.Test():
                    return True
                time.sleep(1e-3)
        return False

    def _free_windows(self) -> None:
        """Free the windows of the parameter server; after a loss they stay, as that would wait for the dead."""
        shutdown.unregister(self)
        for window in self.windows if not self.world.broken else ():
            window.free()

    def _survive_loss(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; if a member is lost meanwhile, call it again in the next generation."""
        while True:
            try:
                return work()
            except (RankFailure, MPI.Exception) as failure:
                self._recover(failure)

    def _recover(self, failure: Exception) -> None:
        """Enter the parameter server's next generation without the lost ranks; raise RankFailure if MPI cannot."""
        world = self.world
        world.broken = True
        if not world.survivable:
            text = world.describe(failure) if isinstance(failure, MPI.Exception) else str(failure)
            raise RankFailure(text) from failure
        with suppress(MPI.Exception):
            # A rank that raised has sent the reason before it died.
            self._receive()
        self._abandon()
        with shutdown.deadline(world, self.seconds), _own_signals():
            while True:
                try:
                    world = world.recover()
                    world.layout = keep_roles(world.layout, self.world.layout)
                    world.place = world.layout.places[world.rank]
                    self._enter_generation(world)
                    break
                except (RankFailure, MPI.Exception):
                    self._abandon()

    def _abandon(self) -> None:
        """Keep memory of the parameter server that late transfers may touch, and release what is older."""
        transfers = [self.channel, *self._client.abandon(), *(self.server.transfers() if self.server else ())]
        for earlier in self.abandoned:
            if time.monotonic() - earlier.since > LATE_SECONDS:
                earlier.forget()
        self.abandoned.append(Abandoned(self.windows, transfers))

    def _enter_generation(self, world: World) -> None:
        """Begin the library's generation of `world` with what ranks have; continue pushes and pulls; collective."""
        states = gather(world.comm, self._export_state(world))
        if not world.layout.workers:
            # All clients are lost: there is nothing left to serve.
            self.world = world
            self.channel = ControlChannel(world.control)
            self.server = None
            self.windows = []
            return
        gone = "; ".join(f"{place} died" for place in world.lost)
        shards = self.memory_layout.shards
        try:
            settled = plan_recovery(states, world.layout, shards, world.config.server.copies, np.inf)
        except LostState as loss:
            raise LostState(f"{gone}; {loss}; the job ends") from None
        self._open_generation(world, settled)
        self._meet_members("all ranks to continue")
        world.started = True
        self._client.resume()

    def _export_state(self, world: World) -> RankState:
        """Return what this member of the parameter server brings into the next generation."""
        unacknowledged = len(self._client.unacknowledged)
        state = RankState(world.place.member, detected=time.time(), unacknowledged=unacknowledged)
        if self.server is not None:
            self.server.export_state(state)
        return state


def arrange_roles(hosts: Sequence[str], servers: int) -> layouts.Layout:
    """Return the layout of a parameter server: the last `servers` ranks serve; a lone rank is client and server."""
    clients = max(1, len(hosts) - servers)
    places = []
    for rank, host in enumerate(hosts):
        client = rank < clients
        roles = (("worker",) if client else ()) + (("server",) if rank >= len(hosts) - servers else ())
        places.append(layouts.Place(rank, host, roles, rank if client else None, 0))
    return layouts.Layout(tuple(places), 1)


def keep_roles(layout: layouts.Layout, before: layouts.Layout) -> layouts.Layout:
    """Return `layout` with the roles that its members had `before`: a client of a program never becomes a server."""
    known = {place.member: place for place in before.places}
    places = [replace(known[p.member], rank=p.rank, host=p.host, member_id=p.member) for p in layout.places]
    return layouts.Layout(tuple(places), 1)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the program's own signal handlers, which a new generation of the library replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
