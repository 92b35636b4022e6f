"""Some spans of a flat parameter vector, for ranks that do not have the memory for all of it. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

Piece = tuple[int, dict[str, np.ndarray]]
"""Where it begins in the flat vector, and its values by name: weights, state, ema."""


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans in order, neighbors joined into one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


def meets(spans: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Return whether anything from `start` to `stop` is in `spans`, which are in order."""
    before = bisect_left(spans, (stop, 0)) - 1
    return before >= 0 and spans[before][1] > start


class Spans:
    """Reads like a vector, but has only the values of the spans (start, stop) that it was made for."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        spans = sorted(spans)
        places = np.cumsum([0, *(stop - start for start, stop in spans)]).tolist()
        self.flat = np.zeros(places[-1], np.float32)
        """The values of all spans, one after the other."""
        self.values = {start: self.flat[a:b] for (start, _), (a, b) in zip(spans, pairwise(places), strict=True)}
        self.starts = list(self.values)

    def put(self, start: int, values: np.ndarray) -> None:
        """Take over the values of a piece that begins at `start`, as far as they are in our spans."""
        stop = start + len(values)
        for first in self.starts[max(0, bisect_right(self.starts, start) - 1) : bisect_left(self.starts, stop)]:
            mine = self.values[first]
            low = max(first, start)
            high = min(first + len(mine), stop)
            if low < high:
                mine[low - first : high - first] = values[low - start : high - start]

    def add(self, other: "Spans") -> None:
        """Add the values of `other`, which has the same spans."""
        self.flat += other.flat

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return the values of `span`, which begins where one of our spans begins."""
        return self.values[span.start][: span.stop - span.start]


def gathered(pieces: Iterator[Piece], spans: Iterable[tuple[int, int]]) -> dict[str, Spans]:
    """Return the values of `pieces` that are in `spans`, by name."""
    found: dict[str, Spans] = {}
    spans = tuple(spans)
    for start, values in pieces:
        for name, array in values.items():
            found.setdefault(name, Spans(spans)).put(start, array)
    return found
