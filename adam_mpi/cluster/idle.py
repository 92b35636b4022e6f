"""How long a polling loop rests between two rounds without work."""

import time
from collections.abc import Callable


class Idle:
    """The back-off of a polling loop: no rest after work, then a short spin, then rests of up to 2 ms.

    A rest is at most an eighth of the time waited so far, so that it delays the next work by a small part of the wait;
    after half a second of waiting rests are longer. A `patient` loop rests a millisecond at once: no rank waits for it,
    and trainer threads may need the core.
    """

    SPINS = 20
    SHARE = 1 / 8
    SHORTEST = 50e-6
    LONGEST = 2e-3
    PATIENCE = 0.5
    """Seconds without work after which rests may take `LONGER`."""
    LONGER = 8e-3
    PATIENT = 1e-3

    def __init__(self, poll: str, rest: Callable[[float], None] = time.sleep, patient: bool = False) -> None:
        """Make the back-off for `cluster.poll` = `poll`; `rest` sleeps for the seconds it is given."""
        self.spin = poll == "spin"
        self.rest = rest
        self.spins = 1 if patient else self.SPINS
        self.shortest = self.PATIENT if patient else self.SHORTEST
        self.rounds = 0
        self.since = time.perf_counter()

    def back_off(self, worked: bool) -> None:
        """Rest between two rounds of a polling loop, depending on whether it `worked` and how long it has not."""
        if worked:
            self.rounds = 0
            self.since = time.perf_counter()
        if worked or self.spin:
            return
        self.rounds += 1
        if self.rounds < self.spins:
            time.sleep(0)
            return
        waited = time.perf_counter() - self.since
        longest = self.LONGEST if waited < self.PATIENCE else self.LONGER
        self.rest(min(longest, max(self.shortest, waited * self.SHARE)))
