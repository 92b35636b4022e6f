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
from adam_mpi.server import mailbox, schedule, store
from adam_mpi.server.appliers import Appliers
from adam_mpi.server.mail import Inbox, Mail
from adam_mpi.server.published import Published
from adam_mpi.server.shelves import Shelves
from adam_mpi.server.stepper import Stepper

COUNTS = ("applied", "duplicates", "refused", "torn", "too_stale", "steps", "folded")
log = logging.getLogger(__name__)


class Server:
    def __init__(
        self, world: World, shelves: Shelves, published: Published, mail: Window,
        window: Window, post: Post, directory: Path, epoch_images: int, epochs_done: int,
    ) -> None:  # fmt: skip
        self.world, self.config, self.shelves, self.post, self.directory = world, world.config, shelves, post, directory
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
        self.clocks = [0] * len(shelves.pushers)
        self.staged: dict[int, list[Mail]] = defaultdict(list)
        self.images, self.total = epochs_done * epoch_images, self.config.train.epochs * epoch_images
        """Images applied so far, and those of the whole training: they set the learning rate."""
        self.counts: Counter[str] = Counter()
        self.leads: Counter[int] = Counter()
        self.delays: Counter[int] = Counter()

    @property
    def rate(self) -> float:
        return schedule.rate(self.config.optimiser, self.images, self.total)

    def start(self, state: dict[str, np.ndarray]) -> None:
        """Take over the state of our shards from flat vectors by name; memory is near the thread that fills it."""
        self.appliers.run((shard.index, partial(self.stepper.start, shard, state)) for shard in self.shards)
        self.published.rate[0] = self.rate

    def step(self) -> bool:
        self.mail.sync()
        self.window.sync()
        arrived = self.inbox.collect()
        # Between seeing that messages are there and reading them.
        self.mail.sync()
        for mail in arrived:
            self._stage(mail)
        ready = {shard: mails for shard in list(self.staged) if (mails := self._take_ready(shard))}
        if ready:
            self._apply(ready)
        if self.inbox.news:
            self._publish()
        return bool(arrived)

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
        if self.config.consistency.staleness > 0:
            return staged
        clock = min(mail.clock for mail in staged)
        parts = sorted((mail for mail in staged if mail.clock == clock), key=lambda mail: (mail.ring, mail.part))
        if sum(mail.part == mail.parts - 1 for mail in parts) < len(self.shelves.pushers):
            self.staged[shard] = staged
            return []
        later = [mail for mail in staged if mail.clock != clock]
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

    def _settle(self, mail: Mail) -> None:
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
            self.images += mail.images
            self.counts["applied"] += 1

    def _publish(self) -> None:
        """Weights are in place: let it be seen that they are, acknowledge, and only then show the clock."""
        self.window.sync()
        self.inbox.acknowledge()
        self.published.rate[0] = self.rate
        self.published.clock[0] = min(self.clocks)
        self.window.sync()

    def hear(self, message: dict[str, Any]) -> None:
        """An order of the head: write the shards; with the final one tell the last figures."""
        self.world.injector.at("store")
        head = self.world.layout.head
        path = self.directory / message["snapshot"] / f"server-{self.world.rank:05d}.h5"
        if not path.exists():
            store.write(path, self.shards, self.stepper.state(), self.published.versions)
        self.post.send({"kind": "stored", "snapshot": message["snapshot"], "rank": self.world.rank}, head)
        if message["final"]:
            self.post.send({"kind": "stats", "final": True, **self.stats()}, head)

    def stats(self) -> dict[str, Any]:
        counts = self.counts + self.inbox.counts
        return {
            "role": "server",
            "rank": self.world.rank,
            "cpu": time.process_time(),
            **{key: counts[key] for key in COUNTS},
            "leads": dict(self.leads),
            "delays": dict(self.delays),
            "shards": len(self.shards),
            "parameters": sum(shard.size for shard in self.shards),
        }
