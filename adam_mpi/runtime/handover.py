"""What goes from the coordinator of one generation to that of the next, after a loss or after a divergence."""

import logging
import time
from typing import TYPE_CHECKING

from adam_mpi.optimizer.schedules import Plateau
from adam_mpi.runtime.job import CoordinatorState
from adam_mpi.runtime.recovery import RecoveryPlan
from adam_mpi.sharding.training_state import Phase

if TYPE_CHECKING:
    from adam_mpi.runtime.coordinator import Coordinator

SNAPSHOTS_PER_GENERATION = 1000
"""Snapshots of different generations have different numbers: a rank may still be writing one of the last generation."""
log = logging.getLogger(__name__)


def state_of(coordinator: "Coordinator") -> CoordinatorState:
    """Return the state that `coordinator` hands over to that of the next generation."""
    checkpoints = coordinator.checkpoints
    return CoordinatorState(
        number=coordinator.number,
        phase=coordinator.schedule.phase,
        phase_started_at=coordinator.record.phase_started_at,
        best=coordinator.schedule.best,
        best_epoch=coordinator.schedule.best_epoch,
        reason=coordinator.schedule.reason,
        results=coordinator.record.results,
        train_seconds=coordinator.record.train_seconds,
        started_at=coordinator.record.started_at,
        stopped_by=coordinator.record.stopped_by,
        # A snapshot that is being taken is given up with the generation.
        stale=checkpoints.stale or checkpoints.snapshots.busy,
        snapshots=checkpoints.snapshots.taken,
        recoveries=coordinator.recoveries.to_json(),
        pushes=coordinator.statistics.push_counts(),
        carried=coordinator.statistics.carried(),
        spares_started=coordinator.spares.started,
        refusal_reported=coordinator.spares.refusal_reported,
        snapshot_times=checkpoints.snapshots.times,
        good_snapshots=checkpoints.snapshots.good,
        divergences=coordinator.report.divergences,
        detector=coordinator.guard.detector.to_json(),
        plateau=coordinator.plateau.plateau.to_json(),
    )


def continue_after_loss(coordinator: "Coordinator", recovery: RecoveryPlan) -> None:
    """Hand over after a loss: continue where the coordinator of the generation before was, and report it."""
    if recovery.coordinator is not None:
        _restore(coordinator, CoordinatorState.from_json(recovery.coordinator), recovery)
    gone = coordinator.world.lost
    coordinator.recoveries.add(recovery, gone)
    names = "; ".join(map(str, gone))
    seconds = time.time() - recovery.detected
    ranks = len(coordinator.world.layout.places)
    text = f"generation {coordinator.world.generation} continues with {ranks} ranks after {seconds:.2f} s"
    coordinator.progress.say(f"{names} lost; {text}" if names else f"ranks have joined; {text}")
    log.warning("%s: lost %s", text, names or "no rank")


def _restore(coordinator: "Coordinator", state: CoordinatorState, recovery: RecoveryPlan) -> None:
    """Take over the `state` of the last coordinator; a phase that was not over begins again with a new number."""
    phase = state.phase
    coordinator.schedule.phase = None if phase is None else Phase(phase.number + 1, phase.part, phase.epoch)
    coordinator.schedule.best = state.best
    coordinator.schedule.best_epoch = state.best_epoch
    coordinator.schedule.reason = state.reason
    coordinator.record.continue_from(state)
    coordinator.number = state.number
    coordinator.checkpoints.stale = state.stale
    coordinator.checkpoints.snapshots.taken = state.snapshots
    coordinator.checkpoints.snapshots.number = SNAPSHOTS_PER_GENERATION * coordinator.world.generation
    coordinator.recoveries.resume(state.recoveries, recovery.resumed_at)
    coordinator.statistics.continue_from(state.pushes, state.carried)
    coordinator.guard.detector.restore(state.detector)
    coordinator.plateau.plateau = Plateau(**state.plateau)
    _keep(coordinator, state)


def _keep(coordinator: "Coordinator", state: CoordinatorState) -> None:
    """Take over the last coordinator's spares, snapshots and divergences, from whatever state it continues."""
    coordinator.spares.started = state.spares_started
    coordinator.spares.refusal_reported = state.refusal_reported
    coordinator.checkpoints.snapshots.times = state.snapshot_times
    coordinator.checkpoints.snapshots.good = state.good_snapshots
    coordinator.report.divergences = state.divergences


def begin_again(coordinator: "Coordinator", state: CoordinatorState) -> None:
    """Hand over after going back: begin from the earlier state of all ranks; `state` is the last one before."""
    coordinator.number = state.number
    coordinator.record.begin_again(state)
    _keep(coordinator, state)
    snapshots = coordinator.checkpoints.snapshots
    snapshots.taken = [name for name in state.snapshots if name in snapshots.good]
    snapshots.number = SNAPSHOTS_PER_GENERATION * coordinator.world.generation
    names = "; ".join(map(str, coordinator.world.lost))
    resume = coordinator.job.resume
    target = resume.path.name if resume else "the initial weights"
    text = (
        f"generation {coordinator.world.generation} begins from {target}, at {coordinator.record.images_before} images"
    )
    coordinator.progress.say(f"{names} lost; {text}" if names else text)
