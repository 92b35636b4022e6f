"""A job: what its caller wants, what all ranks agree on, and the state that goes from coordinator to coordinator."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from adam_mpi.checkpoint.disk_task import DiskTask
from adam_mpi.checkpoint.divergences import Divergences
from adam_mpi.checkpoint.owner import Owner
from adam_mpi.checkpoint.resume import Resume
from adam_mpi.checkpoint.run_directory import Identity, RequestWatcher
from adam_mpi.config import Config, Given
from adam_mpi.data.sets import Description
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.metrics import ACCURACY, MetricSet
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.monitor.metrics import Metrics
from adam_mpi.monitor.status_writer import StatusWriter
from adam_mpi.planning import plan
from adam_mpi.sharding.training_state import Phase

DONE = "DONE"
STOPPED = "STOPPED"
FAILURE = Path("log", "failure.txt")


@dataclass(frozen=True)
class JobRequest:
    """What the caller wants of a job."""

    given: Given = None
    """The configuration: a file, the name of a model, sections or a Config."""
    overrides: Sequence[str] = ()
    directory: str | None = None
    resume: bool = False
    minutes: float = math.inf
    """How long the job may take."""
    take_over: bool = False
    """Whether to take the run directory away from a job that has it."""


@dataclass(frozen=True)
class ClaimedRun:
    """A run directory that this job owns, before anything in it is read."""

    directory: Path
    identity: Identity
    owner: Owner
    description: Description
    shapes: tuple[LayerShape, ...]


@dataclass(frozen=True)
class Job:
    """The agreement of all ranks, made by rank 0."""

    config: Config
    directory: Path
    description: Description
    shapes: tuple[LayerShape, ...]
    resume: Resume | None
    kernels: dict | None
    """The algorithm of each convolution where it is a choice: the same on every rank, and after a resume."""
    attempt: Path
    """The folder of the servers' stores in the first generation of this job."""
    replicas: int
    """The number of replicas at the start: it decides how shards are cut and uneven shares are drawn."""
    until: float
    """When the job stops, in seconds since 1970."""
    identity: Identity
    owner: Owner
    """The claim under which the job may write into the run directory."""
    diverged: Divergences = Divergences()
    """The divergences of the run when the job began."""

    @property
    def metrics(self) -> MetricSet:
        """Return the metrics that workers compute."""
        return plan.metrics(self.config, self.description)

    @property
    def failure_file(self) -> Path:
        """Return the file that says why the job failed."""
        return self.directory / FAILURE


@dataclass(frozen=True)
class CoordinatorState:
    """The state of a coordinator at the begin of a phase or the end of a generation."""

    number: int
    """It grows with every phase of every coordinator: the highest is the newest."""
    phase: Phase | None
    phase_started_at: float
    """When the phase began, in seconds since 1970; a training phase may have begun in an earlier generation."""
    best: float | None
    best_epoch: int
    reason: str
    """Why the job ends when its phases are over."""
    results: dict[str, Any]
    train_seconds: float
    started_at: float
    stopped_by: str
    stale: bool
    """Whether the weights are newer than the newest snapshot."""
    snapshots: list[str]
    recoveries: list[dict[str, Any]]
    pushes: dict[str, list[int]]
    """Pusher -> its pushes sent and acknowledged."""
    carried: dict[str, float]
    """Pusher -> the norm of what its codec carries."""
    spares_started: list[dict[str, float]]
    refusal_reported: bool
    snapshot_times: dict[str, float]
    """Snapshot -> when its state was copied, in seconds since 1970."""
    good_snapshots: list[str]
    """Snapshots that are known to be from before any divergence."""
    divergences: list[dict[str, Any]]
    """The divergences that the job has noticed, as the summary reports them."""
    detector: dict[str, Any]
    """What the detector of divergence continues from."""
    plateau: dict[str, Any]
    """The state of the schedule plateau."""

    def to_json(self) -> dict[str, Any]:
        """Return the state of the coordinator as JSON values."""
        return asdict(self) | {"phase": phase_to_json(self.phase)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "CoordinatorState":
        """Return the state of the coordinator that `to_json` made `values` from."""
        known = {field.name: values[field.name] for field in fields(cls)}
        phase = values["phase"]
        return cls(**(known | {"phase": None if phase is None else Phase(*phase)}))


def phase_to_json(phase: Phase | None) -> list[Any] | None:
    """Return number, part and epoch of `phase` as JSON values; None for None."""
    return None if phase is None else [phase.number, phase.part, phase.epoch]


@dataclass
class JobRecord:
    """What the job has reached so far, over all its coordinators."""

    results: dict[str, Any]
    train_seconds: float = 0.0
    started_at: float = field(default_factory=time.time)
    """When the job started, in seconds since 1970."""
    began: float = field(default_factory=time.monotonic)
    """The same on the monotonic clock of this rank."""
    phase_began: float = field(default_factory=time.monotonic)
    """When the phase began, on that clock."""
    stopped_by: str = ""
    """What stopped the job before its end; empty if nothing did."""
    images_before: int = 0
    """Images that earlier jobs of the run have trained on."""

    @classmethod
    def start(cls, resume: Resume | None) -> "JobRecord":
        """Return the record of a job that starts, or starts from `resume`."""
        epochs = resume.epochs if resume else 0
        results = {"epochs": epochs, "images": 0, "images_skipped": 0, "train_loss": None}
        return cls(results, images_before=resume.images if resume else 0)

    def continue_from(self, state: CoordinatorState) -> None:
        """Continue the record of the job that the coordinator before kept."""
        self.results = state.results
        self.train_seconds = state.train_seconds
        self.stopped_by = state.stopped_by
        self.started_at = state.started_at
        self.began = time.monotonic() - (time.time() - state.started_at)
        # Other phases begin again: they count only the images of this generation.
        if state.phase is not None and state.phase.training:
            self.phase_began = time.monotonic() - (time.time() - state.phase_started_at)

    def begin_again(self, state: CoordinatorState) -> None:
        """Keep the job record's start, though its figures begin again from an earlier state."""
        self.started_at = state.started_at
        self.began = time.monotonic() - (time.time() - state.started_at)

    def end_phase(self, phase: Phase, figures: dict[str, Any], seconds: float, metrics: MetricSet = ACCURACY) -> None:
        """Add the `figures` of a phase that has taken `seconds` to the job's record; the next one begins."""
        self.phase_began = time.monotonic()
        if not phase.training:
            self.results |= {f"{phase.part}_{name}": figures[name] for name in metrics.names if name in figures}
            return
        self.train_seconds += seconds
        self.results |= {"epochs": phase.epoch, "train_loss": figures["loss"]}
        self.results["images"] += figures["images"]
        self.results["images_skipped"] += figures["images_skipped"]

    @property
    def seconds(self) -> float:
        """Return for how long the job has been running."""
        return time.monotonic() - self.began

    @property
    def phase_seconds(self) -> float:
        """Return for how long the job's phase has been running, in all generations whose images it counts."""
        return time.monotonic() - self.phase_began

    @property
    def phase_started_at(self) -> float:
        """Return when the job's phase began, in seconds since 1970."""
        return time.time() - self.phase_seconds

    @property
    def images_per_second(self) -> float:
        """Return the job's rate of images in training."""
        return self.results["images"] / max(self.train_seconds, 1e-9)


@dataclass
class CoordinatorResources:
    """The threads and files of a coordinator, which its process keeps over all generations."""

    statistics: JobStatistics
    status_writer: StatusWriter
    requests: RequestWatcher
    metrics: Metrics
    results_task: DiskTask[None] | None = None
    """The writing of the results; a loss meanwhile does not change them."""

    @classmethod
    def open(cls, job: Job) -> "CoordinatorResources":
        """Return the resources of a process that becomes coordinator."""
        return cls(
            statistics=JobStatistics(job.metrics),
            status_writer=StatusWriter(job.directory, job.owner.check),
            requests=RequestWatcher(job.directory, job.owner.heartbeat()),
            metrics=Metrics(job.directory, job.config.observe.tensorboard, job.metrics.names),
        )
