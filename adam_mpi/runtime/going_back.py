"""Begin training again from an earlier state, on all ranks of a running job, after it has diverged.

The coordinator orders it (`GoBack`), every rank leaves its generation, and all roles of the next one are new: weights,
optimizer state and position are those of a snapshot, as in a job that resumes from it, or of the start of the run.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.base.log import print_and_log
from adam_mpi.checkpoint import divergences
from adam_mpi.checkpoint import resume as resume_points
from adam_mpi.checkpoint.divergences import Divergences
from adam_mpi.checkpoint.resume import Resume
from adam_mpi.cluster.control_messages import GoBack
from adam_mpi.cluster.world import World, gather
from adam_mpi.runtime.job import Job

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestartPoint:
    """Where training begins again."""

    number: int
    """That of the order that was followed."""
    resume: Resume | None
    """The snapshot; None is where the run began."""
    learning_rate: float
    rate_scale: float
    """Its ratio to the one that the run was begun with."""


def agree_on_restart_point(world: World, job: Job, order: GoBack) -> RestartPoint:
    """Return the restart point that the coordinator has found for `order`; collective. Raise its UserError."""
    found: RestartPoint | UserError | None = None
    if world.rank == world.layout.coordinator:
        try:
            found = _find_restart_point(job, order)
        except UserError as error:
            found = UserError(str(error))
    agreed: Any = gather(world.comm, found)[world.layout.coordinator]
    if isinstance(agreed, UserError):
        raise agreed
    return agreed


def _find_restart_point(job: Job, order: GoBack) -> RestartPoint:
    """Return the first snapshot of `order` that is whole, or the run's start; raise UserError without either."""
    resume = _first_whole_snapshot(job, order)
    if resume is None and not order.from_start:
        raise UserError("training has diverged and no snapshot is whole; --resume with a lower optimizer.learning_rate")
    return RestartPoint(order.number, resume, order.learning_rate, order.rate_scale)


def _first_whole_snapshot(job: Job, order: GoBack) -> Resume | None:
    """Return the first snapshot of `order` that is whole, to go back to; None without one."""
    for name in order.snapshots:
        try:
            return resume_points.from_snapshot(job.directory / "snapshots" / name)
        except UserError as error:
            print_and_log(f"warning: passed over: {error}")
    return None


def adapt(world: World, job: Job, restart: RestartPoint | None) -> Job:
    """Return `job` with what going back to `restart` changes, in the configuration of `world` too."""
    if restart is None:
        return job
    world.config.optimizer.learning_rate = restart.learning_rate
    optimizer = replace(job.config.optimizer, learning_rate=restart.learning_rate)
    diverged = Divergences(number=restart.number, rate_scale=restart.rate_scale)
    config = replace(job.config, optimizer=optimizer)
    return replace(job, config=config, resume=restart.resume, diverged=diverged)


def note(job: Job, good_until: float, number: int, rate_scale: float) -> None:
    """Write into the run directory that training diverged and goes back, so that no job resumes from what is spoiled.

    `good_until`: the time up to which snapshots are good; `number`, `rate_scale`: how often the run has gone back, and
    the factor of its learning rate.
    """
    try:
        divergences.add(job.directory, (good_until, time.time()), number=number, rate_scale=rate_scale)
    except OSError as error:
        log.warning("%s: %s", job.directory, error)
        print_and_log(f"warning: {job.directory}: {error.strerror}; --resume may use a snapshot of diverged weights")
