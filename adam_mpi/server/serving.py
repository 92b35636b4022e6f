"""The server role: takes pushes out of its mailbox, applies them shard by shard, and publishes the weights."""

import logging
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi.cluster import numa
from adam_mpi.cluster.post import Post
from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World
from adam_mpi.durable import snapshot, stores
from adam_mpi.durable.behind import WriteBehind
from adam_mpi.durable.cut import Cut
from adam_mpi.durable.position import Position
from adam_mpi.observe import trace
from adam_mpi.server import mailbox, schedule
from adam_mpi.server.appliers import Appliers
from adam_mpi.server.mail import Inbox, Mail
from adam_mpi.server.published import Published
from adam_mpi.server.shelves import Shelves
from adam_mpi.server.stepper import Stepper

COUNTS = ("applied", "duplicates", "refused", "torn", "too_stale", "steps", "folded")
NEVER = 1 << 62
log = logging.getLogger(__name__)


class Server:
    def __init__(
        self, world: World, shelves: Shelves, published: Published, mail: Window,
        window: Window, post: Post, epoch_images: int, position: Position | None = None,
    ) -> None:  # fmt: skip
        self.world, self.config, self.shelves, self.post = world, world.config, shelves, post
        self.published, self.window, self.mail = published, window, mail
        self.shards = shelves.held[world.rank]
        self.place = {shard.index: place for place, shard in enumerate(self.shards)}
        self.inbox = Inbox(world, shelves, mail.memory, published)
        self.stepper = Stepper(self.config, self.shards, published, mail.memory, self.inbox.factors)
        cores = numa.threads_cores(self.config.server.threads)
        self.appliers = Appliers(self.config.server.threads, cores)
        # A rank with other roles makes more threads, which would be bound with it.
        if world.place.roles == ("server",):
            numa.bind(cores[0])
        self.feeding = shelves.feeding(world.rank)
        # Strips that push nothing to us are never waited for.
        self.clocks = [0 if ring in self.feeding else NEVER for ring in range(len(shelves.pushers))]
        self.staged: dict[int, list[Mail]] = defaultdict(list)
        self.position = position or Position(0)
        """Where training stands here; images applied so far and those of the whole training set the learning rate."""
        self.total = self.config.train.epochs * epoch_images
        self.first_clock = self.position.clock
        self.cut = Cut(len(shelves.pushers))
        self.store: WriteBehind | None = None
        self.counts: Counter[str] = Counter()
        self.busy = 0.0
        self.leads: Counter[int] = Counter()
        self.delays: Counter[int] = Counter()

    @property
    def rate(self) -> float:
        return schedule.rate(self.config.optimiser, self.position.images, self.total)

    def start(self, state: dict[str, np.ndarray]) -> None:
        """Take over the state of our shards from flat vectors by name; memory is near the thread that fills it."""
        self.appliers.run((shard.index, partial(self.stepper.start, shard, state)) for shard in self.shards)
        self.published.rate[0] = self.rate

    def write_behind(self, path: Path) -> None:
        """Keep a store there from now on."""
        room = Position.packed_bytes(self.position.batches.size)
        touched = partial(self.world.injector.at, "write")
        parts = list(self.stepper.state())
        self.store = WriteBehind(path, self.config.store, self.shards, parts, room, self._copy, touched)

    def _copy(self, place: int, buffer: np.ndarray) -> tuple[int, int]:
        """A record for the store: a shard, or after the last one the position."""
        if place == len(self.shards):
            buffer[:] = self.position.pack()
            return self.position.images, self.position.images
        shard, kept = self.shards[place], self.stepper.state().values()
        for values, part in zip(kept, np.split(buffer, len(kept)), strict=True):
            part[:] = values[shard.index].view(np.uint8)
        return int(self.published.versions[place]), self.position.images

    def step(self) -> bool:
        self.mail.sync()
        self.window.sync()
        arrived = self.inbox.collect()
        # Between seeing that messages are there and reading them.
        self.mail.sync()
        began = time.perf_counter()
        for mail in arrived:
            self._stage(mail)
        ready = {shard: mails for shard in list(self.staged) if (mails := self._take_ready(shard))}
        if ready:
            with trace.span("apply"):
                self._apply(ready)
        if self.inbox.news:
            self._publish()
        if arrived:
            self.busy += time.perf_counter() - began
        self._keep()
        return bool(arrived)

    def _keep(self) -> None:
        """Go on with what is written: the store, and a snapshot that is under way."""
        if self.store is not None:
            self.store.step()
        if self.cut.reached(self.clocks):
            name = snapshot.file_name(self.world.rank)
            with trace.span("snapshot"):
                self.cut.take(name, self.shards, self.stepper.state(), self.published.versions, self.position)
        while not self.cut.written.empty():
            self.post.send({"kind": "stored", "role": "server", **self.cut.written.get()}, self.world.layout.head)

    def _stage(self, mail: Mail) -> None:
        """Factors are for all shards of a layer that are held here, anything else for one."""
        if mail.kind != mailbox.FACTOR:
            self.staged[mail.shard].append(mail)
            return
        plan = self.inbox.factors[self.shelves.shards[mail.shard].layer]
        self.stepper.unpack(mail, plan)
        mail.shards = len(plan.shards)
        for shard in plan.shards:
            self.staged[shard.index].append(mail)

    def _take_ready(self, shard: int) -> list[Mail]:
        """What can be applied to a shard now: everything, or in synchronous training the parts of a whole clock."""
        staged = self.staged.pop(shard)
        held = [mail for mail in staged if not self.cut.allows(mail.ring, mail.clock)]
        if held:
            staged = [mail for mail in staged if self.cut.allows(mail.ring, mail.clock)]
            self.staged[shard] = held
        if self.config.consistency.staleness > 0 or not staged:
            return staged
        clock = min(mail.clock for mail in staged)
        parts = sorted((mail for mail in staged if mail.clock == clock), key=lambda mail: (mail.ring, mail.part))
        if sum(mail.part == mail.parts - 1 for mail in parts) < len(self.shelves.pushers) // self.shelves.strips:
            self.staged[shard] = staged + held
            return []
        later = [mail for mail in staged if mail.clock != clock] + held
        if later:
            self.staged[shard] = later
        return parts

    def _apply(self, ready: dict[int, list[Mail]]) -> None:
        """One optimiser step per shard on the sum of its messages, on all apply threads; then the books."""
        self.world.injector.at("apply")
        rate, jobs = self.rate, []
        for band in self.stepper.bands(ready):
            first = band[0].index
            mails, version = ready[first], int(self.published.versions[self.place[first]])
            delays = [version - mail.seen for mail in mails]
            self.delays.update(delays * len(band))
            jobs.append((first // len(band), partial(self.stepper.step, band, mails, delays, rate)))
        self.appliers.run(jobs)
        for shard, mails in ready.items():
            self.published.versions[self.place[shard]] += 1
            self.counts["steps"] += 1
            self.counts["folded"] += len(mails)
            for mail in mails:
                self._settle(mail)
            if self.store is not None:
                self.store.touch(self.place[shard])
        if self.store is not None:
            self.store.touch(len(self.shards))

    def _settle(self, mail: Mail) -> None:
        self.cut.begun[mail.ring] = max(self.cut.begun[mail.ring], mail.clock + 1)
        mail.shards -= 1
        if mail.shards:
            return
        self.inbox.settle(mail)
        self.stepper.release(mail)
        if mail.last:
            lead = mail.clock - min(self.clocks)
            self.leads[max(0, lead)] += 1
            if lead > self.config.consistency.staleness:
                self.counts["too_stale"] += 1
                log.error("push %d of %s is %d clocks ahead", mail.sequence, self.inbox.pusher(mail.ring), lead)
            self.clocks[mail.ring] = mail.clock + 1
            # The strips of a replica push the same images: they count once, with the last strip.
            first = mail.ring - mail.ring % self.shelves.strips
            if min(self.clocks[first : first + self.shelves.strips]) == mail.clock + 1:
                self.position.images += mail.images
            self.position.clock = self.first_clock + max(self.clocks[ring] for ring in self.feeding)
            self.position.add(self.inbox.batches(mail))
            self.counts["applied"] += 1
            trace.receives((mail.pusher, mail.sequence, self.world.rank))

    def _publish(self) -> None:
        """Weights are in place: let it be seen that they are, acknowledge, and only then show the clock."""
        self.window.sync()
        if self.store is not None:
            self.store.acknowledge(self.counts["applied"], self.position.images)
        self.inbox.acknowledge()
        self.published.rate[0] = self.rate
        self.published.clock[0] = min(self.clocks)
        self.window.sync()

    def hear(self, message: dict[str, Any]) -> None:
        """An order of the head about the snapshot, the store, or the end, before which the last figures are told."""
        head = self.world.layout.head
        match message["order"]:
            case "hold":
                self.world.injector.at("store")
                self.post.send({"kind": "held", "role": "server", "clocks": self.cut.hold()}, head)
            case "cut":
                self.cut.at(message["clocks"], Path(message["folder"]))
            case "forget":
                if self.store is not None:
                    stores.forget(self.store.path.parent)
            case "finish":
                if self.store is not None:
                    self.store.close()
                self.post.send({"kind": "stats", "final": True, **self.stats()}, head)

    def awaits(self) -> tuple[()]:
        """A server waits for nobody in particular."""
        return ()

    def stats(self) -> dict[str, Any]:
        counts = self.counts + self.inbox.counts
        return {
            "role": "server",
            "rank": self.world.rank,
            "cpu": time.process_time(),
            **{key: counts[key] for key in COUNTS},
            "busy": self.busy,
            "queue": sum(len(mails) for mails in self.staged.values()),
            "bytes": counts["bytes"],
            "rate": self.rate,
            "clocks": dict(zip(self.shelves.pushers, self.clocks, strict=True)),
            "leads": dict(self.leads),
            "delays": dict(self.delays),
            "shards": len(self.shards),
            "parameters": sum(shard.size for shard in self.shards),
            "store": self._store_figures(),
        }

    def _store_figures(self) -> dict[str, Any] | None:
        if self.store is None:
            return None
        behind, written = round(self.store.behind, 3), self.store.written
        return {"behind": behind, "bytes": written, "whole": self.store.whole}
