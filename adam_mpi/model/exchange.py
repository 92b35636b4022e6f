"""Exchanges between the strips of a replica: what each one owns and needs, and the buffers that it sends and receives.

Arrays are (blocks, lines, places, lanes), with places along the axis that is cut. On the way back every strip has
errors of all places that it needed; their owner sums them, its own first, then in the order of the strips.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

Span = tuple[int, int]


@dataclass(frozen=True)
class Exchange:
    """Strip r owns `owned[r]` of an axis and needs `needed[r]`; an index on the axis is `lines` values of an image."""

    layer: str
    """The layer that needs it."""
    owned: tuple[Span, ...]
    needed: tuple[Span, ...]
    lines: int
    summed: bool = True
    """Whether errors come back and are summed; every strip computes those of the loss itself."""

    def piece(self, source: int, target: int) -> Span:
        """Return the span of the axis that `source` sends to `target`; an empty one begins where it ends."""
        owned_start, owned_stop = self.owned[source]
        needed_start, needed_stop = self.needed[target]
        start = max(owned_start, needed_start)
        return start, max(start, min(owned_stop, needed_stop))

    def floats(self, source: int, target: int, images: int, own: int) -> int:
        """Return the most float32 values that `source` sends to `target` for `images` images, `own` of them its own."""
        a, b = self.piece(source, target)
        return self.lines * images * (b - a)

    def mean_values_sent(self, strip: int) -> int:
        """Return the values of an image that `strip` sends forward, or receives back."""
        others = [other for other in range(len(self.owned)) if other != strip]
        return self.lines * sum(b - a for a, b in (self.piece(strip, other) for other in others))

    def mean_values_received(self, strip: int) -> int:
        """Return the values of an image that `strip` receives forward, or sends back."""
        others = [other for other in range(len(self.owned)) if other != strip]
        return self.lines * sum(b - a for a, b in (self.piece(other, strip) for other in others))


@dataclass(frozen=True)
class Assembly(Exchange):
    """The exchange before the dense layers of a hybrid replica: each rank owns all values of its own images and needs
    those of all images. On the way back, the errors of an image are summed by the rank that owns it."""

    def floats(self, source: int, target: int, images: int, own: int) -> int:
        """Return the values that `source` sends for its `own` images."""
        return self.needed[source][1] * own

    def mean_values_sent(self, strip: int) -> int:
        """Return the values that `strip` sends, averaged over the images: one in `len(owned)` is its own."""
        return -(-super().mean_values_sent(strip) // len(self.owned))

    def mean_values_received(self, strip: int) -> int:
        """Return the values that `strip` receives, averaged over the images."""
        return -(-super().mean_values_received(strip) // len(self.owned))


def ranks_of(layers: Iterable[object]) -> int:
    """Return how many ranks share the images of a batch before the dense layers: 1 except in hybrid replicas."""
    return next((len(layer.owned) for layer in layers if isinstance(layer, Assembly)), 1)


def assembled_at(layers: Iterable[object]) -> int:
    """Return the index of the assembly among the layers, or -1."""
    return next((index for index, layer in enumerate(layers) if isinstance(layer, Assembly)), -1)


FORWARD = 0
BACK = 1


@dataclass(frozen=True)
class Port:
    """Where a segment ends: an exchange in one direction."""

    exchange: int
    direction: int


class ExchangeBuffers:
    """Packs what a strip owns for the others, and unpacks what it needs of them."""

    def __init__(
        self,
        exchange: Exchange,
        strip: int,
        owned: np.ndarray,
        needed: np.ndarray,
        owned_errors: np.ndarray,
        needed_errors: np.ndarray,
    ) -> None:
        """Take the arrays of what `strip` owns and of what it needs, and those of their errors."""
        self.exchange = exchange
        self.strip = strip
        self.owned_errors = owned_errors
        own_start = exchange.owned[strip][0]
        need_start = exchange.needed[strip][0]
        given = {other: exchange.piece(strip, other) for other in range(len(exchange.owned))}
        taken = {other: exchange.piece(other, strip) for other in range(len(exchange.owned))}
        self.given = _views(owned, given, own_start)
        """What each strip needs of what this one owns: target -> view."""
        self.given_errors = _views(owned_errors, given, own_start)
        self.taken = _views(needed, taken, need_start)
        """What this strip needs of each strip: source -> view."""
        self.taken_errors = _views(needed_errors, taken, need_start)

    def shapes_out(self, direction: int) -> dict[int, tuple[int, ...]]:
        """Return the shape of what this strip sends to each target."""
        return self._others(self.given if direction == FORWARD else self.taken_errors, direction)

    def shapes_in(self, direction: int) -> dict[int, tuple[int, ...]]:
        """Return the shape of what this strip receives from each source."""
        return self._others(self.taken if direction == FORWARD else self.given_errors, direction)

    def pack(self, direction: int, out: Mapping[int, np.ndarray], blocks: int | None = None) -> None:
        """Copy what the other strips need into the buffer of each: the first `blocks` blocks, or all."""
        views = self.given if direction == FORWARD else self.taken_errors
        for target, buffer in out.items():
            np.copyto(buffer[:blocks], views[target][:blocks])

    def unpack(self, direction: int, arrived: Mapping[int, np.ndarray], blocks: int | None = None) -> None:
        """Copy what has arrived from the others, and the strip's own part, to where it is needed."""
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


Lanes = tuple[int, slice]
"""A block, and lanes in it."""


class AssemblyBuffers:
    """The same for an assembly: values of own images for all ranks, and errors of all images for their owners."""

    def __init__(
        self,
        exchange: Assembly,
        rank: int,
        owned: np.ndarray,
        needed: np.ndarray,
        owned_errors: np.ndarray,
        needed_errors: np.ndarray,
    ) -> None:
        """Take the arrays of the images that `rank` owns and of all images, and those of their errors."""
        self.exchange = exchange
        self.rank = rank
        self.owned = owned
        self.needed = needed
        self.owned_errors = owned_errors
        self.needed_errors = needed_errors
        self.edges = (0,) * (1 + len(exchange.owned))
        """Images of rank r are those from edges[r] to edges[r + 1]."""

    def shapes_out(self, direction: int) -> dict[int, tuple[int, ...]]:
        """Return the shape of what goes to each other rank: values of own images, or errors of its images."""
        return {other: self.owned.shape for other in range(len(self.exchange.owned)) if other != self.rank}

    shapes_in = shapes_out

    def pack(self, direction: int, out: Mapping[int, np.ndarray], blocks: int | None = None) -> None:
        """Copy what the other ranks need into the buffer of each."""
        for target, buffer in out.items():
            if direction == FORWARD:
                np.copyto(buffer, self.owned)
            else:
                for own, place in self._places(target):
                    buffer[own[0], :, own[1]] = self.needed_errors[place[0], :, place[1]]

    def unpack(self, direction: int, arrived: Mapping[int, np.ndarray], blocks: int | None = None) -> None:
        """Copy values of all images together, or sum errors of own images; lanes without an image become zero."""
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

    def _places(self, rank: int) -> Iterator[tuple[Lanes, Lanes]]:
        """Yield where runs of images of `rank` lie among its own images, and among all images."""
        own_lanes = self.owned.shape[2]
        all_lanes = self.needed.shape[2]
        first = self.edges[rank]
        last = self.edges[rank + 1]
        image = first
        while image < last:
            own_block, own_lane = divmod(image - first, own_lanes)
            block, lane = divmod(image, all_lanes)
            count = min(last - image, own_lanes - own_lane, all_lanes - lane)
            yield (own_block, slice(own_lane, own_lane + count)), (block, slice(lane, lane + count))
            image += count
