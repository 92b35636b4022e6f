"""The side of one rank of an assembly: outputs of its own images go to all ranks of a hybrid replica, errors come back.

Arrays are (blocks, values, lanes), an image in each lane. Used as `Passage` is; `edges` says which images of the batch
are whose.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from adam_mpi.model.exchange import Assembly
from adam_mpi.model.passage import FORWARD

Place = tuple[int, slice]
"""A block, and lanes in it."""


class AssemblyPassage:
    def __init__(
        self, exchange: Assembly, rank: int, owned: np.ndarray, needed: np.ndarray, owned_errors: np.ndarray,
        needed_errors: np.ndarray,
    ) -> None:  # fmt: skip
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
