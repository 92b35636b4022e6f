"""One exchange of one context on one strip: what goes to each other strip and comes from it, forward and back.

Arrays are (blocks, lines, places, lanes), with places along the axis that is cut. On the way back every strip has
errors of all that it needed; who owns a place sums them up, its own first, then in the order of the strips.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from adam_mpi.model.exchange import Assembly, Exchange, Span

FORWARD, BACK = 0, 1


@dataclass(frozen=True)
class Port:
    """Where a segment ends: an exchange in one direction."""

    passage: int
    direction: int


class ExchangeBuffers:
    def __init__(
        self,
        exchange: Exchange,
        strip: int,
        owned: np.ndarray,
        needed: np.ndarray,
        owned_errors: np.ndarray,
        needed_errors: np.ndarray,
    ) -> None:
        self.exchange, self.strip, self.owned_errors = exchange, strip, owned_errors
        begin, start = exchange.owned[strip][0], exchange.needed[strip][0]
        given = {other: exchange.piece(strip, other) for other in range(len(exchange.owned))}
        taken = {other: exchange.piece(other, strip) for other in range(len(exchange.owned))}
        self.given, self.given_errors = _views(owned, given, begin), _views(owned_errors, given, begin)
        """What others, and we ourselves, need of ours: target -> view."""
        self.taken, self.taken_errors = _views(needed, taken, start), _views(needed_errors, taken, start)
        """What we need, of whom: source -> view."""

    def shapes_out(self, direction: int) -> dict[int, tuple[int, ...]]:
        """Target -> shape of what goes there."""
        return self._others(self.given if direction == FORWARD else self.taken_errors, direction)

    def shapes_in(self, direction: int) -> dict[int, tuple[int, ...]]:
        """Source -> shape of what comes from there."""
        return self._others(self.taken if direction == FORWARD else self.given_errors, direction)

    def pack(self, direction: int, out: Mapping[int, np.ndarray], blocks: int | None = None) -> None:
        """Copy what goes to the other strips into the buffer of each: so many blocks, or all."""
        views = self.given if direction == FORWARD else self.taken_errors
        for target, buffer in out.items():
            np.copyto(buffer[:blocks], views[target][:blocks])

    def unpack(self, direction: int, arrived: Mapping[int, np.ndarray], blocks: int | None = None) -> None:
        """Put what has come from the others, and what is our own, where it is needed."""
        if direction == FORWARD:
            self._take(arrived, blocks)
        elif self.exchange.summed:
            self._sum(arrived, blocks)
        else:
            np.copyto(self.given_errors[self.strip], self.taken_errors[self.strip])

    def _take(self, arrived: Mapping[int, np.ndarray], blocks: int | None) -> None:
        if self.strip in self.taken:
            np.copyto(self.taken[self.strip][:blocks], self.given[self.strip][:blocks])
        for source, values in arrived.items():
            np.copyto(self.taken[source][:blocks], values[:blocks])

    def _sum(self, arrived: Mapping[int, np.ndarray], blocks: int | None) -> None:
        own = self.given_errors.get(self.strip)
        if own is None or own.shape != self.owned_errors.shape:
            self.owned_errors[:blocks] = 0
        if own is not None:
            np.copyto(own[:blocks], self.taken_errors[self.strip][:blocks])
        for source, values in arrived.items():
            self.given_errors[source][:blocks] += values[:blocks]

    def _others(self, views: Mapping[int, np.ndarray], direction: int) -> dict[int, tuple[int, ...]]:
        if direction == BACK and not self.exchange.summed:
            return {}
        return {other: view.shape for other, view in views.items() if other != self.strip}


def _views(array: np.ndarray, pieces: Mapping[int, Span], start: int) -> dict[int, np.ndarray]:
    return {other: array[:, :, a - start : b - start] for other, (a, b) in pieces.items() if a < b}


Place = tuple[int, slice]
"""A block, and lanes in it."""


class AssemblyBuffers:
    def __init__(
        self,
        exchange: Assembly,
        rank: int,
        owned: np.ndarray,
        needed: np.ndarray,
        owned_errors: np.ndarray,
        needed_errors: np.ndarray,
    ) -> None:
        self.exchange, self.rank = exchange, rank
        self.owned, self.needed, self.owned_errors, self.needed_errors = owned, needed, owned_errors, needed_errors
        self.edges = (0,) * (1 + len(exchange.owned))
        """Images of rank r are those from edges[r] to edges[r + 1]."""

    def shapes_out(self, direction: int) -> dict[int, tuple[int, ...]]:
        """Other rank -> shape of what goes there: values of our images, or errors of theirs."""
        return {other: self.owned.shape for other in range(len(self.exchange.owned)) if other != self.rank}

    shapes_in = shapes_out

    def pack(self, direction: int, out: Mapping[int, np.ndarray], blocks: int | None = None) -> None:
        for target, buffer in out.items():
            if direction == FORWARD:
                np.copyto(buffer, self.owned)
            else:
                for own, place in self._places(target):
                    buffer[own[0], :, own[1]] = self.needed_errors[place[0], :, place[1]]

    def unpack(self, direction: int, arrived: Mapping[int, np.ndarray], blocks: int | None = None) -> None:
        """Lanes without an image are zero: they count for nothing."""
        if direction == FORWARD:
            self.needed[self.edges[-1] // self.needed.shape[2] : blocks] = 0
            for source, values in {self.rank: self.owned, **arrived}.items():
                for own, place in self._places(source):
                    self.needed[place[0], :, place[1]] = values[own[0], :, own[1]]
            return
        self.owned_errors[:] = 0
        for own, place in self._places(self.rank):
            mine = self.owned_errors[own[0], :, own[1]]
            mine[:] = self.needed_errors[place[0], :, place[1]]
            for values in arrived.values():
                mine += values[own[0], :, own[1]]

    def _places(self, rank: int) -> Iterator[tuple[Place, Place]]:
        """Where images of a rank lie among its own, and among all."""
        lanes, all_lanes = self.owned.shape[2], self.needed.shape[2]
        first, last = self.edges[rank], self.edges[rank + 1]
        image = first
        while image < last:
            (own, lane), (block, place) = divmod(image - first, lanes), divmod(image, all_lanes)
            count = min(last - image, lanes - lane, all_lanes - place)
            yield (own, slice(lane, lane + count)), (block, slice(place, place + count))
            image += count
