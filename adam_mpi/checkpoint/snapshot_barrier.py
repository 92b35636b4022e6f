"""A server's part of a snapshot: hold pushes back at the cut, copy, and write the copy on a thread of its own.

The head asks every server to hold: each says how far it has begun with every pusher, and begins nothing further. From
these the head makes the cut, one clock per pusher, which is the same for all servers. A server applies what is before
the cut, copies its state when it has all of it, and goes on; so no worker takes part, and none waits but for the copy.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi.checkpoint import snapshot
from adam_mpi.checkpoint.disk_task import DiskTask, reason
from adam_mpi.checkpoint.hdf5_file import blocks
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.shards import Shard

log = logging.getLogger(__name__)


class SnapshotBarrier:
    def __init__(self, rings: int, seconds: float, writing: Callable[[], None] = lambda: None) -> None:
        """`seconds`: after which a disk that takes nothing is given up; `writing` is called before it is written."""
        self.seconds, self.writing = seconds, writing
        self.begun = [0] * rings
        """The clock of each pusher that nothing has been applied of."""
        self.limits: list[int] | None = None
        """While a snapshot is made: nothing of these clocks or later ones is applied."""
        self.folder: Path | None = None
        """Where to write, once the cut is known."""
        self.errands: deque[tuple[Path, DiskTask[dict[str, Any]]]] = deque()
        """Copies that are being written."""

    def hold(self) -> list[int]:
        self.limits = list(self.begun)
        return self.limits

    def at(self, clocks: Sequence[int], folder: Path) -> None:
        self.limits, self.folder = list(clocks), folder

    def release(self) -> None:
        self.limits = self.folder = None

    def allows(self, ring: int, clock: int) -> bool:
        return self.limits is None or clock < self.limits[ring]

    def reached(self, clocks: Sequence[int]) -> bool:
        """Whether everything before the cut is applied."""
        if self.folder is None or self.limits is None:
            return False
        return all(clock >= limit for clock, limit in zip(clocks, self.limits, strict=True))

    def take(
        self,
        name: str,
        shards: Sequence[Shard],
        state: Mapping[str, Mapping[int, np.ndarray]],
        versions: np.ndarray,
        position: Position,
    ) -> None:
        """Copy, let pushes go on, and have the copy written."""
        copied = {part: _joined([arrays[shard.index] for shard in shards]) for part, arrays in state.items()}
        assert self.folder is not None
        arguments = (self.folder / name, shards, copied, versions.copy(), position.pack())
        word = {"epoch": position.epoch, "batches": position.count, "images": position.images, "clock": position.clock}
        errand = DiskTask("snapshot", partial(self._write, word, *arguments), self.seconds)
        self.errands.append((arguments[0], errand))
        self.release()

    def written(self) -> dict[str, Any] | None:
        """What to tell of the next copy that is written, or cannot be for whatever reason; None if there is none."""
        if not self.errands or not self.errands[0][1].over:
            return None
        path, errand = self.errands.popleft()
        try:
            return errand.result()
        except Exception as error:
            log.warning("%s is not written", path, exc_info=error)
            return {"error": f"{path}: {reason(error)}", "hung": isinstance(error, TimeoutError)}

    def _write(self, word: dict[str, Any], path: Path, *arguments: Any) -> dict[str, Any]:
        self.writing()
        snapshot.write(path, *arguments)
        return word | {"file": path.name, "size": path.stat().st_size}


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One after the other, in memory that can be written past the cache."""
    memory = blocks(sum(array.nbytes for array in arrays)).view(np.float32)
    return np.concatenate(arrays, out=memory)
