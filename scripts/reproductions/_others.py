"""How much of the machine other programs used meanwhile: a time that was measured is worth little without it."""

import os
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
USED = (0, 1, 2, 5, 6)
"""User, nice, system and both kinds of interrupts, of the columns in there."""


def others() -> Callable[[], float | None]:
    """Begins to look; the function returned tells the share of all cores that was not used by us and our children, as
    far as these have ended. None where the system does not tell."""
    begun, used, own = time.monotonic(), _used(), sum(os.times()[:4])

    def share() -> float | None:
        if used is None or (now := _used()) is None:
            return None
        seconds = (time.monotonic() - begun) * (os.cpu_count() or 1)
        theirs = now - used - (sum(os.times()[:4]) - own)
        return round(min(1.0, max(0.0, theirs / max(seconds, 1e-9))), 3)

    return share


def _used() -> float | None:
    """CPU seconds of everybody since the machine began."""
    if not STAT.exists():
        return None
    numbers = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:]]
    return sum(numbers[column] for column in USED) / os.sysconf("SC_CLK_TCK")


def told(shares: list[float | None]) -> str:
    """For people."""
    known = [share for share in shares if share is not None]
    return f"other programs used up to {max(known):.0%} of the cores meanwhile" if known else ""
