"""Lines of batches: those that wait, those that threads are preparing ahead of need, and who may take them."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import MappingProxyType

from adam_mpi.data.preparation import Block

# Images prepared by a thread at a time, and batches prepared ahead for each replica besides those it has in hand.
GROUP, AHEAD = 256, 4
Start = Callable[[list[int]], Future[list[Block]]]


class Line:
    """Batches in a fixed order, each for `takers` takers; prepared in groups until `ahead` of them are on their way."""

    def __init__(
        self, numbers: Iterable[int], start: Start, ahead: int, group: int, takers: int = 1,
        begun: Mapping[int, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`begun`: batches that some have their shares of already -> how many takers are left."""
        self.upcoming, self.start, self.ahead, self.group, self.takers = deque(numbers), start, ahead, group, takers
        self.begun = begun
        self.started: dict[int, tuple[Future[list[Block]], int]] = {}
        """Number -> the group it is prepared in, and its place there."""
        self.taken: dict[int, int] = {}
        self.size = 1
        """Of the next group: the first batches of a phase are waited for, so groups begin small."""

    def __len__(self) -> int:
        return len(self.upcoming) + len(self.started)

    @property
    def ready(self) -> int:
        """Batches that could be taken now."""
        return sum(future.done() for future, _ in self.started.values())

    def fill(self) -> bool:
        """Have the next batches prepared."""
        worked = False
        while self.upcoming and len(self.started) < self.ahead:
            self._begin()
            worked = True
        return worked

    def take(self, number: int | None = None) -> tuple[int, Block] | None:
        """(number, batch) of the next batch or of the named one, if it is ready."""
        while self.upcoming and (number not in self.started if number is not None else not self.started):
            self._begin()
        number = next(iter(self.started)) if number is None else number
        future, place = self.started[number]
        if not future.done():
            return None
        self.taken[number] = self.taken.get(number, 0) + 1
        if self.taken[number] == self.begun.get(number, self.takers):
            del self.started[number], self.taken[number]
        return number, future.result()[place]

    def close(self) -> list[int]:
        """Hand out no more; returns the batches that nobody has taken."""
        left = [*self.started, *self.upcoming]
        self.started.clear()
        self.upcoming.clear()
        return left

    def stop(self) -> None:
        """Hand out no more, but for the shares of those batches that somebody has a share of."""
        self.upcoming = deque(number for number in self.upcoming if number in self.begun)
        wanted = self.taken.keys() | self.begun.keys()
        self.started = {number: place for number, place in self.started.items() if number in wanted}

    def is_begun(self, number: int) -> bool:
        """Whether somebody has taken his share of a batch, and others have not."""
        return number in self.started or number in self.upcoming and number in self.begun

    def _begin(self) -> None:
        numbers = [self.upcoming.popleft() for _ in range(min(self.size, len(self.upcoming)))]
        self.size = min(2 * self.size, self.group)
        future = self.start(numbers)
        self.started |= {number: (future, place) for place, number in enumerate(numbers)}
