"""The data rank: answers the asks of workers with batches of the current phase, and counts what they report."""

import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.base import trace
from adam_mpi.cluster.control_messages import BeginPhase, ClosePhase, ControlChannel, Message, Statistics, StopTraining
from adam_mpi.cluster.world import World
from adam_mpi.data import served_phase
from adam_mpi.data.batch_loader import BatchLoader, LoadedBatch
from adam_mpi.data.served_phase import Ask, Resumed, ServedData, ServedPhase
from adam_mpi.data.sets import DataSet
from adam_mpi.sharding import message_formats
from adam_mpi.sharding.batches import select
from adam_mpi.sharding.training_state import Phase, RankState


class DataServer:
    """Serves batches in one generation; what a data rank keeps for the whole job is its `served` data."""

    def __init__(
        self, world: World, channel: ControlChannel, served: ServedData, resumed: Resumed | None = None
    ) -> None:
        """Wait for the coordinator to begin a phase; `resumed` is what earlier generations have done of its epoch."""
        self.world = world
        self.channel = channel
        self.served = served
        self.resumed = resumed or Resumed()
        self.current: ServedPhase | None = None
        """None before the first phase."""
        self.ended = False
        """Whether the coordinator has ended the last phase: every further ask is answered with a stop."""
        self.stopping = False
        """Whether the job stops inside the current phase."""
        self.asks: deque[Ask] = deque()
        self.early_reports: list[np.ndarray] = []
        """Reports of a phase that this rank has not begun."""
        self.sending: list[tuple[MPI.Request, np.ndarray]] = []

    @property
    def data(self) -> DataSet:
        """Return the data set that this data rank serves."""
        return self.served.data

    @property
    def loader(self) -> BatchLoader:
        """Return the loader of the batches that this data rank serves."""
        return self.served.loader

    def count(self, part: str) -> int:
        """Return the number of images in `part` that the data rank serves."""
        return self.served.count(part)

    def transfers(self) -> list[Any]:
        """Return what the data rank may be sending when the generation ends."""
        return [self.sending]

    def handle(self, message: Message) -> None:
        """Do what the coordinator's `message` orders of a data rank."""
        match message:
            case BeginPhase():
                self.begin(None if message.phase is None else Phase(*message.phase))
            case ClosePhase():
                self.close()
            case StopTraining():
                self.stop()
            case _:
                raise TypeError(f"a data rank does not handle {message}")

    def begin(self, phase: Phase | None) -> None:
        """Start serving `phase` on this data rank; with None answer every further ask with a stop."""
        if phase is None:
            self.ended = True
            return
        self.current = ServedPhase(phase, self.served, self.world, self.resumed.of(phase))
        early = self.early_reports
        self.early_reports = []
        for report in early:
            self._count_report(report)

    def close(self) -> None:
        """Hand out nothing more of the data rank's phase: enough replicas are done; wait for what is out."""
        assert self.current is not None
        self.current.close()

    def stop(self) -> None:
        """Stop the data rank inside the phase: hand out only joint batches that some replica has begun."""
        if self.current is not None:
            self.current.stop()
        self.stopping = True

    def step(self) -> bool:
        """Receive, answer, report and prefetch what the data rank can now; return whether anything was done."""
        began = time.perf_counter()
        worked = self._serve()
        if worked:
            self.served.busy += time.perf_counter() - began
        return worked

    def end(self) -> None:
        """End nothing: the data set stays open for the server of the next generation."""

    def export_state(self, state: RankState) -> None:
        """Add the progress of a training phase to what this rank brings into the next generation."""
        current = self.current
        if current is not None and not self.ended and current.phase.training:
            progress = current.epoch_progress
            state.epoch_sums = current.phase.epoch, progress.finished, tuple(progress.sums.tolist())

    def awaits(self) -> tuple[()]:
        """Return nothing: a data rank waits for no particular rank."""
        return ()

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the data role."""
        progress = self.current.epoch_progress if self.current else None
        queues = self.current.queues if self.current else []
        return {
            "role": "data",
            "rank": self.world.place.member,
            "cpu": time.process_time(),
            "phase": self._phase_number,
            "finished": progress.finished if progress else 0,
            "sums": progress.sums.tolist() if progress else [],
            "not_finite": progress.not_finite // progress.strips if progress else 0,
            "done": progress.complete if progress else True,
            "owed": progress.owed.tolist() if progress else [],
            "skipped": progress.skipped if progress else 0,
            "bad": self.served.data.bad(),
            "served": self.served.answers,
            "bytes": self.served.bytes,
            "busy": self.served.busy + self.served.loader.busy / self.world.config.data.threads,
            "queue": sum(queue.ready for queue in queues),
            "preparing": sum(queue.loading for queue in queues),
            "asks": len(self.asks),
        }

    @property
    def _phase_number(self) -> int:
        """Return the number of the current phase; -1 before the first one and after the last one."""
        return -1 if self.current is None or self.ended else self.current.phase.number

    def _serve(self) -> bool:
        """Receive asks, and answer those that this data rank can answer now; return whether there was anything."""
        self.sending = [pair for pair in self.sending if not pair[0].Test()]
        worked = self._receive_asks()
        # Asks of a phase that this rank has not begun, or of batches that are loading, stay in the queue.
        # A replica is answered in the order of its asks, so that all of its strips know when no batch is left.
        waiting: set[int] = set()
        for _ in range(len(self.asks)):
            ask = self.asks.popleft()
            if ask.source not in waiting and self._answer(ask):
                worked = True
            else:
                waiting.add(ask.source)
                self.asks.append(ask)
        if self.current is None:
            return worked
        if self.current.share_completed:
            self.current.share_completed = False
            self.channel.send(Statistics(self.stats()), self.world.layout.coordinator)
        return self.current.fill() or worked

    def _receive_asks(self) -> bool:
        """Receive all asks and reports that have arrived at the data rank; return whether there were any."""
        worked = False
        status = MPI.Status()
        comm = self.world.traffic
        while comm.Iprobe(tag=message_formats.ASK, status=status):
            words = np.empty(status.Get_count(MPI.INT64_T), np.int64)
            comm.Recv(words, status.source, message_formats.ASK)
            self.asks.append(Ask.parse(status.source, words))
            worked = True
        while comm.Iprobe(tag=message_formats.REPORT, status=status):
            report = np.empty(status.Get_count(MPI.DOUBLE))
            comm.Recv(report, status.source, message_formats.REPORT)
            self._count_report(report)
            worked = True
        return worked

    def _count_report(self, report: np.ndarray) -> None:
        """Add a worker's report to the progress of its phase, or keep it until that phase begins."""
        phase, number, images, sums = message_formats.unpack_report(report)
        # No phase waits for the report of a share without images, all of them left out: it may come after the end.
        if not images:
            return
        if not self.ended and phase > self._phase_number:
            self.early_reports.append(report)
            return
        assert self.current is not None and phase == self._phase_number, "a report of another phase"
        self.current.report(number, images, sums)

    def _answer(self, ask: Ask) -> bool:
        """Answer a worker's `ask` on the data rank if that is possible now; return whether it was."""
        current = self.current
        if self.ended or (self.stopping and not self._finishes(ask)):
            self._send_answer(ask, served_phase.stop_answer())
            return True
        if ask.kind == message_formats.NEXT_PHASE:
            return self._phase_number > ask.phase and self._send_phase(ask)
        if current is None or self._phase_number < ask.phase:
            return False
        if self._phase_number > ask.phase:
            # The ask was under way for long: its phase is over, and it must not get a batch of another.
            self._send_answer(ask, served_phase.exhausted_answer(ask.phase))
            return True
        if ask.kind == message_formats.SHARE:
            share = current.take_share(ask.number, ask.replica, ask.replicas)
            return share is not None and self._send_batch(ask, ask.number, share)
        taken = current.take_next(ask.replica)
        if taken is not None:
            return self._send_batch(ask, *taken)
        return current.is_exhausted(ask.replica) and self._send_answer(ask, served_phase.exhausted_answer(ask.phase))

    def _finishes(self, ask: Ask) -> bool:
        """Return whether `ask` is for a joint batch of which some replica has a share already."""
        return ask.kind == message_formats.SHARE and self.current is not None and self.current.is_begun(ask.number)

    def _send_phase(self, ask: Ask) -> bool:
        """Answer a worker's ask for the next phase."""
        assert self.current is not None
        phase = self.current.phase
        first = self.current.epoch_progress.first_open
        return self._send_answer(ask, served_phase.phase_answer(phase, self.served.count(phase.part), first))

    def _send_batch(self, ask: Ask, number: int, batch: LoadedBatch) -> bool:
        """Answer a worker's `ask` with batch `number`: to each strip of the replica its part of the pixels."""
        assert self.current is not None
        hybrid = self.world.config.layout.scheme == "hybrid"
        if self.current.phase.training:
            order = self.world.injector.target_order(len(batch.ids))
            batch = replace(batch, targets=select(batch.targets, order))
        with trace.span("serve"):
            messages = served_phase.batch_answer(
                self.current.phase,
                number,
                batch,
                ask.columns,
                fields=self.served.data.description.fields,
                remaining=self.current.remaining,
                hybrid=hybrid,
            )
        return self._send_answer(ask, *messages)

    def _send_answer(self, ask: Ask, *messages: np.ndarray) -> bool:
        """Start to send to each strip of the replica that asks its message, or a single one to all; return True."""
        self.world.injector.at("batch")
        self.served.answers += 1
        strips = self.world.layout.strips(ask.source)
        for rank, message in zip(strips, messages if len(messages) > 1 else messages * len(strips), strict=True):
            self.served.bytes += message.nbytes
            request = self.world.traffic.Isend(message, rank, message_formats.ANSWER + ask.slot)
            self.sending.append((request, message))
        return True
