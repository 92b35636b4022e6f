"""What one rank brings into the next generation; recovery decides from the states of all ranks."""

from dataclasses import dataclass, field
from typing import Any

from adam_mpi.sharding.joint_batches import Progress
from adam_mpi.sharding.position import Position


@dataclass
class RankState:
    """What one rank brings along."""

    member: int
    detected: float = 0.0
    """When it saw the failure, in seconds since 1970."""
    copies: dict[int, int] = field(default_factory=dict)
    """Of a server: shard -> version of its whole copy."""
    behind: dict[int, int] = field(default_factory=dict)
    """Of a server: those of its copies that were to be sent anew in the generation and have not come: shard -> the
    strip that pushes it. Others may have acknowledged pushes without them."""
    began: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of a server: strip -> pusher -> the last of its pushes that was acknowledged when the generation began."""
    firm: frozenset[int] = frozenset()
    """Of a server, in synchronous training: copies whose last step cannot be taken back."""
    served: frozenset[int] = frozenset()
    """Of a server: the shards that it served."""
    went_on: tuple[float | None, float | None] = (None, None)
    """Of a server: when in its generation it first had something to apply, of any pusher and of all."""
    positions: dict[int, Position] = field(default_factory=dict)
    """Of a server: where training stands; in synchronous training by clock, before and after the last one."""
    clock: int | None = None
    """Of a worker: that of its first push that is not acknowledged."""
    acknowledged: tuple[int, int] | None = None
    """Of a worker: the number of the last push that was acknowledged as a whole, and the clock after it."""
    strip: int = 0
    """Of a worker: that of its replica which it is."""
    resent: tuple[tuple[int, int], ...] = ()
    """Of a worker: clock and images of every push that it will send again."""
    progress: Progress = field(default_factory=Progress)
    """How far it is with batches that all replicas compute together."""
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of a server, where pushes may have to be taken back: shard -> pusher -> the highest number of its messages."""
    batches: frozenset[int] = frozenset()
    """Of a worker: ids of batches that it has in hand, and will report."""
    tally: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0)
    """Of a data rank: epoch, images, loss and correct answers counted so far."""
    unacknowledged: int = 0
    head: dict[str, Any] | None = None
    """The last state of the head that it has heard of."""
    captured: tuple[str, ...] = ()
    """Layers that push factors; a new rank knows none."""
