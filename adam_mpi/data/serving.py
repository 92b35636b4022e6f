"""The data rank: hands out the batches of each phase, prepared ahead of need, and counts those that are done."""

from collections import deque
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.post import Post
from adam_mpi.cluster.world import World
from adam_mpi.data import batch
from adam_mpi.data.course import Phase
from adam_mpi.data.order import Order
from adam_mpi.data.sets import DataSet


class DataServer:
    """Serves its share of a phase: the batches whose number leaves its place among the data ranks as remainder."""

    def __init__(self, world: World, data: DataSet, post: Post) -> None:
        self.world, self.data, self.config, self.post = world, data, world.config, post
        self.place, self.servers = world.layout.data.index(world.rank), len(world.layout.data)
        self.ahead = self.config.data.prefetch * len(world.layout.workers)
        self.phase: Phase | None = Phase(-1, "", 0)
        self.told = True
        self.served = 0
        self.asks: deque[tuple[int, np.ndarray]] = deque()
        self.upcoming: deque[int] = deque()
        self.prepared: deque[np.ndarray] = deque()
        self.sending: list[tuple[MPI.Request, np.ndarray]] = []
        self.finished = self.loss = self.correct = self.expected = 0.0

    def hear(self, message: dict[str, Any]) -> None:
        self.begin(None if message["phase"] is None else Phase(*message["phase"]))

    def begin(self, phase: Phase | None) -> None:
        """Start serving a phase; None answers every further ask with a stop."""
        self.phase, self.told = phase, phase is None
        self.prepared.clear()
        self.finished = self.loss = self.correct = 0.0
        if phase is not None:
            self.order = Order(phase, self.count(phase.part), self.config.train.batch, self.config.run.seed)
            self.upcoming = deque(range(self.place, len(self.order), self.servers))
            self.expected = sum(self.order[number].size for number in self.upcoming)

    def count(self, part: str) -> int:
        return getattr(self.data.description, part)

    @property
    def done(self) -> bool:
        """Whether every image of this rank's share has been reported as done."""
        return self.finished >= self.expected

    def step(self) -> bool:
        self.sending = [pair for pair in self.sending if not pair[0].Test()]
        worked = self._receive()
        if self.done and not self.told:
            self.told = True
            self.post.send({"kind": "stats", **self.stats()}, self.world.layout.head)
        # Asks of a phase that this rank has not entered yet stay in the queue.
        for _ in range(len(self.asks)):
            source, ask = self.asks.popleft()
            if not self._answer(source, ask):
                self.asks.append((source, ask))
        return self._prepare() or worked

    def _receive(self) -> bool:
        worked, status, comm = False, MPI.Status(), self.world.traffic
        while comm.Iprobe(tag=batch.ASK, status=status):
            ask = np.empty(batch.ASK_WORDS, np.int64)
            comm.Recv(ask, status.source, batch.ASK)
            self.asks.append((status.source, ask))
            worked = True
        while comm.Iprobe(tag=batch.REPORT, status=status):
            report = np.empty(batch.REPORT_WORDS)
            comm.Recv(report, status.source, batch.REPORT)
            self._count(report)
            worked = True
        return worked

    def _count(self, report: np.ndarray) -> None:
        phase, images, loss, correct, _ = report.tolist()
        assert self.phase is not None and phase == self.phase.number, "a report of another phase"
        self.finished += images
        self.loss += loss
        self.correct += correct

    def _answer(self, source: int, ask: np.ndarray) -> bool:
        """Answer an ask if that is possible now."""
        kind, slot, known, number, replica, replicas = ask[:6].tolist()
        phase = self.phase
        if phase is None:
            self._send(source, slot, batch.pack([batch.STOP], *self._nothing()))
        elif kind == batch.NEXT_PHASE:
            if phase.number <= known:
                return False
            header = [batch.PHASE, phase.number, batch.PARTS.index(phase.part), phase.epoch, self.count(phase.part)]
            self._send(source, slot, batch.pack(header, *self._nothing()))
        elif phase.number < known:
            return False
        elif kind == batch.SHARE:
            self._send(source, slot, self._pack(number, self.order.share(number, replica, replicas)))
        elif not self._prepare(1) and not self.prepared:
            self._send(source, slot, batch.pack([batch.EXHAUSTED, phase.number], *self._nothing()))
        else:
            self._send(source, slot, self.prepared.popleft())
        return True

    def _send(self, source: int, slot: int, message: np.ndarray) -> None:
        self.world.injector.at("batch")
        self.served += 1
        self.sending.append((self.world.traffic.Isend(message, source, batch.ANSWER + slot), message))

    def _prepare(self, most: int = 0) -> bool:
        """Get one more batch ready, as long as fewer than `most` (or the wanted number) are."""
        shared = self.phase is None or (self.phase.training and not self.config.asynchronous)
        if shared or len(self.prepared) >= (most or self.ahead) or not self.upcoming:
            return False
        number = self.upcoming.popleft()
        self.prepared.append(self._pack(number, self.order[number]))
        return True

    def _pack(self, number: int, images: np.ndarray) -> np.ndarray:
        phase = self.phase
        assert phase is not None
        pixels, labels = self.data.read(phase.part, images)
        header = [batch.BATCH, phase.number, batch.PARTS.index(phase.part), phase.epoch, number, images.size]
        return batch.pack(header, images, labels, pixels)

    def stats(self) -> dict[str, Any]:
        return {
            "role": "data",
            "rank": self.world.rank,
            "phase": -1 if self.phase is None else self.phase.number,
            "finished": self.finished,
            "loss": self.loss,
            "correct": self.correct,
            "done": self.done,
            "served": self.served,
        }

    def _nothing(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        empty = np.empty(0, np.int64)
        return empty, empty, np.empty(0, np.uint8)
