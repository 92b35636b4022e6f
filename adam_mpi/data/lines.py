"""Lines of batches: those that wait, those that threads are preparing ahead of need, and who may take them."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from adam_mpi.data.preparation import Block

Start = Callable[[int], Future[Block]]


class Line:
    """Batches in a fixed order; each is taken once, by whoever comes first."""

    def __init__(self, numbers: Iterable[int], start: Start, ahead: int) -> None:
        self.upcoming, self.start, self.ahead = deque(numbers), start, ahead
        self.started: deque[tuple[int, Future[Block]]] = deque()

    def __len__(self) -> int:
        return len(self.upcoming) + len(self.started)

    def fill(self) -> bool:
        """Have the next batches prepared."""
        worked = False
        while self.upcoming and len(self.started) < self.ahead:
            number = self.upcoming.popleft()
            self.started.append((number, self.start(number)))
            worked = True
        return worked

    def take(self) -> tuple[int, Block] | None:
        """The next batch, if it is ready."""
        self.fill()
        if not self.started or not self.started[0][1].done():
            return None
        number, future = self.started.popleft()
        return number, future.result()

    def close(self) -> list[int]:
        """Hand out no more; returns the batches that nobody has taken."""
        left = [number for number, _ in self.started] + list(self.upcoming)
        for _, future in self.started:
            future.cancel()
        self.started.clear()
        self.upcoming.clear()
        return left


class JointLine:
    """Batches of which every replica takes its share, in its own time; kept until the last one has."""

    def __init__(self, numbers: Iterable[int], start: Start, ahead: int, takers: int) -> None:
        self.upcoming, self.start, self.ahead, self.takers = deque(numbers), start, ahead, takers
        self.started: dict[int, Future[Block]] = {}
        self.taken: dict[int, int] = {}

    def fill(self) -> bool:
        worked = False
        while self.upcoming and len(self.started) < self.ahead:
            self._begin(self.upcoming.popleft())
            worked = True
        return worked

    def take(self, number: int) -> tuple[bool, Block] | None:
        """(whether this is the first to take it, the batch), if it is ready."""
        while number not in self.started and self.upcoming:
            self._begin(self.upcoming.popleft())
        if not self.started[number].done():
            return None
        block = self.started[number].result()
        self.taken[number] += 1
        first = self.taken[number] == 1
        if self.taken[number] == self.takers:
            del self.started[number], self.taken[number]
        return first, block

    def _begin(self, number: int) -> None:
        self.started[number], self.taken[number] = self.start(number), 0
