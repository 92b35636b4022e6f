"""The guard of a job: notices that training has diverged, says so, and ends the job or lets it go back."""

import logging
import math
import time
from collections.abc import Callable

from adam_mpi.cluster.control_messages import GoBack
from adam_mpi.monitor import aggregate_statistics as outcome
from adam_mpi.monitor.divergence import DivergenceDetector, LossWindows
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.runtime import going_back
from adam_mpi.runtime.job import Job
from adam_mpi.runtime.job_report import Figures, JobReport
from adam_mpi.runtime.snapshot_coordinator import SnapshotCoordinator
from adam_mpi.sharding.fields import CLASSES
from adam_mpi.sharding.training_state import Phase

MOST_BACK_OFFS = 5
"""How often a run goes back at most."""
BACK_OFF = 0.5
"""Factor of the learning rate each time."""
START = "the initial weights"
log = logging.getLogger(__name__)


class Guard:
    """Watches the losses of one generation."""

    def __init__(self, report: JobReport, order: Callable[[GoBack], None], continued: bool) -> None:
        """Guard a job; `order` sends an order to all ranks; `continued`: the first phase began a generation before."""
        self.report = report
        self.job: Job = report.job
        self.statistics: JobStatistics = report.statistics
        self.snapshots: SnapshotCoordinator = report.snapshots
        self.send_order = order
        self.continued = continued
        description = self.job.description
        # Softmax over classes: guessing all of them alike. Of other losses only the first ones are known.
        chance = math.log(description.classes) if description.target.kind == CLASSES else None
        self.detector = DivergenceDetector(chance)
        self.phase = -1
        """The number of the phase that `windows` are of."""
        self.windows = LossWindows(time.time())
        self.ordered = False
        """Whether all ranks have been ordered to go back: this generation is over."""

    @property
    def resting(self) -> bool:
        """Return whether the guard has nothing to judge."""
        return self.ordered or self.report.world.config.inject.conserve

    def look(self, phase: Phase | None) -> None:
        """Guard `phase` by what data ranks have reported; raise UserError if training has diverged and the job ends."""
        if phase is None or not phase.training or self.resting:
            return
        totals = self.statistics.loss_totals(phase, len(self.report.world.layout.data))
        if totals is None:
            return
        now = time.time()
        if phase.number != self.phase:
            self.windows = (
                LossWindows(now, totals) if self.continued else LossWindows(self.report.record.phase_started_at)
            )
            self.phase = phase.number
            self.continued = False
        layers = self.statistics.layers()
        window = self.windows.add(now, totals, outcome.weight_norm(layers), bool(outcome.dead(layers)))
        if window is None:
            return
        alarm = self.detector.add(window)
        if alarm is not None:
            self._react(phase, int(totals.images), alarm.describe())
        else:
            self.snapshots.confirm(self.detector.good_from)

    def check_figures(self, phase: Phase, figures: Figures, done: bool) -> None:
        """Guard any phase by its `figures`, which is over if `done`; raise UserError as `look` does."""
        if self.resting or not outcome.diverged(figures, self.report.world.config.train.batch, done):
            return
        count = figures["images_not_finite"]
        self._react(phase, figures["images"], f"the loss of {count} of {figures['images']} images is not finite")

    def _react(self, phase: Phase, images: int, what: str) -> None:
        """React to divergence: end the job with a UserError, or order all to go back; `what` happened in `phase`."""
        happened = f"{self.report.progress.name(phase)}: training has diverged after {images} images: {what}"
        order = self._choose_order()
        number = self.job.diverged.number if order is None else order.number
        scale = self.job.diverged.rate_scale * (1.0 if order is None else BACK_OFF)
        going_back.note(self.job, self._good_until(), number=number, rate_scale=scale)
        target = "" if order is None else next(iter(order.snapshots), START)
        self.report.divergences.append(
            {
                "seconds": round(self.report.record.seconds, 3),
                "epoch": phase.epoch,
                "images": images,
                "what": what,
                "back_to": target,
                "learning_rate": self._rate if order is None else order.learning_rate,
            }
        )
        if order is None:
            self.report.end_diverged(f"{happened}; {self._advice()}")
        text = f"{happened}; all ranks go back to {target}, with optimizer.learning_rate = {order.learning_rate:g}"
        self.report.progress.say(text)
        log.warning("%s", text)
        self.ordered = True
        self.send_order(order)

    @property
    def _rate(self) -> float:
        """Return the learning rate at which the guard judges training."""
        return self.report.world.config.optimizer.learning_rate

    def _choose_order(self) -> GoBack | None:
        """Return the guard's order to go back; None if the job ends, by choice or with nothing to go to."""
        number = self.job.diverged.number
        from_start = self.job.resume is None
        good = self.snapshots.good[::-1]
        if self.report.world.config.train.on_divergence == "stop" or number >= MOST_BACK_OFFS:
            return None
        if not good and not from_start:
            return None
        return GoBack(
            number=number + 1,
            snapshots=good,
            from_start=from_start,
            learning_rate=BACK_OFF * self._rate,
            rate_scale=BACK_OFF * self.job.diverged.rate_scale,
            state={},
        )

    def _good_until(self) -> float:
        """Return the time up to which the guard takes snapshots for good, in seconds since 1970."""
        known = [self.snapshots.times.get(name, 0.0) for name in self.snapshots.good]
        return max(self.detector.good_from, self.report.record.started_at, *known)

    def _advice(self) -> str:
        """Return the guard's advice about what to do about divergence."""
        optimizer = self.report.world.config.optimizer
        lower = f"set optimizer.learning_rate below {optimizer.learning_rate:g}"
        momentum = ", or less momentum" if optimizer.momentum else ""
        if self.report.world.config.train.on_divergence == "stop":
            return f'{lower}{momentum}, or train.on_divergence = "back_off"; check labels and the range of inputs'
        tried = (
            f"it has gone back {self.job.diverged.number} times"
            if self.job.diverged.number
            else "there is no good snapshot to go back to"
        )
        return f"{tried}; {lower}{momentum}, and check labels and the range of inputs"
