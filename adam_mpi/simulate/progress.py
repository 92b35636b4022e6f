"""How far a long simulation is."""

import sys
from time import monotonic

from adam_mpi.observe.screen import duration

# Seconds between two lines; the share before which the time so far says nothing about the rest.
INTERVAL, FIRST = 5.0, 0.01


class Progress:
    """Lines on stderr while a long simulation runs; a short one says nothing."""

    def __init__(self) -> None:
        self.begun = self.told = monotonic()

    def __call__(self, share: float) -> None:
        now = monotonic()
        if now - self.told >= INTERVAL:
            left = duration((now - self.begun) * (1 - share) / share) if share >= FIRST else "unknown"
            print(f"simulated {share:.0%}, ETA {left}", file=sys.stderr, flush=True)
            self.told = now
