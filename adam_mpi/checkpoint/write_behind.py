"""Writing behind: what a server has applied goes to its store on a thread of its own, many updates in one write.

The main thread copies a shard when it has been dirty for a while; the writing thread takes what has been copied, a
group at a time. A disk that is full, read-only or slow stops nobody: what was not written stays dirty and is tried
again, and a loud warning says how far behind the store is. A second thread notes how many pushes are acknowledged:
nothing of this is ever written by the main thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from adam_mpi.base import trace
from adam_mpi.base.errors import UserError
from adam_mpi.base.log import say
from adam_mpi.checkpoint.disk_task import reason
from adam_mpi.checkpoint.store_file import Record, StoreFile
from adam_mpi.config import Store
from adam_mpi.sharding.shards import Shard

BUFFERS = 32
"""Copies on their way at the most; also the most that are written between two waits for the disk."""
WARN_SECONDS, CLOSE_SECONDS, NOTE_SECONDS = 30.0, 120.0, 0.002
"""Between two warnings; after which a disk that takes nothing more is given up at the end; between two notes."""

Copy = Callable[[int, np.ndarray], tuple[int, int]]
"""(place, buffer) -> (version, images): copy a shard's state, and say what is in it."""


class WriteBehind:
    """The store of one server. `touch` after each update, `step` often: both by the main thread."""

    def __init__(
        self,
        path: Path,
        config: Store,
        shards: Sequence[Shard],
        parts: Sequence[str],
        position_bytes: int,
        copy: Copy,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.config, self.copy, self.before_write = path, config, copy, before_write
        self.make = lambda: StoreFile(path, shards, parts, position_bytes)
        self.bytes = [4 * len(parts) * shard.size for shard in shards] + [position_bytes]
        self.dirty: dict[int, float] = {}
        """Record -> since when it has an update that is not copied; the oldest first."""
        self.flying: dict[int, float] = {}
        """The same for those that are copied and not on disk."""
        self.pause = self.patience = 0.0
        self.closing: float | None = None
        """At the end: when the disk took something for the last time."""
        self.missing: set[int] | None = None
        """Records that have never been written; all of them at the first step."""
        self.error: Exception | None = None
        self.warned = self.looked = self.stepped = 0.0
        self.written = 0
        self.acknowledged = 0, 0
        """Pushes, and their images."""
        self.news, self.ended = threading.Event(), False
        self.file: StoreFile | None = None
        self.free = [np.empty(max(self.bytes), np.uint8) for _ in range(BUFFERS)]
        self.orders: SimpleQueue[tuple[Record, np.ndarray] | None] = SimpleQueue()
        self.done: SimpleQueue[tuple[list[tuple[Record, np.ndarray]], Exception | None]] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="store", daemon=True)
        self.notes = threading.Thread(target=self._note, name="store notes", daemon=True)
        self.notes.start()
        self.thread.start()

    @property
    def whole(self) -> bool:
        """Whether every record has been written at least once."""
        return self.missing == set()

    @property
    def behind(self) -> float:
        """Seconds since the oldest update that is not on disk."""
        oldest = min([*self.flying.values(), *list(self.dirty.values())[:1]], default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def touch(self, place: int) -> None:
        """A record has changed."""
        self.dirty.setdefault(place, time.monotonic())

    def acknowledge(self, pushes: int, images: int) -> None:
        """So many have been acknowledged; the file knows it in a few milliseconds, or when a slow disk has taken it."""
        self.acknowledged = pushes, images
        self.news.set()

    def step(self) -> None:
        """Take note of what has been written; copy what it is time for; tell when the disk is slow."""
        now = time.monotonic()
        if self.missing is None:
            self.missing = set(range(len(self.bytes)))
            self.dirty = dict.fromkeys(self.missing, now)
        if not self.done.empty():
            self._collect()
        if self.dirty and now >= self.pause:
            self._copy_due(now, self.missing)
        self.stepped = now
        if now - self.looked > self.config.interval / 8:
            self.looked = now
            if self.behind > self.config.interval:
                self._warn("slow disk" if self.error is None else reason(self.error))

    def close(self) -> bool:
        """Go on with writing all that is dirty, once more; True when that is done, or the disk does not take it.

        Called again and again, between steps: however long it takes, nobody stands still.
        """
        if self.closing is None:
            self.closing, self.pause, self.error = time.monotonic(), 0.0, None
        hangs = time.monotonic() - self.closing > CLOSE_SECONDS
        if (self.dirty or self.flying) and self.error is None and not hangs:
            return False
        if self.dirty or self.flying:
            trouble = reason(self.error) if self.error else f"the disk has taken nothing for {CLOSE_SECONDS:g} s"
            say(f"warning: store {self.path}: {trouble}; it ends {self.behind:.1f} s behind")
        self.end()
        return True

    def end(self) -> None:
        """Nothing more is to be written; what is under way is, if the disk takes it."""
        self.orders.put(None)

    def _copy_due(self, now: float, missing: set[int]) -> None:
        """One record, so that nobody waits for long; more where rounds are so long that all would take too long."""
        count = 1 + int(len(self.dirty) * (now - self.stepped) / (self.config.interval / 8))
        while count and self.dirty and self.free:
            place, since = next(iter(self.dirty.items()))
            # Its updates gather for a while, and what is under way is written before it is copied again.
            gathers = now - since < self.patience and place not in missing and self.closing is None
            if place in self.flying or gathers:
                return
            self._send(place)
            count -= 1

    def _send(self, place: int) -> None:
        buffer, size = self.free.pop(), self.bytes[place]
        version, images = self.copy(place, buffer[:size])
        record = Record(place, version, images, time.time_ns(), buffer[:size], self.acknowledged[0])
        self.flying[place] = self.dirty.pop(place)
        self.orders.put((record, buffer))

    def _collect(self) -> None:
        if self.closing is not None:
            self.closing = time.monotonic()
        while not self.done.empty():
            group, error = self.done.get()
            for record, buffer in group:
                self.free.append(buffer)
                since = self.flying.pop(record.place)
                if error is not None:
                    # Back to the front: nothing has been dirty for longer.
                    self.dirty = {record.place: since} | {p: s for p, s in self.dirty.items() if p != record.place}
            if error is None:
                self._written(group)
            else:
                self._failed(error)

    def _written(self, group: list[tuple[Record, np.ndarray]]) -> None:
        assert self.missing is not None, "the first step has been taken"
        self.missing -= {record.place for record, _ in group}
        self.patience = self.config.interval / 2
        self.written += sum(record.body.nbytes for record, _ in group)
        self.error = None
        if self.warned and self.behind < self.config.interval:
            self.warned = 0.0
            say(f"store {self.path}: has caught up")

    def _failed(self, error: Exception) -> None:
        # HDF5 has errors of its own when a file cannot be made.
        if not isinstance(error, OSError | RuntimeError):
            raise error
        self.error, self.pause = error, time.monotonic() + self.config.interval / 4
        self._warn(reason(error))

    def _warn(self, trouble: str) -> None:
        if self.config.required:
            cure = "store.required = true: make room, or give another store.dir"
            raise UserError(f"store {self.path}: {trouble}; {cure}")
        if not self.warned or time.monotonic() - self.warned > WARN_SECONDS:
            self.warned = time.monotonic()
            say(f"warning: store {self.path}: {trouble}; {self.behind:.1f} s behind; training goes on")

    def _run(self) -> None:
        """The writing thread: whatever has been copied, in one go."""
        while group := self._gather():
            try:
                self.before_write()
                self.file = self.file or self.make()
                with trace.span("flush"):
                    self.file.write([record for record, _ in group])
                self.news.set()
                self.done.put((group, None))
            except Exception as error:  # told to the main thread
                self.done.put((group, error))
        self.ended = True
        self.news.set()
        self.notes.join()
        if self.file is not None:
            file, self.file = self.file, None
            file.close()

    def _note(self) -> None:
        """The second thread: note in the file how many pushes are acknowledged, whenever that has changed."""
        noted = self.acknowledged
        while True:
            self.news.wait()
            self.news.clear()
            acknowledged, file, ended = self.acknowledged, self.file, self.ended
            if file is not None and acknowledged != noted:
                with suppress(OSError):
                    file.acknowledge(*acknowledged)
                    noted = acknowledged
            if ended:
                return
            # Many notes a second would take the interpreter from the main thread.
            time.sleep(NOTE_SECONDS)

    def _gather(self) -> list[tuple[Record, np.ndarray]]:
        """Wait for a copy, and take those that are there besides; nothing at the end."""
        group = []
        order = self.orders.get()
        while order is not None:
            group.append(order)
            try:
                order = self.orders.get_nowait()
            except Empty:
                return group
        if group:
            self.orders.put(None)
        return group
