"""What all ranks agree on before they start."""

from dataclasses import dataclass
from pathlib import Path

from adam_mpi.checkpoint.identity import Identity
from adam_mpi.checkpoint.owner import Owner
from adam_mpi.checkpoint.resume import Resume
from adam_mpi.config import Config
from adam_mpi.data.sets import Description
from adam_mpi.model.layers import LayerShape


@dataclass(frozen=True)
class Job:
    """Made by rank 0, the same everywhere."""

    config: Config
    directory: Path
    description: Description
    shapes: tuple[LayerShape, ...]
    resume: Resume | None
    kernels: dict | None
    """How convolutions are computed, where arithmetic does not decide: the same on every rank, and after a resume."""
    life: Path
    """Where the servers' stores of this job go, in its first generation."""
    replicas: int
    """How many it begins with: shards are cut for so many, and uneven shares are drawn for them."""
    until: float
    """When the job is to stop, in seconds since 1970."""
    identity: Identity
    owner: Owner
    """The claim under which the job may write into the run directory."""
