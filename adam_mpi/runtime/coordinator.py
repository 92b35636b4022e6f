"""The coordinator: the first data rank moves the job from phase to phase and handles what all ranks report."""

import logging
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

from adam_mpi.base.files import write_json
from adam_mpi.cluster.control_messages import (
    BeginPhase,
    ClosePhase,
    CompareCopies,
    CopiesCompared,
    GoBack,
    Message,
    SnapshotHeld,
    SnapshotWritten,
    SparesReport,
    Statistics,
    StopTraining,
)
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.data.inputs import Inputs
from adam_mpi.data.server import DataServer
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.monitor.live_view import Progress
from adam_mpi.optimizer.schedules import Plateau
from adam_mpi.runtime import handover
from adam_mpi.runtime.checkpoint_manager import CheckpointManager
from adam_mpi.runtime.completion import Completion
from adam_mpi.runtime.guard import Guard
from adam_mpi.runtime.job import CoordinatorResources, CoordinatorState, Job, JobRecord, phase_to_json
from adam_mpi.runtime.job_report import JobReport
from adam_mpi.runtime.plateau_control import PlateauControl
from adam_mpi.runtime.recovery import RecoveryPlan
from adam_mpi.runtime.recovery_log import RecoveryLog
from adam_mpi.runtime.supervision import LivenessMonitor, SpareKeeper, send_to_all, survivable_losses
from adam_mpi.sharding.training_state import Phase, PhaseSchedule
from adam_mpi.transport.generation import Generation

log = logging.getLogger(__name__)


class Coordinator:
    """The coordinator of one generation."""

    def __init__(
        self,
        generation: Generation,
        data: DataServer,
        job: Job,
        recovery: RecoveryPlan | None = None,
        previous: "Coordinator | None" = None,
        before: CoordinatorState | None = None,
    ) -> None:
        """Begin to coordinate with the first phase, or the one that a lost generation was in.

        `recovery` is the plan by which this generation begins; `previous` is the coordinator of the generation before
        if it was on this rank; `before` is the state from before all ranks have gone back to an earlier state.
        """
        self.world = generation.world
        self.config = generation.world.config
        self.channel = generation.channel
        self.job = job
        self.data = data
        self.resources: CoordinatorResources = _resources(job, previous)
        if before is not None:
            # All pushes are counted from the restart on.
            self.resources.statistics = JobStatistics()
        self.statistics = self.resources.statistics
        self.schedule = _schedule(job, data)
        self.record = JobRecord.start(job.resume)
        self.progress = Progress(self.config.train.epochs)
        self.checkpoints: CheckpointManager = CheckpointManager(generation, job, self._describe)
        self.liveness = LivenessMonitor(self.world, job.directory, job.owner)
        self.recoveries = RecoveryLog(self.world.generation, self.statistics)
        self.spares = SpareKeeper(self.world, self.channel, self.recoveries, self.progress.say)
        self.report = self._make_report()
        plateau = Plateau(**(job.resume.plateau if job.resume else {}))
        self.plateau = PlateauControl(self.world, self.channel, self.statistics, plateau)
        self.between = False
        """Whether the next phase waits until all servers have its learning rate."""
        continued = recovery is not None or (before is None and job.resume is not None)
        self.guard = Guard(self.report, self._order_to_go_back, continued)
        self.completion = Completion(self.channel, self.report, self.checkpoints, self.resources)
        self.copies_compared: dict[int, CopiesCompared] = {}
        self.number = 0
        """How many phases all coordinators of the job have begun."""
        self.closed = False
        """Whether no more batches of this phase are handed out."""
        self.shown = time.monotonic()
        """When the figures were last shown."""
        self._start(recovery, before)

    def _make_report(self) -> JobReport:
        """Return what the coordinator reports of the job to people."""
        return JobReport(
            world=self.world,
            job=self.job,
            data=self.data,
            schedule=self.schedule,
            record=self.record,
            recoveries=self.recoveries,
            spares=self.spares,
            snapshots=self.checkpoints.snapshots,
            statistics=self.statistics,
            progress=self.progress,
            status_writer=self.resources.status_writer,
            metrics=self.resources.metrics,
        )

    def _start(self, recovery: RecoveryPlan | None, before: CoordinatorState | None) -> None:
        """Begin the phase with which the coordinator of this generation starts."""
        if recovery is not None:
            handover.continue_after_loss(self, recovery)
        elif before is not None:
            handover.begin_again(self, before)
        elif self.job.resume is not None:
            self.progress.say(f"resuming from {self.job.resume.note}")
        if recovery is None and self.config.kernels.engine == "reference":
            self.progress.say(
                'kernels: reference (kernels.engine = "reference"), many times slower than generated ones'
            )
        log.info("%s", survivable_losses(self.world, len(recovery.lacking) if recovery else 0))
        self._begin_phase(self.schedule.phase)
        if self.record.stopped_by:
            send_to_all(self.channel, self.world, StopTraining())

    def state(self) -> CoordinatorState:
        """Return what the coordinator of the next generation continues from."""
        return handover.state_of(self)

    def step(self) -> bool:
        """Move the job from phase to phase if it can be; return whether it was. Raise what ends the job."""
        self.liveness.step()
        self.resources.status_writer.poll()
        if self.guard.ordered:
            return False
        self.checkpoints.snapshots.step()
        if self.between:
            return self._begin_next()
        phase = self.schedule.phase
        if phase is None:
            return self.completion.step()
        self._handle_requests()
        if reason := self.checkpoints.look(phase.training, self.resources.requests.stop):
            self._stop(reason)
            return True
        if self._phase_done(phase):
            self._end_phase(phase)
            return True
        if not self.closed and phase.training and self._quorum_reached(phase):
            self.closed = True
            send_to_all(self.channel, self.world, ClosePhase())
        if time.monotonic() - self.shown >= self.config.observe.interval:
            self.shown = time.monotonic()
            figures = self.report.running(phase, self.record.phase_seconds)
            self.guard.check_figures(phase, figures, done=False)
        return False

    def handle(self, source: int, message: Message) -> None:
        """Handle a message of rank `source` that is for the coordinator."""
        self.liveness.received(source)
        match message:
            case Statistics():
                self.statistics.update(self.world.layout.places[source].member, message)
                self.guard.look(self.schedule.phase)
                self.checkpoints.remove_old_stores(self.statistics)
            case CopiesCompared():
                self._handle_comparison(source, message)
            case SparesReport():
                self.spares.handle(source, message)
            case SnapshotHeld() | SnapshotWritten():
                self.checkpoints.snapshots.handle(source, message)
            case _:
                raise TypeError(f"the coordinator does not handle {message}")

    def _handle_requests(self) -> None:
        """Handle requests that people make by files: COMPARE compares all copies, GROW asks for more ranks."""
        requests = self.resources.requests
        if requests.take_compare():
            self.copies_compared = {}
            for rank in self.world.layout.servers:
                self.channel.send(CompareCopies(), rank)
        if self.world.survivable:
            self.spares.wanted_ranks += requests.take_ranks()
            self.spares.step()

    def _handle_comparison(self, source: int, message: CopiesCompared) -> None:
        """Write copies.json when all servers have compared the copies of their shards."""
        self.copies_compared[source] = message
        if len(self.copies_compared) < len(self.world.layout.servers):
            return
        answers = self.copies_compared.values()
        content = {
            "copies": sum(answer.copies for answer in answers),
            "different": sum(answer.different for answer in answers),
            "generation": self.world.generation,
        }
        path = self.job.directory / "copies.json"
        self.resources.status_writer.request(path.name, partial(write_json, path, content))

    def _begin_next(self) -> bool:
        """Begin the next phase if all servers have its learning rate; return whether it was begun."""
        if not self.plateau.settled:
            return False
        self.between = False
        self._begin_phase(self.schedule.phase)
        return True

    def _begin_phase(self, phase: Phase | None) -> None:
        """Let all ranks begin `phase`; None ends training."""
        self.number += 1
        # All ranks keep the state: the next coordinator continues from it when this rank is lost.
        begin = BeginPhase(phase_to_json(phase), self.state().to_json())
        send_to_all(self.channel, self.world, begin)
        self.closed = False
        self.shown = time.monotonic()
        if phase is not None:
            log.info("phase %d: %s, epoch %d", phase.number, phase.part, phase.epoch)
            self.checkpoints.stale |= phase.training

    def _quorum_reached(self, phase: Phase) -> bool:
        """Return whether enough replicas have completed their shares to end an epoch, but not all."""
        owed = self.statistics.owed(phase, len(self.world.layout.data))
        complete = owed.count(0)
        return complete < len(owed) <= complete / self.config.epoch.quorum

    def _phase_done(self, phase: Phase) -> bool:
        """Return whether all data ranks have handed out `phase` and reported it to the coordinator."""
        shares = self.statistics.shares(phase)
        return len(shares) == len(self.world.layout.data) and all(share["done"] for share in shares)

    def _end_phase(self, phase: Phase) -> None:
        """Report the figures of `phase` and begin the next one."""
        seconds = self.record.phase_seconds
        figures = self.report.phase_ended(phase, seconds)
        self.guard.check_figures(phase, figures, done=True)
        if self.guard.ordered:
            return
        self.record.end_phase(phase, figures, seconds, self.job.metrics)
        if phase.training:
            self.checkpoints.epoch_ended()
        elif phase.part == "validation":
            self.plateau.validated(figures["loss"])
        self.report.want_summary()
        self.schedule.advance(figures.get(self.schedule.monitor.name, math.nan))
        self.between = True

    def _order_to_go_back(self, order: GoBack) -> None:
        """Send the coordinator's `order` to go back to all ranks, with the newest state of all."""
        self.number += 1
        send_to_all(self.channel, self.world, replace(order, state=self.state().to_json()))

    def _stop(self, reason: str) -> None:
        """End the job in order by the coordinator, within an epoch if need be; `--resume` continues from there."""
        log.info("the job is stopped by %s", reason)
        self.record.stopped_by = reason
        self.schedule.reason = reason
        self.schedule.phase = None
        send_to_all(self.channel, self.world, StopTraining())

    def awaits(self) -> list[Wait]:
        """Return the ranks that owe the coordinator a part of a snapshot."""
        return self.checkpoints.snapshots.awaits()

    def _describe(self) -> dict[str, Any]:
        """Return what the coordinator has snapshots say about the progress of the job."""
        return {
            "epochs": self.record.results["epochs"],
            "kernels": self.job.kernels,
            "inputs": Inputs.of(self.data.loader).to_json(),
            "best": self.schedule.best,
            "best_epoch": self.schedule.best_epoch,
            "rate_scale": self.job.diverged.rate_scale,
            "plateau": self.plateau.plateau.to_json(),
        }


def _resources(job: Job, previous: Coordinator | None) -> CoordinatorResources:
    """Return the coordinator's resources from `previous`, whose snapshot is given up, or new ones."""
    if previous is None:
        return CoordinatorResources.open(job)
    previous.checkpoints.snapshots.abandon()
    return previous.resources


def _schedule(job: Job, data: DataServer) -> PhaseSchedule:
    """Return the phases of the job for the coordinator, from where it resumes."""
    validates = data.count("validation") > 0
    resume = job.resume
    monitor = job.metrics.monitor
    if resume is None:
        return PhaseSchedule(job.config.train, validates, monitor=monitor)
    return PhaseSchedule(
        job.config.train,
        validates,
        epochs_done=resume.epochs,
        best=resume.best,
        midway=resume.midway,
        monitor=monitor,
    )
