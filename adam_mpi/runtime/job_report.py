"""What people see of a running job: its progress on the terminal, metrics.jsonl, status.json and summary.json."""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from adam_mpi.base.errors import UserError
from adam_mpi.base.files import write_json, write_status
from adam_mpi.base.machine import provenance
from adam_mpi.cluster.world import World
from adam_mpi.data.server import DataServer
from adam_mpi.monitor import aggregate_statistics as outcome
from adam_mpi.monitor import status
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.monitor.live_view import Progress
from adam_mpi.monitor.metrics import Metrics
from adam_mpi.monitor.status_writer import StatusWriter
from adam_mpi.runtime.job import Job, JobRecord
from adam_mpi.runtime.recovery_log import RecoveryLog
from adam_mpi.runtime.snapshot_coordinator import SnapshotCoordinator
from adam_mpi.runtime.supervision import DISK_SECONDS, SpareKeeper
from adam_mpi.sharding.fields import CLASSES
from adam_mpi.sharding.training_state import Phase, PhaseSchedule
from adam_mpi.worker.diagnostics import describe

Figures = dict[str, Any]
JUDGED_IMAGES = 10_000
"""A network that still guesses after training on so many images has learned nothing."""


@dataclass
class JobReport:
    """Everything that the reports of a coordinator are made from, and the writers of them."""

    world: World
    job: Job
    data: DataServer
    schedule: PhaseSchedule
    record: JobRecord
    recoveries: RecoveryLog
    spares: SpareKeeper
    snapshots: SnapshotCoordinator
    statistics: JobStatistics
    progress: Progress
    status_writer: StatusWriter
    metrics: Metrics
    nan_reported: bool = False
    divergences: list[dict[str, Any]] = field(default_factory=list)
    """What the guard of the job has noticed."""

    def __post_init__(self) -> None:
        self.provenance = provenance(self.world.hosts, self.world.config.run.seed)

    def running(self, phase: Phase, seconds: float) -> Figures:
        """Report the figures of the running `phase` to people after `seconds`, and return them."""
        figures = self.statistics.figures(phase, seconds)
        self.progress.update(self._report(phase, figures, done=False))
        return figures

    def phase_ended(self, phase: Phase, seconds: float) -> Figures:
        """Report the figures of `phase` to people after it has taken `seconds`, and return them."""
        figures = self.statistics.figures(phase, seconds)
        self.progress.end(self._report(phase, figures, done=True))
        return figures

    def _report(self, phase: Phase, figures: Figures, done: bool) -> dict[str, Any]:
        """Write a line of metrics.jsonl and status.json of the job; return the status."""
        self._write_metrics(phase, figures, done)
        job_status = self._status(phase, figures)
        path = self.job.directory / "status.json"
        self.status_writer.request(path.name, partial(write_status, path, job_status))
        self._report_nan()
        return job_status

    def _write_metrics(self, phase: Phase, figures: Figures, done: bool) -> None:
        """Have a line of metrics.jsonl written with the figures of `phase`."""
        images = self.record.results["images"] + (figures["images"] if phase.training else 0)
        trained = self.record.images_before + images
        line = {
            "seconds": round(self.record.seconds, 3),
            "phase": phase.number,
            "part": phase.part,
            "epoch": phase.epoch,
            "done": done,
            "images_trained": trained,
        }
        self.metrics.add(line | figures | self.statistics.gauges(), trained)
        self.status_writer.request("metrics.jsonl", self.metrics.write)

    def _status(self, phase: Phase, figures: Figures) -> dict[str, Any]:
        """Return what status.json has: the whole job, groups of ranks, and each rank."""
        share = figures["images"] / max(self.data.count(phase.part), 1)
        seconds_left = self._seconds_left(phase, figures)
        rows = self.statistics.rank_rows(self.world.layout)
        spares = self.spares.count
        return {
            "time": time.time(),
            "seconds": round(self.record.seconds, 3),
            "interval": self.world.config.observe.interval,
            "run": figures
            | {"name": self.progress.name(phase), "share": share, "eta": seconds_left, "metrics": self._shown()},
            "groups": status.groups(rows),
            "ranks": rows,
            "spares": {"ready": spares.ready, "coming": spares.coming},
        }

    def _shown(self) -> list[str]:
        """Return the names of the figures that the progress line has."""
        return list(self.job.metrics.names)

    def _seconds_left(self, phase: Phase, figures: Figures) -> float | None:
        """Return the seconds of training left for the progress line, at the rate of this phase, or None."""
        if not phase.training or not figures["images"]:
            return None
        epochs = 1 + self.world.config.train.epochs - phase.epoch
        images = self.data.count("train") * epochs - figures["images"]
        return images / figures["images_per_second"]

    def _report_nan(self) -> None:
        """Show the first number of the job that is not finite to people, once."""
        for rank, trouble in self.statistics.first_not_finite().items():
            if not self.nan_reported:
                self.nan_reported = True
                on_nan = self.world.config.server.on_nan
                self.progress.say(f"rank {rank}: {describe(trouble)} (server.on_nan = {on_nan})")

    def end_diverged(self, text: str) -> NoReturn:
        """Raise UserError with `text`, which says why the job ends, after its last summary.json is written."""
        self.want_summary()
        self.status_writer.wait_until_written(DISK_SECONDS)
        raise UserError(text)

    def want_summary(self) -> None:
        """Have summary.json of a running job written soon."""
        self.status_writer.request("summary.json", partial(self.write_summary, self.summary("running")))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary`, unless the job has failed: then summary.json says why it ended."""
        if not self.job.failure_file.exists():
            write_json(self.job.directory / "summary.json", summary)

    def summary(self, state: str) -> dict[str, Any]:
        """Return the content of summary.json of the job, which is in `state`: running, stopped or done."""
        statistics = self.statistics
        monitor = self.schedule.monitor
        resume = self.job.resume
        stores = {str(report["rank"]): report["store"] for report in statistics.of_role("server") if report["store"]}
        return {
            "status": state,
            "stopped_by": self.schedule.reason,
            "resumed": resume.note if resume else "",
            **self.record.results,
            "monitor": {"name": monitor.name, "mode": monitor.mode},
            f"best_{monitor.name}": self.schedule.best,
            "best_epoch": self.schedule.best_epoch,
            "images_bad": statistics.count_bad_images(),
            "seconds": round(self.record.seconds, 3),
            "images_per_second": round(self.record.images_per_second, 1),
            "generation": self.world.generation,
            "ranks": self._rank_counts(),
            "pushes": statistics.pushes(self.members, self.judged_pushers),
            "residual": statistics.residual(self.pushers),
            "pulls": statistics.pulls(),
            "workers": statistics.workers(),
            "traffic": statistics.traffic(),
            "not_finite": statistics.first_not_finite(),
            "cpu_seconds": statistics.cpu(),
            "staleness": statistics.distribution("leads") | {"clock_wait": statistics.clock_wait()},
            "delay": statistics.distribution("delays"),
            "snapshots": self.snapshots.taken,
            "store": stores,
            "recoveries": self.recoveries.to_json(),
            "divergences": self.divergences,
            "started": self.spares.started,
            "provenance": self.provenance,
        }

    def _rank_counts(self) -> dict[str, int]:
        """Return the numbers of ranks by role for status.json and summary.json."""
        layout = self.world.layout
        return {
            "data": len(layout.data),
            "worker": len(layout.workers),
            "server": len(layout.servers),
            "total": len(layout.places),
            "replicas": layout.replicas,
        }

    @property
    def members(self) -> list[int]:
        """Return the member numbers of all ranks that the job's report counts."""
        return [place.member for place in self.world.layout.places]

    @property
    def pushers(self) -> list[int]:
        """Return the member numbers of all workers that the job's report counts."""
        return [self.world.layout.places[rank].member for rank in self.world.layout.workers]

    @property
    def judged_pushers(self) -> list[int] | None:
        """Return the pushers of the report whose acknowledged pushes must be in the weights; None for all.

        In synchronous training only present pushers count: a clock that other strips or lost ranks alone had
        acknowledged was computed again.
        """
        return None if self.world.config.consistency.staleness > 0 else self.pushers

    def warnings(self) -> list[str]:
        """Return the warnings in summary.json: what makes the end of this job no success."""
        if self.world.config.inject.conserve:
            return []
        labels = {part: self.data.data.labels(part) for part in self._evaluated}
        return outcome.warnings(self.record.results, labels, self.statistics.layers())

    def check_outcome(self) -> None:
        """Raise UserError if the trained network only guesses: a job that has learned nothing is no success.

        After few images that is no surprise, and from noise nothing can be learned.
        """
        config = self.world.config
        results = self.record.results
        trained = self.record.images_before + results["images"]
        if trained < JUDGED_IMAGES or config.inject.conserve or config.data.set.startswith("noise:"):
            return
        for part in self._evaluated[:1]:
            if outcome.at_chance(results, part, self.data.data.labels(part)):
                reached = f"{part} accuracy {results[f'{part}_accuracy']:.2%}, loss {results[f'{part}_loss']:.3g}"
                rate = config.optimizer.learning_rate
                self.end_diverged(
                    f"nothing was learned from {trained} images: {reached}, which is guessing; set "
                    f"optimizer.learning_rate below {rate:g}, or less momentum; check labels and the range of inputs"
                )

    @property
    def _evaluated(self) -> list[str]:
        """Return the parts of the report whose classes were predicted, the one that counts first."""
        classes = self.data.data.target.kind == CLASSES
        return [part for part in ("test", "validation") if classes and f"{part}_accuracy" in self.record.results]

    def say_result(self) -> None:
        """Show the accuracy of the trained network, what it has taken, and the warnings."""
        results = self.record.results
        monitor = self.schedule.monitor
        parts = [part for part in ("test", "validation") if f"{part}_{monitor.name}" in results]
        reached = "trained"
        if parts:
            value = results[f"{parts[0]}_{monitor.name}"]
            reached = f"{parts[0]} {monitor.name.replace('_', ' ')} {monitor.text(value)}"
        rate = self.record.images_per_second
        self.progress.say(f"{reached} after {self.record.seconds:.1f} s, {rate:.0f} images/s in training")
        self.progress.say(f"summary: {self.job.directory / 'summary.json'}")
        for warning in results["warnings"]:
            self.progress.say(f"warning: {warning}")
