"""The server role: takes pushes out of its mailbox, applies them shard by shard, and publishes the weights."""

import logging
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi.cluster.post import Post
from adam_mpi.cluster.windows import Window
from adam_mpi.cluster.world import World
from adam_mpi.server import apply, mailbox, schedule, store
from adam_mpi.server.shelves import LINE, Shelves

SENT_AGAIN = "it has been applied before"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mail:
    """A message that has arrived."""

    ring: int
    position: int
    start: int
    """Place of its values in the mailbox, in 32-bit words."""
    void: bool
    """Counts as arrived, but its values are not applied."""
    pusher: int
    sequence: int
    clock: int
    shard: int
    images: int
    last: int
    seen: int


class Published:
    """The memory a server lets others read: its clock, a line per pusher, versions and weights of its shards."""

    def __init__(self, shelves: Shelves, server: int) -> None:
        self.memory = np.zeros(shelves.published_bytes(server) if shelves.held[server] else LINE, np.uint8)
        words = self.memory[: shelves.version_offset(server)].view(np.int64).reshape(-1, LINE // 8)
        self.clock, self.applied = words[0, :1], words[1:, 0]
        self.rate = words[0, 1:2].view(np.float64)
        start = shelves.version_offset(server)
        shards = shelves.held[server]
        self.versions = self.memory[start : start + 8 * len(shards)].view(np.int64)
        self.weights = {}
        for index, offset in shelves.offsets(server).items():
            size = 4 * shelves.shards[index].size
            self.weights[index] = self.memory[offset : offset + size].view(np.float32)


class Server:
    def __init__(
        self, world: World, shelves: Shelves, published: Published, mail: Window, window: Window, post: Post,
        directory: Path, epoch_images: int, epochs_done: int,
    ) -> None:  # fmt: skip
        self.world, self.config, self.shelves, self.post, self.directory = world, world.config, shelves, post, directory
        self.published, self.window, self.mail = published, window, mail
        self.shards = shelves.held[world.rank]
        self.place = {shard.index: place for place, shard in enumerate(self.shards)}
        self.velocity = {shard.index: np.zeros(shard.size, np.float32) for shard in self.shards}
        self.ring = mail.memory.view(np.uint32)
        self.collected = np.zeros(len(shelves.pushers), np.int64)
        self.sequences = np.zeros((len(self.shards), len(shelves.pushers)), np.int64)
        self.clocks = np.zeros(len(shelves.pushers), np.int64)
        self.freed: list[set[int]] = [set() for _ in shelves.pushers]
        self.staged: dict[int, deque[Mail]] = defaultdict(deque)
        self.counts: Counter[str] = Counter()
        self.images, self.total = epochs_done * epoch_images, self.config.train.epochs * epoch_images
        """Images applied so far, and those of the whole training: they set the learning rate."""
        self.leads: Counter[int] = Counter()
        self.delays: Counter[int] = Counter()

    @property
    def rate(self) -> float:
        return schedule.rate(self.config.optimiser, self.images, self.total)

    def start(self, weights: np.ndarray, velocity: np.ndarray) -> None:
        """Take over the state of our shards from flat vectors."""
        for shard in self.shards:
            self.published.weights[shard.index][:] = weights[shard.start : shard.stop]
            self.velocity[shard.index][:] = velocity[shard.start : shard.stop]
        self.published.rate[0] = self.rate

    def step(self) -> bool:
        self.window.sync()
        arrived = self._collect()
        for mail in arrived:
            self.staged[mail.shard].append(mail)
        applied = [shard for shard in self.staged if self._apply_ready(shard)]
        for shard in applied:
            if not self.staged[shard]:
                del self.staged[shard]
        self._publish()
        return bool(arrived)

    def _publish(self) -> None:
        """Acknowledge what has been dealt with, ring by ring without gaps, and then the clock."""
        if not any(self.freed):
            return
        self.window.sync()
        for ring, freed in enumerate(self.freed):
            while (position := int(self.published.applied[ring]) + 1) in freed:
                freed.remove(position)
                self.published.applied[ring] = position
        self.published.rate[0] = self.rate
        self.published.clock[0] = self.clocks.min()
        self.window.sync()

    def _collect(self) -> list[Mail]:
        """Everything that has arrived whole, ring by ring, in order."""
        arrived = []
        slots, slot_words = self.shelves.slots, self.shelves.slot_bytes // 4
        for ring in range(len(self.shelves.pushers)):
            while self.collected[ring] - self.published.applied[ring] < slots:
                position = int(self.collected[ring]) + 1
                start = (ring * slots + (position - 1) % slots) * slot_words
                if not mailbox.arrived(self.ring, start, slot_words, position):
                    break
                self.collected[ring] = position
                mail = self._read(ring, position, start)
                if mail is not None:
                    arrived.append(mail)
        return arrived

    def _read(self, ring: int, position: int, start: int) -> Mail | None:
        """The message in a slot; None, with the slot freed, if it is not for us to apply."""
        header = self.ring[start : start + mailbox.HEADER_WORDS].view(mailbox.HEADER)[0]
        trouble = self._trouble(header, ring)
        if trouble:
            self._refuse(header, ring, trouble)
            self.freed[ring].add(position)
            return None
        shard, values = self.shelves.shards[header["shard"]], start + mailbox.HEADER_WORDS
        void = not mailbox.finite(self.ring[values : values + shard.size])
        if void:
            self._refuse(header, ring, f"NaN or infinity for shard {shard.index} ({shard.layer})")
        names = ("pusher", "sequence", "clock", "shard", "images", "last", "seen")
        return Mail(ring, position, values, void, **{name: int(header[name]) for name in names})

    def _trouble(self, header: np.void, ring: int) -> str:
        if header["generation"] != self.world.generation:
            return f"it is of generation {header['generation']}, now is {self.world.generation}"
        if header["shard"] not in self.place:
            return f"shard {header['shard']} is not held here"
        size = self.shelves.shards[header["shard"]].size
        if header["values"] != size or header["kind"] != mailbox.DELTA:
            return f"{header['values']} values of kind {header['kind']} for shard {header['shard']} of {size}"
        if header["sequence"] <= self.sequences[self.place[header["shard"]], ring]:
            return SENT_AGAIN
        return ""

    def _refuse(self, header: np.void, ring: int, trouble: str) -> None:
        self.counts["duplicates" if trouble == SENT_AGAIN else "refused"] += 1
        log.error("push %d of %s not applied: %s", header["sequence"], self._pusher(ring), trouble)

    def _pusher(self, ring: int) -> str:
        return str(self.world.layout.places[self.shelves.pushers[ring]])

    def _apply_ready(self, shard: int) -> bool:
        """Apply what is staged for a shard; a synchronous step is taken only when every replica's part is there."""
        staged = self.staged[shard]
        if self.config.consistency.staleness > 0:
            self._apply(shard, list(staged))
            staged.clear()
            return True
        clock = min(mail.clock for mail in staged)
        parts = sorted((mail for mail in staged if mail.clock == clock), key=lambda mail: mail.ring)
        if len(parts) < len(self.shelves.pushers):
            return False
        self._apply(shard, parts)
        for mail in parts:
            staged.remove(mail)
        return True

    def _apply(self, shard: int, mails: list[Mail]) -> None:
        """One optimiser step on the sum of these messages."""
        self.world.injector.at("apply")
        settings, place = self.config.optimiser, self.place[shard]
        starts = np.array([mail.start for mail in mails if not mail.void], np.int64)
        numbers = (1 / self.config.train.batch, self.rate, settings.momentum, settings.decay)
        if starts.size:
            apply.momentum(
                self.published.weights[shard], self.velocity[shard], self.ring.view(np.float32), starts,
                *map(np.float32, numbers),
            )  # fmt: skip
        for mail in mails:
            self.delays[int(self.published.versions[place]) - mail.seen] += 1
            self._settle(mail)
        self.published.versions[place] += 1
        self.counts["steps"] += 1
        self.counts["folded"] += len(mails)

    def _settle(self, mail: Mail) -> None:
        """A message has been dealt with: it is not applied again, and its slot may be used again."""
        self.sequences[self.place[mail.shard], mail.ring] = mail.sequence
        self.freed[mail.ring].add(mail.position)
        if mail.last:
            lead = mail.clock - int(self.clocks.min())
            self.leads[max(0, lead)] += 1
            if lead > self.config.consistency.staleness:
                self.counts["too_stale"] += 1
                log.error("push %d of %s is %d clocks ahead", mail.sequence, self._pusher(mail.ring), lead)
            self.clocks[mail.ring] = mail.clock + 1
            self.images += mail.images
            self.counts["applied"] += 1

    def hear(self, message: dict[str, Any]) -> None:
        """An order of the head: write the shards, or finish."""
        self.world.injector.at("store")
        head = self.world.layout.head
        path = self.directory / message["snapshot"] / f"server-{self.world.rank:05d}.h5"
        if not path.exists():
            store.write(path, self.shards, self.published.weights, self.velocity, self.published.versions)
        self.post.send({"kind": "stored", "snapshot": message["snapshot"], "rank": self.world.rank}, head)
        if message["final"]:
            self.post.send({"kind": "stats", "final": True, **self.stats()}, head)

    def stats(self) -> dict[str, Any]:
        return {
            "role": "server",
            "rank": self.world.rank,
            **{key: self.counts[key] for key in ("applied", "duplicates", "refused", "too_stale", "steps", "folded")},
            "leads": dict(self.leads),
            "delays": dict(self.delays),
            "shards": len(self.shards),
            "parameters": sum(shard.size for shard in self.shards),
        }
