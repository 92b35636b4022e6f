"""A message that has arrived in a mailbox."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_PARTS = 1 << 12


@dataclass(slots=True, eq=False)
class Mail:
    """A message that has arrived: its place, and the fields of its header."""

    ring: int
    start: int
    """Place of its body in the mailbox, in 32-bit words."""
    position: int
    checksum: int
    generation: int
    pusher: int
    sequence: int
    clock: int
    words: int
    batches: int
    first: int
    values: int
    images: int
    seen: int
    shard: int
    kind: int
    codec: int
    last: int
    finite: int
    part: int
    parts: int
    targets: Sequence[int] = ()
    """Shards that it is for and that do not have it yet."""
    known: Sequence[int] = ()
    """Those that have it: it was sent again."""
    shards: int = 1
    """How many of them have still to be stepped on by it."""
    factors: np.ndarray | None = None
    """The body of a factor push as float32, and the buffer it was unpacked into if it was."""
    buffer: np.ndarray | None = None

    @property
    def number(self) -> int:
        """Grows with every message of a pusher to a shard."""
        return self.sequence * MOST_PARTS + self.part
