"""The state that one rank brings into the next generation; recovery decides from the states of all ranks. Pure."""

from dataclasses import dataclass, field
from typing import Any

from adam_mpi.sharding.joint_batches import Progress
from adam_mpi.sharding.position import Position


@dataclass
class RankState:
    """The state of one rank when a generation ends; fields of roles that it does not have keep their defaults."""

    member: int
    detected: float = 0.0
    """When it detected the failure, in seconds since 1970."""
    copies: dict[int, int] = field(default_factory=dict)
    """Of a server: shard -> version of its whole copy."""
    behind: dict[int, int] = field(default_factory=dict)
    """Of a server: shard -> the strip that pushes it, of copies that were to be sent again and have not arrived. Other
    servers may have acknowledged pushes without them."""
    began: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of a server: strip -> pusher -> the last of its pushes that was acknowledged when the generation began."""
    firm: frozenset[int] = frozenset()
    """Of a server, in synchronous training: copies whose last step cannot be taken back."""
    served: frozenset[int] = frozenset()
    """Of a server: the shards that it served in the generation."""
    resumed_at: tuple[float | None, float | None] = (None, None)
    """Of a server: when it first applied a message of any pusher, and of all, in the generation."""
    positions: dict[int, Position] = field(default_factory=dict)
    """Of a server: the position of training; in synchronous training by clock, before and after the last one."""
    clock: int | None = None
    """Of a worker: the clock of its first push that is not acknowledged."""
    acknowledged: tuple[int, int] | None = None
    """Of a worker: the number of the last push that was acknowledged as a whole, and the clock after it."""
    strip: int = 0
    """Of a worker: which strip of its replica it is."""
    resent: tuple[tuple[int, int], ...] = ()
    """Of a worker: clock and images of every push that it will send again."""
    progress: Progress = field(default_factory=Progress)
    """How far it is with joint batches."""
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of a server, where pushes may have to be taken back: shard -> pusher -> the highest number of its messages."""
    batches: frozenset[int] = frozenset()
    """Of a worker: ids of batches that it has received and will report."""
    epoch_sums: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    """Of a data rank: epoch, and the sums of images, loss and correct answers so far."""
    unacknowledged: int = 0
    """Of a client of a `ParameterServer`: messages that it will send again."""
    coordinator: dict[str, Any] | None = None
    """The last state of the coordinator that it has received."""
    captured: tuple[str, ...] = ()
    """Layers that push factors; empty on a new rank."""
