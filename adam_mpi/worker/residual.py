"""What error feedback carries into later pushes, and a pusher's part of a snapshot: the residual between two clocks.

Told to hold, a pusher says how many pushes it has begun, and packs nothing of later ones. When the cut is known it
packs what is before it; the residual is then what belongs to the snapshot: it is copied, and pushes go on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi.durable import snapshot
from adam_mpi.durable.cut import Cut
from adam_mpi.durable.position import Position
from adam_mpi.server.shelves import Shelves
from adam_mpi.worker.lane import Lane


class Residual:
    def __init__(self, shelves: Shelves, ring: int, lanes: Sequence[Lane[Any]], values: np.ndarray) -> None:
        self.shelves, self.ring, self.lanes, self.values = shelves, ring, lanes, values
        self.cut = Cut(1)

    def hold(self, begun: int) -> list[int]:
        """Returns how far we are, as a clock per pusher."""
        self.cut.begun = [begun]
        return [self.cut.hold()[0] if ring == self.ring else 0 for ring in range(len(self.shelves.pushers))]

    def at(self, clocks: Sequence[int], folder: Path) -> None:
        self.cut.at([clocks[self.ring]], folder)
        self._release()

    def holds(self, clock: int) -> bool:
        return not self.cut.allows(0, clock)

    def step(self, begun: int) -> None:
        """Copy the residual once everything before the cut has been packed."""
        if not self.cut.reached([begun]) or any(lane.waiting for lane in self.lanes):
            return
        shards, name = self.shelves.shards, snapshot.residual_name(self.ring)
        state = {"residual": {shard.index: self.values[shard.start : shard.stop] for shard in shards}}
        self.cut.take(name, shards, state, np.zeros(len(shards), np.int64), Position(0))
        self._release()

    def _release(self) -> None:
        """Let go what is before the cut, or everything when there is none."""
        for lane in self.lanes:
            while lane.held and not self.holds(lane.held[0].contribution.clock):
                lane.waiting.append(lane.held.popleft())
