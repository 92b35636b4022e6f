"""A server's part of a snapshot: hold pushes back at the barrier, copy, and write the copy in a thread of its own.

The coordinator asks every server to hold: each answers how far it has begun with every pusher, and begins nothing
further. From the answers the coordinator chooses the barrier, one clock per pusher, the same for all servers. A server
applies what is before the barrier, copies its state when it has all of it, and continues; so no worker takes part, and
none waits longer than for the copy.
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
from adam_mpi.checkpoint.hdf5_file import aligned_memory
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import Position

log = logging.getLogger(__name__)


class SnapshotBarrier:
    """Decides which pushes are before the snapshot, and writes the copies."""

    def __init__(self, rings: int, seconds: float, writing: Callable[[], None] = lambda: None) -> None:
        """Make a snapshot barrier for `rings` pushers.

        `seconds`: how long a disk may take nothing before a copy is given up; `writing`: called before each write.
        """
        self.seconds = seconds
        self.writing = writing
        self.begun = [0] * rings
        """Pusher -> its first clock of which nothing has been applied."""
        self.limits: list[int] | None = None
        """While a snapshot is made: pusher -> the first clock that is not applied."""
        self.folder: Path | None = None
        """Where to write, once the barrier is known."""
        self.tasks: deque[tuple[Path, DiskTask[dict[str, Any]]]] = deque()
        """Copies that are being written."""

    def hold(self) -> list[int]:
        """Hold a server at the snapshot barrier: begin no further clock; return the limits."""
        self.limits = list(self.begun)
        return self.limits

    def set_limits(self, clocks: Sequence[int], folder: Path) -> None:
        """Set the snapshot barrier to `clocks`, one per pusher; the copy goes into `folder`."""
        self.limits = list(clocks)
        self.folder = folder

    def release(self) -> None:
        """Let all pushes pass the snapshot barrier."""
        self.limits = None
        self.folder = None

    def allows(self, ring: int, clock: int) -> bool:
        """Return whether the snapshot barrier lets a push of `clock` from the pusher `ring` be applied now."""
        return self.limits is None or clock < self.limits[ring]

    def reached(self, clocks: Sequence[int]) -> bool:
        """Return whether everything before the snapshot barrier is applied; `clocks`: each pusher's."""
        if self.folder is None or self.limits is None:
            return False
        return all(clock >= limit for clock, limit in zip(clocks, self.limits, strict=True))

    def copy_state(
        self,
        name: str,
        shards: Sequence[Shard],
        state: Mapping[str, Mapping[int, np.ndarray]],
        versions: np.ndarray,
        position: Position,
        batches: np.ndarray | None = None,
    ) -> None:
        """Copy the `state` (part -> shard -> values), release the barrier, and start to write the snapshot `name`.

        `batches`: how many each shard has been stepped on.
        """
        assert self.folder is not None
        path = self.folder / name
        copied = {part: _joined([arrays[shard.index] for shard in shards]) for part, arrays in state.items()}
        at = {"epoch": position.epoch, "batches": position.count, "images": position.images, "clock": position.clock}
        write = partial(
            snapshot.write_server_part,
            path,
            shards,
            state=copied,
            versions=versions.copy(),
            batches=batches,
            position=position.pack(),
        )
        self.tasks.append((path, DiskTask("snapshot", partial(self._write, path, write, at), self.seconds)))
        self.release()

    def written(self) -> dict[str, Any] | None:
        """Return what SnapshotWritten reports of the next copy that is written or has failed; None if there is none."""
        if not self.tasks or not self.tasks[0][1].over:
            return None
        path, task = self.tasks.popleft()
        try:
            return task.result()
        except Exception as error:
            log.warning("%s is not written", path, exc_info=error)
            return {"error": f"{path}: {reason(error)}", "hung": isinstance(error, TimeoutError)}

    def _write(self, path: Path, write: Callable[[], None], at: Mapping[str, int]) -> dict[str, Any]:
        """Write the copy of a server or pusher into the snapshot; return what SnapshotWritten reports of it."""
        self.writing()
        write()
        return {**at, "file": path.name, "size": path.stat().st_size}


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return `arrays` of a snapshot one after the other, in memory that can be written past the page cache."""
    memory = aligned_memory(sum(array.nbytes for array in arrays)).view(np.float32)
    return np.concatenate(arrays, out=memory)
