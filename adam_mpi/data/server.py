"""The data rank: hands out the batches of each phase, prepared ahead of need, and counts those that are done."""

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.base import trace
from adam_mpi.cluster.control_channel import ControlChannel
from adam_mpi.cluster.messages import BeginPhase, ClosePhase, Message, Statistics, StopTraining
from adam_mpi.cluster.world import World
from adam_mpi.data import order
from adam_mpi.data.batch_loader import AHEAD, GROUP, BatchLoader, Block, PrefetchQueue
from adam_mpi.data.epoch_progress import EpochProgress
from adam_mpi.data.order import Order
from adam_mpi.data.sets import DataSet
from adam_mpi.sharding.joint_batches import Left, Piece
from adam_mpi.sharding.phases import Phase
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.rank_state import RankState
from adam_mpi.transport import batch_message

NOTHING = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8)


class DataServer:
    """Serves its share of a phase: the batches whose number leaves its place among the data ranks as remainder."""

    def __init__(
        self,
        world: World,
        data: DataSet,
        channel: ControlChannel,
        position: Position | None = None,
        drawn: int | None = None,
    ) -> None:
        """`position`: where an earlier job has got to; its batches are not handed out again.

        `drawn`: how many replicas the job began with, which uneven shares are drawn for.
        """
        self.data, self.config = data, world.config
        self.drawn = drawn or world.layout.replicas
        self.preparation = BatchLoader(data, self.config.run.seed)
        self.preparation.warm()
        self.owners = self._owners()
        self.served = self.bytes = 0
        self.busy = 0.0
        self.enter(world, channel, position or Position(0))

    def enter(
        self,
        world: World,
        channel: ControlChannel,
        position: Position,
        out: Collection[int] = (),
        mean: Sequence[float] = (0, 0),
        left: Mapping[int, Left] = MappingProxyType({}),
    ) -> None:
        """Begin a generation: nothing is handed out before the head names the phase.

        `position` has the batches that are not to be handed out; of those, workers have the ones that are `out` and
        will report them. `mean`: loss and correctness per image, as far as this epoch has got. `left`: batches that all
        replicas compute together and that some have pushed their shares of -> what others have to do.
        """
        self.left = left
        self.world, self.channel, self.resumed, self.out, self.mean = world, channel, position, frozenset(out), mean
        self.replicas = world.layout.replicas
        self.phase: Phase | None = Phase(-1, "", 0)
        self.news = False
        """Whether somebody's share is complete and the head does not know it."""
        self.asks: deque[tuple[int, np.ndarray]] = deque()
        self.early: list[np.ndarray] = []
        """Reports of a phase that this rank has not entered yet."""
        self.sending: list[tuple[MPI.Request, np.ndarray]] = []
        self.lines: list[PrefetchQueue] = []
        self.joint = self.static = False
        """Whether all replicas compute each batch together, each its share; or each replica has batches of its own."""
        self.tally: EpochProgress | None = None
        self.stopping = False

    def transfers(self) -> list[Any]:
        return [self.sending]

    def handle(self, message: Message) -> None:
        match message:
            case ClosePhase():
                self.close()
            case StopTraining():
                self.stop()
            case BeginPhase():
                phase = None if message.phase is None else Phase(*message.phase)
                self.begin(phase, self._done(phase))
            case _:
                raise TypeError(f"a data rank does not handle {message}")

    def begin(self, phase: Phase | None, done: np.ndarray | None = None) -> None:
        """Start serving a phase, without the batches that are `done`; None answers every further ask with a stop."""
        self.phase = phase
        if phase is None:
            return
        self.joint = phase.training and not self.config.asynchronous
        self.static = phase.training and self.config.asynchronous and self.config.static
        owners, count = self.owners if phase.training else None, self.count(phase.part)
        self.order = Order(phase, count, self.config.train.batch, self.config.run.seed, owners, self.joint)
        own = range(self.world.layout.data.index(self.world.rank), len(self.order), len(self.world.layout.data))
        done = None if done is None else done[: len(self.order)]
        resumes = phase.training and phase.epoch == self.resumed.epoch
        out, left = (self.out, self.left) if resumes else (frozenset(), {})
        if done is not None:
            done = done.copy()
            done[[*out, *(number for number, rest in left.items() if rest.pushed or rest.due)]] = False
        owed = {number: rest.pushed + self._images(number, rest.due) for number, rest in left.items()}
        shares = self.replicas if self.static else 1
        self.tally = EpochProgress(self.order, own, self._owner, shares, done, self.world.layout.partitions, owed)
        if self.world.generation and done is not None:
            self._go_on(own, done, owed)
        numbers = [number for number in own if not self.tally.done[number] and number not in out]
        begun = {number: len(rest.due) for number, rest in left.items()}
        self._line_up(phase, [number for number in numbers if begun.get(number, 1)], begun)
        self.news = self.tally.complete
        early, self.early = self.early, []
        for report in early:
            self._count(report)

    def _images(self, number: int, pieces: Sequence[Piece]) -> int:
        """In these shares of a batch."""
        return sum(self.order.share(number, *piece).size for piece in pieces)

    def _go_on(self, own: Iterable[int], done: np.ndarray, owed: Mapping[int, int]) -> None:
        """Count what was done before this generation, and what is skipped."""
        assert self.tally is not None
        images = skipped = 0
        for number in own:
            if done[number] or number in owed:
                lost = self._images(number, self.left[number].lost) if number in owed else 0
                images += self.order[number].size - owed.get(number, 0) - lost
                skipped += lost
        self.tally.go_on(images, self.mean, skipped)

    def close(self) -> None:
        """Enough replicas are done: hand out nothing more, and wait only for what is handed out."""
        assert self.tally is not None
        for line in self.lines:
            for number in line.close():
                self.tally.skip(number)
        self.news = True

    def stop(self) -> None:
        """The job ends inside this phase: hand out only what somebody has taken his share of already."""
        for line in self.lines:
            line.stop()
        self.stopping = True

    def _done(self, phase: Phase | None) -> np.ndarray | None:
        """What an earlier job has done of this phase."""
        if phase is None or not phase.training or phase.epoch != self.resumed.epoch:
            return None
        return self.resumed.batches

    def count(self, part: str) -> int:
        return getattr(self.data.description, part)

    def position(self) -> np.ndarray:
        """Which batches of the phase are done, as far as this rank knows; give it to `begin` to go on from here."""
        assert self.tally is not None
        return self.tally.done.copy()

    def step(self) -> bool:
        began = time.perf_counter()
        worked = self._serve()
        if worked:
            self.busy += time.perf_counter() - began
        return worked

    def _serve(self) -> bool:
        self.sending = [pair for pair in self.sending if not pair[0].Test()]
        worked = self._receive()
        # Asks of a phase that this rank has not entered yet, or of batches not ready yet, stay in the queue.
        # What a replica asks for is answered in that order, so that its strips all know when there is no more.
        waiting: set[int] = set()
        for _ in range(len(self.asks)):
            source, ask = self.asks.popleft()
            if source not in waiting and self._answer(source, ask):
                worked = True
            else:
                waiting.add(source)
                self.asks.append((source, ask))
        if self.news:
            self.news = False
            self.channel.send(Statistics(self.stats()), self.world.layout.head)
        return any([line.fill() for line in self.lines]) or worked

    def export_state(self, state: RankState) -> None:
        if self.tally is not None and self.phase is not None and self.phase.training:
            state.tally = self.phase.epoch, self.tally.finished, self.tally.loss, self.tally.correct

    def awaits(self) -> tuple[()]:
        """A server waits for nobody in particular."""
        return ()

    def stats(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "role": "data",
            "rank": self.world.place.member,
            "cpu": time.process_time(),
            "phase": -1 if self.phase is None else self.phase.number,
            "finished": tally.finished if tally else 0,
            "loss": tally.loss if tally else 0.0,
            "not_finite": tally.not_finite // tally.strips if tally else 0,
            "correct": tally.correct if tally else 0.0,
            "done": tally.complete if tally else True,
            "owed": tally.owed.tolist() if tally else [],
            "skipped": tally.skipped if tally else 0,
            "bad": self.data.bad(),
            "served": self.served,
            "bytes": self.bytes,
            "busy": self.busy + self.preparation.busy / self.config.data.threads,
            "queue": sum(line.ready for line in self.lines),
            "preparing": sum(len(line.started) - line.ready for line in self.lines),
            "asks": len(self.asks),
        }

    def _owners(self) -> np.ndarray | None:
        wanted = self.config.data.skew
        if wanted == "none":
            return None
        return order.owners(wanted, self.data.labels("train"), self.drawn, self.config.run.seed)

    def _owner(self, number: int) -> int:
        """The place of a batch's replica in the tally."""
        return self.order.owner(number, self.replicas) % self.replicas if self.static else 0

    def _line_up(self, phase: Phase, numbers: list[int], begun: Mapping[int, int]) -> None:
        """One line for everybody, or one for each replica; `begun`: see PrefetchQueue."""

        def start(numbers: list[int]) -> Future[list[Block]]:
            return self.preparation.start(phase, [self.order[number] for number in numbers])

        own: list[list[int]] = [[] for _ in range(self.replicas if self.static else 1)]
        for number in numbers:
            own[self._owner(number)].append(number)
        group = max(1, GROUP // self.config.train.batch)
        ahead = max(AHEAD * self.replicas // len(own), 2 * group)
        takers = self.replicas if self.joint else 1
        self.lines = [PrefetchQueue(mine, start, ahead, group, takers, begun) for mine in own]

    def _receive(self) -> bool:
        worked, status, comm = False, MPI.Status(), self.world.traffic
        while comm.Iprobe(tag=batch_message.ASK, status=status):
            ask = np.empty(status.Get_count(MPI.INT64_T), np.int64)
            comm.Recv(ask, status.source, batch_message.ASK)
            self.asks.append((status.source, ask))
            worked = True
        while comm.Iprobe(tag=batch_message.REPORT, status=status):
            report = np.empty(batch_message.REPORT_WORDS)
            comm.Recv(report, status.source, batch_message.REPORT)
            self._count(report)
            worked = True
        return worked

    def _count(self, report: np.ndarray) -> None:
        phase, images, loss, correct, number = report.tolist()
        # A share without images, all of them left out, keeps no phase waiting: its report may come after the end.
        if not images:
            return
        if self.phase is not None and phase > self.phase.number:
            self.early.append(report)
            return
        assert self.phase is not None and phase == self.phase.number and self.tally, "a report of another phase"
        self.news |= self.tally.report(int(number), int(images), loss, correct)

    def _answer(self, source: int, ask: np.ndarray) -> bool:
        """Answer an ask if that is possible now."""
        kind, slot, known, number, replica, replicas, *edges = ask.tolist()
        phase, columns = self.phase, [slice(a, b or None) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        if phase is None or (self.stopping and not (kind == batch_message.SHARE and self._begun(number))):
            self._send(source, slot, batch_message.pack([batch_message.STOP], *NOTHING))
        elif kind == batch_message.NEXT_PHASE:
            return phase.number > known and self._tell_phase(source, slot, phase)
        elif phase.number < known:
            return False
        elif phase.number > known:
            # An ask that was long under way: its phase is over, and it must not get a batch of another.
            self._send(source, slot, batch_message.pack([batch_message.EXHAUSTED, known], *NOTHING))
        elif kind == batch_message.SHARE:
            return self._hand_share(source, slot, number, self.order.share(number, replica, replicas), columns)
        else:
            return self._hand_any(source, slot, self.lines[replica if self.static else 0], columns)
        return True

    def _begun(self, number: int) -> bool:
        """Whether somebody has taken his share of a joint batch, and others have not."""
        return any(line.is_begun(number) for line in self.lines)

    def _tell_phase(self, source: int, slot: int, phase: Phase) -> bool:
        assert self.tally is not None
        part, itemsize = batch_message.PARTS.index(phase.part), np.dtype(self.data.description.dtype).itemsize
        first = len(self.tally.done) if self.tally.done.all() else int(np.argmin(self.tally.done))
        header = [batch_message.PHASE, phase.number, part, phase.epoch, self.count(phase.part), itemsize, first]
        self._send(source, slot, batch_message.pack(header, *NOTHING))
        return True

    def _hand_any(self, source: int, slot: int, line: PrefetchQueue, columns: list[slice]) -> bool:
        """The next batch of a line; one that is all bad is passed over."""
        while len(line):
            taken = line.take()
            if taken is None:
                return False
            number, block = taken
            self._leave_out(number, self.order[number].size - block.ids.size)
            if block.ids.size:
                self._hand(source, slot, number, block, columns)
                return True
        assert self.phase is not None
        self._send(source, slot, batch_message.pack([batch_message.EXHAUSTED, self.phase.number], *NOTHING))
        return True

    def _hand_share(self, source: int, slot: int, number: int, images: np.ndarray, columns: list[slice]) -> bool:
        taken = self.lines[0].take(number)
        if taken is None:
            return False
        _, block = taken
        chosen = np.isin(block.ids, images)
        self._leave_out(number, images.size - int(chosen.sum()))
        share = Block(block.ids[chosen], block.labels[chosen], block.pixels[chosen])
        self._hand(source, slot, number, share, columns)
        return True

    def _leave_out(self, number: int, bad: int) -> None:
        assert self.tally is not None
        self.news |= self.tally.leave_out(number, bad)

    def _hand(self, source: int, slot: int, number: int, block: Block, columns: list[slice]) -> None:
        phase = self.phase
        assert phase is not None
        part, left = batch_message.PARTS.index(phase.part), sum(len(line) for line in self.lines)
        header = [batch_message.BATCH, phase.number, part, phase.epoch, number, block.ids.size, left]
        with trace.span("serve"):
            parts = [
                batch_message.pack(header, block.ids, block.labels, pixels) for pixels in self._cut(block, columns)
            ]
        self._send(source, slot, *parts)

    def _cut(self, block: Block, columns: list[slice]) -> list[np.ndarray]:
        """Pixels for each strip of a replica: its columns; or for each rank of a hybrid one: its images."""
        if self.config.layout.scheme == "hybrid":
            return [block.pixels[a:b] for a, b in pairwise(batch_message.shares(block.ids.size, len(columns)))]
        return [block.pixels[..., part] for part in columns]

    def _send(self, source: int, slot: int, *messages: np.ndarray) -> None:
        """To all strips of the replica that asks: one message each, or the same to all."""
        self.world.injector.at("batch")
        self.served += 1
        strips = self.world.layout.strips(source)
        for rank, message in zip(strips, messages if len(messages) > 1 else messages * len(strips), strict=True):
            self.bytes += message.nbytes
            self.sending.append((self.world.traffic.Isend(message, rank, batch_message.ANSWER + slot), message))
