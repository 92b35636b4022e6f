"""What a job is: what its caller wants of it, and what all its ranks agree on before they start."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adam_mpi.checkpoint.identity import Identity
from adam_mpi.checkpoint.owner import Owner
from adam_mpi.checkpoint.resume import Resume
from adam_mpi.config import Config, Given
from adam_mpi.data.sets import Description
from adam_mpi.model.layers import LayerShape

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

    @property
    def failure_file(self) -> Path:
        """Return the file that says why the job failed."""
        return self.directory / FAILURE
