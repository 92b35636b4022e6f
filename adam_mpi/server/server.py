"""The server role: takes pushes out of its mailbox, applies them shard by shard, and publishes the weights."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from adam_mpi.base import numa, trace
from adam_mpi.base.buffer_pool import NOTHING
from adam_mpi.base.errors import LostState
from adam_mpi.base.text import number_ranges
from adam_mpi.base.thread_pool import ThreadPool
from adam_mpi.checkpoint import snapshot
from adam_mpi.checkpoint.disk_task import disk_seconds
from adam_mpi.checkpoint.snapshot_barrier import SnapshotBarrier
from adam_mpi.checkpoint.write_behind import WriteBehind
from adam_mpi.cluster.messages import (
    CompareCopies,
    CopiesCompared,
    FinishServer,
    HoldSnapshot,
    Message,
    RemoveOldStores,
    SnapshotHeld,
    SnapshotWritten,
    Statistics,
    TakeSnapshot,
)
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.cluster.windows import fence
from adam_mpi.server.fold import Fold
from adam_mpi.server.progress import ServerProgress
from adam_mpi.server.push_queue import PushQueue
from adam_mpi.server.replication import Record, Replicator, notes
from adam_mpi.server.stepper import Stepper, Work
from adam_mpi.sharding import message_format
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.memory_layout import MOST_BATCHES, RECORD_BATCHES
from adam_mpi.sharding.message_format import MOST_PARTS
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.sharding.shard_copy import ShardCopy
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.spans import Spans
from adam_mpi.transport.conservation import leave_copies
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.mailbox import ReceivedMessage
from adam_mpi.transport.published_weights import PublishedWeights

MOST_FOLDED = RECORD_BATCHES // MOST_BATCHES
COUNTS = ("applied", "duplicates", "refused", "torn", "too_stale", "steps", "folded")


class Server:
    def __init__(self, generation: Generation, epoch_images: int, position: Position | None = None) -> None:
        world = generation.world
        self.config = world.config
        cores = numa.threads_cores(self.config.server.threads)
        self.thread_pool = ThreadPool(self.config.server.threads, cores)
        # A rank with other roles makes more threads, which would be bound with it.
        if world.place.roles == ("server",):
            numa.bind(cores[0])
        self.progress = ServerProgress(self.config, position or Position(0), epoch_images)
        self.counts = self.progress.counts
        self.holdings: dict[int, ShardCopy] = {}
        self.push_queue: Any = None
        self.store: WriteBehind | None = None
        self.replicator: Replicator | None = None
        self.busy = 0.0
        self.enter(generation)

    def enter(
        self,
        generation: Generation,
        clocks: Mapping[int, int] = MappingProxyType({}),
        lacking: Sequence[tuple[int, int]] = (),
        acknowledged: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Begin a generation with the copies that we have; `clocks`: how far pushers are; `lacking`: see Replicator.

        `acknowledged`: the last push of each that was; raises LostState if a shard that is served here lacks one.
        """
        self.world = world = generation.world
        self.memory_layout = memory_layout = generation.memory_layout
        self.channel = generation.channel
        self.window = generation.weights_window
        self.mail = mail = generation.mailbox_window
        self.published = published = PublishedWeights(memory_layout, world.rank, self.window.memory)
        mirror = generation.replication_window
        self.shards = memory_layout.held[world.rank]
        self.place = {shard.index: place for place, shard in enumerate(self.shards)}
        self._hold()
        lacked = {shard for server, shard in lacking if server == world.rank}
        for index, holding in self.holdings.items():
            holding.behind = index in lacked
        self.counts.update(self.push_queue.counts if self.push_queue else {})
        self.push_queue = PushQueue(world, memory_layout, mail.memory, published)
        for (index, _), (ring, pusher) in product(self.place.items(), enumerate(self.push_queue.members)):
            self.push_queue.sequences[index, ring] = self.holdings[index].table.get(pusher, 0)
        self.began: dict[int, dict[int, int]] = defaultdict(dict)
        """Strip -> pusher -> the last of its pushes that was acknowledged when the generation began."""
        for ring, pusher in enumerate(self.push_queue.members):
            self.began[ring % memory_layout.strips][pusher] = acknowledged.get(pusher, 0)
        self._check_acknowledged()
        factors = self.push_queue.factors
        arena = (
            mirror.memory[memory_layout.peers.bytes : memory_layout.mirror_bytes].view(np.float32)
            if mirror
            else NOTHING
        )
        self.stepper = Stepper(self.config, self.shards, published, mail.memory, factors, self.holdings, arena)
        for lane in self.replicator.lanes.values() if self.replicator else ():
            lane.drop()
        self.replicator = None
        if mirror is not None and memory_layout.peers.count:
            mine = [(server, shard) for server, shard in lacking if shard in self.place]
            self.replicator = Replicator(
                generation, published, mirror, self.stepper, self.thread_pool, lacking=mine, taken=self.progress.taken
            )
        self.stepper.remembers = self.progress.synchronous and world.survivable
        for shard in self.shards:
            self.stepper.derive(shard.index)
        known = [clocks.get(pusher, 0) for pusher in self.push_queue.members]
        self.progress.enter(
            memory_layout, world.rank, known, [self.push_queue.pusher(ring) for ring in range(len(known))]
        )
        published.rate[0], published.clock[0] = self.progress.rate, self.progress.clock
        self.compared_before = 0, 0
        self.staged: dict[int, list[ReceivedMessage]] = defaultdict(list)
        writing = partial(world.injector.at, "snapshot")
        self.cut = SnapshotBarrier(len(memory_layout.pushers), disk_seconds(self.config), writing)
        self.cut.begun = known
        self.comparing: int | None = None
        """How many copies on other servers are to be compared, when somebody has asked for it."""
        self.finishing: FinishServer | None = None
        """The order to end, while the last is written."""

    def _check_acknowledged(self) -> None:
        """Raise LostState if a shard that is served here lacks a push that was acknowledged."""
        short = []
        for shard in self.shards:
            table, began = self.holdings[shard.index].table, self.began[self.memory_layout.owners[shard.index]]
            if any(table.get(pusher, 0) // MOST_PARTS < number for pusher, number in began.items()):
                short.append(shard.index)
        if short:
            raise LostState(f"{self.world.place}: shards {number_ranges(short)} lack acknowledged pushes; the job ends")

    def discard(self, shards: Collection[int]) -> None:
        """These copies may lack something acknowledged, or cannot be taken back: they are as good as none."""
        for index, holding in self.holdings.items():
            holding.whole &= index not in shards

    def go_back(self, position: Position, version: int | None, clock: int) -> None:
        """To where all servers stand when a generation begins, the fastest pusher at this clock.

        In synchronous training what has gone beyond a version is taken back.
        """
        self.progress.go_back(position, version, clock)
        for holding in self.holdings.values():
            if version is not None and holding.whole and holding.version > version:
                holding.take_back()

    def _hold(self) -> None:
        """Our copies in this generation: what is served here goes to where others read it, the rest away from there."""
        copied = self.memory_layout.copied[self.world.rank]
        emas = "ema" in self.memory_layout.regions
        kept = {shard.index: self.holdings.get(shard.index) or ShardCopy.empty(shard, emas) for shard in copied}
        for holding in kept.values():
            holding.move(np.empty_like(holding.weights), np.empty_like(holding.ema))
        self.holdings = self.published.take_over(self.shards, self.holdings) | kept
        for shard, place in self.place.items():
            self.published.versions[place] = self.holdings[shard].version

    def start(self, state: Mapping[str, np.ndarray | Spans]) -> None:
        """Take over the state of our shards from flat vectors by name; memory is near the thread that fills it."""
        shards = [holding.shard for holding in self.holdings.values()]
        self.thread_pool.run((shard.index, partial(self.stepper.start, shard, state)) for shard in shards)
        self.published.rate[0] = self.progress.rate

    def write_behind(self, path: Path, forget: Callable[[], None]) -> None:
        """Keep a store there from now on; one of an earlier generation gets no more. `forget` removes older ones."""
        self.forget = forget
        if self.store is not None:
            self.store.end()
        room = Position.packed_bytes(self.progress.position.batches.size)
        touched = partial(self.world.injector.at, "write")
        parts = list(self.stepper.state())
        self.store = WriteBehind(path, self.config.store, self.shards, parts, room, self._copy, touched)

    def _copy(self, place: int, buffer: np.ndarray) -> tuple[int, int]:
        """A record for the store: a shard, or after the last one the position."""
        position = self.progress.position
        if place == len(self.shards):
            buffer[:] = position.pack()
            return position.images, position.images
        shard, kept = self.shards[place], self.stepper.state().values()
        for values, part in zip(kept, np.split(buffer, len(kept)), strict=True):
            part[:] = values[shard.index].view(np.uint8)
        return int(self.published.versions[place]), position.images

    def step(self) -> bool:
        self.mail.sync()
        self.window.sync()
        arrived = self.push_queue.collect()
        # Between seeing that messages are there and reading them.
        self.mail.sync()
        began = time.perf_counter()
        for mail in arrived:
            self._stage(mail)
        ready = {shard: mails for shard in list(self.staged) if (mails := self._take_ready(shard))}
        if ready:
            with trace.span("apply"):
                self._apply(ready)
        worked = self._replicate() or bool(arrived or ready)
        if self.push_queue.news:
            self._publish()
        if self.comparing is not None:
            self._tell_compared()
        if arrived:
            self.busy += time.perf_counter() - began
        self._keep()
        return worked

    def _replicate(self) -> bool:
        if self.replicator is None:
            return False
        with trace.span("replicate"):
            return self.replicator.step()

    def _tell_compared(self) -> None:
        """The copies of all that is served here have been compared."""
        done, different = self._compared()
        if self.comparing is not None and done >= self.comparing:
            earlier, known = self.compared_before
            message = CopiesCompared(copies=done - earlier, different=different - known)
            self.channel.send(message, self.world.layout.head)
            self.comparing = None

    def _compared(self) -> tuple[int, int]:
        """Copies that were compared in this generation, and those of them that were different."""
        return (self.replicator.compared, self.replicator.found_different) if self.replicator else (0, 0)

    def _keep(self) -> None:
        """Go on with what is written: the store, and a snapshot that is under way."""
        if self.store is not None:
            self.store.step()
        if self.cut.reached(self.progress.clocks):
            name = snapshot.file_name(self.world.rank)
            with trace.span("snapshot"):
                self.cut.take(name, self.shards, self.stepper.state(), self.published.versions, self.progress.position)
        while (word := self.cut.written()) is not None:
            self.channel.send(SnapshotWritten("server", word), self.world.layout.head)
        if self.finishing is not None and (self.store is None or self.store.close()):
            self._finish(self.finishing)

    def _finish(self, order: FinishServer) -> None:
        """All that this server has to write is written: tell the last figures."""
        self.finishing = None
        if order.copies:
            kept = self.holdings.items()
            whole = {index: held.weights for index, held in kept if held.whole and not held.behind}
            leave_copies(Path(order.copies), self.world.place.member, whole)
        self.channel.send(Statistics(self.stats(), final=True), self.world.layout.head)

    def _stage(self, mail: ReceivedMessage) -> None:
        """Factors are for all shards of a layer that are held here, anything else for one."""
        mail.shards = len(mail.targets) + len(mail.known)
        if mail.targets and mail.kind == message_format.FACTOR:
            self.stepper.unpack(mail, self.push_queue.factors[self.memory_layout.shards[mail.shard].layer])
        for shard in mail.targets:
            self.staged[shard].append(mail)
        for shard in mail.known:
            if self.replicator is None:
                self._settle(mail)
            else:
                self.replicator.when_safe(shard, partial(self._settle, mail))

    def _take_ready(self, shard: int) -> list[ReceivedMessage]:
        """What can be applied to a shard now: everything, or in synchronous training the parts of a whole clock."""
        staged, held = self.staged.pop(shard), []
        if self.cut.limits is not None:
            held = [mail for mail in staged if not self.cut.allows(mail.ring, mail.clock)]
            staged = [mail for mail in staged if self.cut.allows(mail.ring, mail.clock)]
        if held:
            self.staged[shard] = held
        if self.config.consistency.staleness > 0 or not staged:
            if self.replicator is None:
                return staged
            # A record has room for the batches of so many messages.
            most = min(MOST_FOLDED, self.stepper.foldable(staged, self.memory_layout.shards[shard].size))
            if len(staged) > most:
                self.staged[shard] = staged[most:] + held
            return staged[:most]
        clock = min(mail.clock for mail in staged)
        parts = sorted((mail for mail in staged if mail.clock == clock), key=lambda mail: (mail.ring, mail.part))
        if (
            sum(mail.part == mail.parts - 1 for mail in parts)
            < len(self.memory_layout.pushers) // self.memory_layout.strips
        ):
            self.staged[shard] = staged + held
            return []
        later = [mail for mail in staged if mail.clock != clock] + held
        if later:
            self.staged[shard] = later
        return parts

    def _apply(self, ready: dict[int, list[ReceivedMessage]]) -> None:
        """One optimizer step per shard on the sum of its messages, on all apply threads; then the books."""
        self.world.injector.at("apply")
        rate, folds = self._rate(ready), {}
        works = self._works(ready)
        if self.replicator is None:
            shares: dict[int, list[Work]] = defaultdict(list)
            for band, mails, delays in works:
                shares[_owner(band) % self.config.server.threads].append((band, mails, delays))
            self.thread_pool.run((owner, partial(self.stepper.step, share, rate)) for owner, share in shares.items())
        else:
            made = [Fold(*work, rate) for work in works]
            folds = {shard.index: fold for fold in made for shard in fold.band}
            self.thread_pool.run((_owner(fold.band), partial(fold.step, self.stepper)) for fold in made)
        # Between the weights and the versions that promise them. A call into MPI might raise that a rank is lost: then
        # the step would be in the weights and in no table, and be taken again when its pushes come again.
        fence()
        for shard, mails in ready.items():
            self._book(shard, mails)
            self._pass_on(shard, mails, folds.get(shard), rate)
        self.counts["steps"] += len(ready)
        self.counts["folded"] += sum(map(len, ready.values()))
        if self.store is not None:
            self.store.touch(len(self.shards))
        self.world.injector.at("applied")

    def _works(self, ready: dict[int, list[ReceivedMessage]]) -> list[Work]:
        """The steps to take, and how stale each message is."""
        works: list[Work] = []
        for band in self.stepper.bands(ready):
            mails, version = ready[band[0].index], self.holdings[band[0].index].version
            delays = [version - mail.seen for mail in mails]
            for delay in delays:
                self.progress.delays[delay] += len(band)
            works.append((band, mails, delays))
        return works

    def _rate(self, ready: dict[int, list[ReceivedMessage]]) -> float:
        shard, mails = next(iter(ready.items()))
        return self.progress.rate_of(
            self.holdings[shard].version + 1, self.push_queue.batches(mails[0]), _images(mails)
        )

    def _book(self, shard: int, mails: list[ReceivedMessage]) -> None:
        """A shard has taken a step."""
        holding, place = self.holdings[shard], self.place[shard]
        holding.version += 1
        self.published.versions[place] = holding.version
        for mail in mails:
            holding.note(mail.pusher, mail.number)
            self.progress.applied(mail)
            self.cut.begun[mail.ring] = max(self.cut.begun[mail.ring], mail.clock + 1)
            if mail.last and mail.shard == shard:
                trace.receives((mail.pusher, mail.sequence, self.world.rank))
        if self.store is not None:
            self.store.touch(place)

    def _pass_on(self, shard: int, mails: list[ReceivedMessage], fold: Fold | None, rate: float) -> None:
        """To the other copies, if there are any; the messages of a step are settled when all of them have taken it."""
        if self.replicator is None or fold is None:
            self._settle_all(mails)
            return
        holding, done = self.holdings[shard], partial(self._settle_all, mails, fold)
        numbers = {mail.pusher: holding.table[mail.pusher] for mail in mails}
        words = notes(numbers, [self.push_queue.batches(mail) for mail in mails])
        values = fold.values(shard)
        step = holding.shard, holding.version, rate, values, words, done
        self.replicator.send(Record(*step, _images(mails), fold.counted))

    def _settle_all(self, mails: list[ReceivedMessage], fold: Fold | None = None) -> None:
        for mail in mails:
            self._settle(mail)
        if fold is not None:
            fold.release(self.stepper)

    def _settle(self, mail: ReceivedMessage) -> None:
        mail.shards -= 1
        if mail.shards > 0:
            return
        self.push_queue.settle(mail)
        self.stepper.release(mail)
        self.progress.settle(mail, self.push_queue.batches(mail))

    def _publish(self) -> None:
        """Weights are in place: let it be seen that they are, acknowledge, and only then show the clock."""
        self.window.sync()
        if self.store is not None:
            self.store.acknowledge(self.counts["applied"], self.progress.position.images)
        self.push_queue.acknowledge()
        self.published.rate[0], self.published.clock[0] = self.progress.rate, self.progress.clock
        self.window.sync()

    def handle(self, message: Message) -> None:
        """An order of the head about the snapshot, the store, or the end, before which the last figures are told."""
        head = self.world.layout.head
        match message:
            case HoldSnapshot():
                self.world.injector.at("store")
                self.channel.send(SnapshotHeld("server", list(self.cut.hold())), head)
            case TakeSnapshot():
                self.cut.at(message.clocks, Path(message.folder))
            case CompareCopies():
                self.compared_before = self._compared()
                self.comparing = self.replicator.compare() + self.replicator.compared if self.replicator else 0
            case RemoveOldStores():
                if self.store is not None:
                    # Large files take long to remove, on some disks for ever.
                    threading.Thread(target=self.forget, name="forget", daemon=True).start()
            case FinishServer():
                self.finishing = message
            case _:
                raise TypeError(f"a server does not handle {message}")

    def export_state(self, state: RankState) -> None:
        whole = {index: holding for index, holding in self.holdings.items() if holding.whole}
        state.copies = {index: holding.version for index, holding in whole.items()}
        state.behind = {index: self.memory_layout.owners[index] for index, holding in whole.items() if holding.behind}
        state.began = dict(self.began)
        if self.progress.synchronous:
            state.firm = frozenset(index for index, holding in whole.items() if holding.firm)
        state.served = frozenset(self.place)
        state.progress = replace(
            state.progress, reached=dict(zip(self.push_queue.members, self.progress.clocks, strict=True))
        )
        if self.memory_layout.strips > 1 and CODECS[self.config.push.codec].feedback:
            state.tables = {index: dict(holding.table) for index, holding in self.holdings.items()}
        self.progress.export_state(state)

    def tables(self) -> list[tuple[str, int, int]]:
        """(pusher, strip, the last of its pushes that every shard of that strip has, of those served here).

        Of everybody who pushes now, and of whoever has left something in one of them.
        """
        held: dict[int, list[dict[int, int]]] = defaultdict(list)
        for shard in self.shards:
            held[self.memory_layout.owners[shard.index]].append(self.holdings[shard.index].table)
        return [
            (str(pusher), strip, min(table.get(pusher, 0) for table in tables) // MOST_PARTS)
            for strip, tables in held.items()
            for pusher in sorted(self.began[strip].keys() | {pusher for table in tables for pusher in table})
        ]

    def transfers(self) -> list[Any]:
        return [lane for lane in self.replicator.lanes.values() if not lane.near] if self.replicator else []

    def awaits(self) -> list[Wait]:
        """What other servers have not taken of what their copies were sent; all of it they should take at once."""
        lanes = self.replicator.lanes.items() if self.replicator else ()
        what = "word that its copies are up to date"
        return [Wait(what, server, lane.applied) for server, lane in lanes if lane.sent]

    def stats(self) -> dict[str, Any]:
        counts = self.counts + self.push_queue.counts
        return {
            "role": "server",
            "generation": self.world.generation,
            "tables": self.tables(),
            "strips": sorted({self.memory_layout.owners[shard.index] for shard in self.shards}),
            "dropped": self.push_queue.counts["duplicates"],
            "went_on": self.progress.went_on_at,
            "rebuilt": self.replicator.rebuilt if self.replicator else 0,
            "rank": self.world.place.member,
            "cpu": time.process_time(),
            **{key: counts[key] for key in COUNTS},
            "busy": self.busy,
            "queue": sum(len(mails) for mails in self.staged.values()),
            "bytes": counts["bytes"],
            "rate": self.progress.rate,
            "clocks": dict(zip(self.push_queue.members, self.progress.clocks, strict=True)),
            "leads": dict(self.progress.leads),
            "delays": dict(self.progress.delays),
            "shards": len(self.shards),
            "parameters": sum(shard.size for shard in self.shards),
            "store": self._store_figures(),
        }

    def _store_figures(self) -> dict[str, Any] | None:
        if self.store is None:
            return None
        behind, written = round(self.store.behind, 3), self.store.written
        return {"behind": behind, "bytes": written, "whole": self.store.whole}


def _images(mails: Sequence[ReceivedMessage]) -> int:
    """Whose gradients are in these messages; those of a push that comes in parts are counted once."""
    return sum(mail.images for mail in mails if mail.part == 0)


def _owner(band: Sequence[Shard]) -> int:
    """The thread that steps on these shards is always the same: the one with this number, modulo how many there are."""
    return band[0].index // len(band)
