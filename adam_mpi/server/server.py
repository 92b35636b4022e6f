"""The server role: applies pushes to its shards, publishes the weights, and handles orders of the coordinator.

A push passes these functions, from its ring in the mailbox to its acknowledgement:

    Server.step
      ServerSession.collect_pushes       session.py
        PushQueue.collect_accepted       push_queue.py     bad messages are refused, those sent again are recognized
          RingReceiver.collect_messages  mailbox.py        (transport) messages that have arrived whole
      ServerSession.stage                session.py        StagedMessages.stage (push_queue.py) for each of its shards
      ServerSession.apply_staged         session.py        StagedMessages.take_ready: messages that can be applied now
        Stepper.step                     stepper.py        on the apply threads; with replication FoldedGradient.step
          kernels.steps                  kernels.py        (optimizer) sums of gradients, and steps
        ClippedClocks.hold               clipped_clocks.py where steps are clipped: sums wait for norms of all servers
        ServerSession._record_step       session.py        version and table of the shard
        ServerSession._replicate         session.py        Replicator.send (replication.py): the other copies step too
      ServerSession._complete            session.py        all copies have it: PushQueue.free_slot,
                                                           ServerProgress.advance
      ServerSession.publish              session.py        PushQueue.acknowledge_freed; the pusher reads it in
                                                           RingSender.step
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from adam_mpi.base import pools, trace
from adam_mpi.base.pools import ThreadPool
from adam_mpi.checkpoint import snapshot
from adam_mpi.checkpoint.write_behind import WriteBehind
from adam_mpi.cluster.control_messages import (
    ClockNorms,
    CompareCopies,
    FinishServer,
    HoldSnapshot,
    Message,
    RemoveOldStores,
    SetRateScale,
    SnapshotHeld,
    SnapshotWritten,
    Statistics,
    TakeSnapshot,
)
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.server import progress
from adam_mpi.server.comparison import Comparison
from adam_mpi.server.progress import ServerProgress
from adam_mpi.server.session import ServerSession
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Gathered
from adam_mpi.sharding.training_state import Position, RankState
from adam_mpi.transport.conservation import write_copies
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.ring_sender import RingSender


class Server:
    """The server role of one rank; `session` is its part of the current generation."""

    def __init__(self, generation: Generation, epoch_images: int, position: Position | None = None) -> None:
        """Begin the first generation; `epoch_images` and `position`: see `ServerProgress`."""
        world = generation.world
        self.config = world.config
        cores = pools.cores_of_threads(self.config.server.threads)
        self.thread_pool = ThreadPool(self.config.server.threads, cores)
        # A rank with other roles makes more threads, which would be bound with it.
        if world.place.roles == ("server",):
            pools.bind(cores[0])
        self.progress = ServerProgress(self.config, position or Position(0), epoch_images)
        self.counts = self.progress.counts
        self.shard_copies: dict[int, ShardCopy] = {}
        self.busy = 0.0
        self.remove_old_stores: Callable[[], None] = lambda: None
        self.comparison: Comparison | None = None
        """The comparison of copies that was ordered, until it is reported."""
        self.finishing: FinishServer | None = None
        """The order to finish, while the last records are written."""
        self.session = self._open_session(generation)

    def begin(
        self,
        generation: Generation,
        clocks: Mapping[int, int] = MappingProxyType({}),
        lacking: Sequence[tuple[int, int]] = (),
        acknowledged: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Begin a generation with the shard copies of the one before.

        `clocks`: clock of the next push of each pusher. `lacking`: (server, shard) of servers that need a whole copy of
        a shard. `acknowledged`: the last push of each pusher that was acknowledged; raises LostState if a shard that is
        served here lacks one.
        """
        earlier = self.session
        self.session = self._open_session(generation, clocks, lacking, acknowledged)
        self.counts.update(earlier.push_queue.counts)
        earlier.close()
        self.comparison = None
        self.finishing = None

    def _open_session(
        self,
        generation: Generation,
        clocks: Mapping[int, int] = MappingProxyType({}),
        lacking: Sequence[tuple[int, int]] = (),
        acknowledged: Mapping[int, int] = MappingProxyType({}),
    ) -> ServerSession:
        """Return the session of `generation`, and take over its shard copies."""
        session = ServerSession(
            generation,
            self.shard_copies,
            self.progress,
            self.thread_pool,
            clocks=clocks,
            lacking=lacking,
            acknowledged=acknowledged,
        )
        self.shard_copies = session.shard_copies
        return session

    def start(self, state: Mapping[str, np.ndarray] | Gathered) -> None:
        """Take over the state of our shards from flat vectors by name; memory is near the thread that fills it."""
        stepper = self.session.stepper
        shards = [own.shard for own in self.shard_copies.values()]
        self.thread_pool.run((shard.index, partial(stepper.start, shard, state)) for shard in shards)
        self.session.published.rate[0] = self.progress.rate

    def end(self) -> None:
        """End the threads and the store; nothing is applied any more."""
        self.session.close()
        self.thread_pool.close()

    def discard(self, shards: Collection[int]) -> None:
        """Mark our copies of `shards` as not whole: they may lack acknowledged pushes, or cannot be taken back."""
        for index, own in self.shard_copies.items():
            own.whole &= index not in shards

    def rewind(self, position: Position, version: int | None, clock: int) -> None:
        """Return to the `position` that all servers have when a generation begins, the fastest pusher being at `clock`.

        In synchronous training steps beyond `version` are taken back.
        """
        self.progress.rewind(position, version, clock)
        for own in self.shard_copies.values():
            if version is not None and own.whole and own.version > version:
                own.take_back()

    def open_store(self, path: Path, remove_old_stores: Callable[[], None]) -> None:
        """Keep a store in the file `path` during this generation; `remove_old_stores` removes earlier ones."""
        self.remove_old_stores = remove_old_stores
        self.session.store = WriteBehind(
            path=path,
            config=self.config.store,
            shards=self.session.shards,
            parts=list(self.session.stepper.state()),
            position_bytes=Position.packed_bytes(self.progress.position.batches.size),
            copy=self._copy_record,
            before_write=partial(self.session.world.injector.at, "write"),
        )

    def _copy_record(self, place: int, buffer: np.ndarray) -> tuple[int, int, float]:
        """Copy record `place` of the store into `buffer`: a shard, or after the last one the position.

        Return its version, the images of the position, and the batches that the shard has been stepped on.
        """
        session = self.session
        position = self.progress.position
        if place == len(session.shards):
            buffer[:] = position.pack()
            return position.images, position.images, 0.0
        shard = session.shards[place]
        kept = session.stepper.state().values()
        for values, part in zip(kept, np.split(buffer, len(kept)), strict=True):
            part[:] = values[shard.index].view(np.uint8)
        version = int(session.published.versions[place])
        return version, position.images, self.shard_copies[shard.index].batches

    def step(self) -> bool:
        """Do what a server can do now, without waiting; return whether anything was done."""
        session = self.session
        arrived = session.collect_pushes()
        began = time.perf_counter()
        for message in arrived:
            session.stage(message)
        applied = session.apply_staged()
        replicated = session.step_replicator()
        session.publish()
        if self.comparison is not None:
            self._report_comparison(self.comparison)
        if arrived:
            self.busy += time.perf_counter() - began
        self._write_store()
        return replicated or applied or bool(arrived)

    def _write_store(self) -> None:
        """Continue to write the store, and a snapshot that was ordered; finish when the last record is written."""
        session = self.session
        if session.store is not None:
            session.store.step()
        if session.barrier.reached(session.clocks.clocks):
            name = snapshot.file_name(session.world.rank)
            state = session.stepper.state()
            with trace.span("snapshot"):
                batches = np.array([self.shard_copies[shard.index].batches for shard in session.shards])
                session.barrier.copy_state(
                    name,
                    session.shards,
                    state=state,
                    versions=session.published.versions,
                    batches=batches,
                    position=self.progress.position,
                )
        while (report := session.barrier.written()) is not None:
            self._send_to_coordinator(SnapshotWritten("server", report))
        if self.finishing is not None and (session.store is None or session.store.close()):
            self._report_final_statistics(self.finishing)

    def _report_final_statistics(self, order: FinishServer) -> None:
        """Report the final statistics: all that this server has to write is written."""
        self.finishing = None
        if order.copies:
            whole = {index: own.weights for index, own in self.shard_copies.items() if own.whole and not own.behind}
            write_copies(Path(order.copies), self.session.world.place.member, whole)
        self._send_to_coordinator(Statistics(self.stats(), final=True))

    def _send_to_coordinator(self, message: Message) -> None:
        """Send `message` to the coordinator."""
        self.session.generation.channel.send(message, self.session.world.layout.coordinator)

    def handle(self, message: Message) -> None:
        """Handle an order of the coordinator about snapshots, copies, the store, the rate, or the end."""
        session = self.session
        match message:
            case HoldSnapshot():
                session.world.injector.at("store")
                self._send_to_coordinator(SnapshotHeld("server", list(session.barrier.hold())))
            case TakeSnapshot():
                session.barrier.set_limits(message.clocks, Path(message.folder))
            case CompareCopies():
                self.comparison = Comparison(session)
            case RemoveOldStores():
                if session.store is not None:
                    # Large files take long to remove, on some disks forever.
                    threading.Thread(target=self.remove_old_stores, name="remove old stores", daemon=True).start()
            case SetRateScale():
                session.set_rate_scale(message.scale)
                self._send_to_coordinator(Statistics(self.stats()))
            case FinishServer():
                self.finishing = message
            case ClockNorms():
                assert session.clipped is not None, "servers send norms where they clip"
                session.clipped.receive(message)
            case _:
                raise TypeError(f"a server does not handle {message}")

    def _report_comparison(self, comparison: Comparison) -> None:
        """Report `comparison` when all copies of what is served here have been compared."""
        if (result := comparison.result()) is not None:
            self._send_to_coordinator(result)
            self.comparison = None

    def export_state(self, state: RankState) -> None:
        """Write what this server brings into the next generation into `state`."""
        session = self.session
        owners = session.memory_layout.strip_of_shard
        whole = {index: own for index, own in self.shard_copies.items() if own.whole}
        state.copies = {index: own.version for index, own in whole.items()}
        state.behind = {index: owners[index] for index, own in whole.items() if own.behind}
        state.began = dict(session.began)
        if self.progress.synchronous:
            state.firm = frozenset(index for index, own in whole.items() if own.firm)
        state.served = frozenset(session.place)
        reached = dict(zip(session.push_queue.members, session.clocks.clocks, strict=True))
        state.progress = replace(state.progress, reached=reached)
        if session.memory_layout.strips > 1 and CODECS[self.config.push.codec].feedback:
            state.tables = {index: dict(own.table) for index, own in self.shard_copies.items()}
        state.resumed_at = session.clocks.resumed_at
        self.progress.export_state(state)

    def transfers(self) -> list[Any]:
        """Return the senders whose transfers may be under way when a generation ends: their memory has to stay."""
        return [sender for sender in self._ring_senders().values() if not sender.near]

    def awaits(self) -> list[Wait]:
        """Return what other servers owe: that they take records at once, and the norms of clocks that are clipped."""
        what = "acknowledgement of records for copies of its shards"
        waits = [Wait(what, server, sender.applied) for server, sender in self._ring_senders().items() if sender.sent]
        clipped = self.session.clipped
        if clipped is not None:
            what = "the norm of its part of a gradient"
            waits += [Wait(what, server, clipped.clock, patient=True) for server in clipped.awaited]
        return waits

    def _ring_senders(self) -> Mapping[int, RingSender[Any]]:
        """Return the senders of records, by server."""
        replicator = self.session.replicator
        return replicator.ring_senders if replicator is not None else {}

    def stats(self) -> dict[str, Any]:
        """Return the statistics that the coordinator collects."""
        return progress.server_statistics(self.session, self.busy)
