"""Write-behind: a thread writes what a server has applied to its store, many updates in one write.

The main thread copies a shard when it has been dirty for a while; the writing thread takes what has been copied, a
group at a time. A disk that is full, read-only or slow stops nobody: what was not written stays dirty and is tried
again, and a warning says how far behind the store is. A second thread notes how many pushes are acknowledged: the main
thread itself never writes.
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
from adam_mpi.base.log import print_and_log
from adam_mpi.checkpoint.disk_task import reason
from adam_mpi.checkpoint.store_file import Record, StoreFile
from adam_mpi.config import Store
from adam_mpi.sharding.shards import Shard

BUFFERS = 32
"""The most copies in flight; also the most that are written between two waits for the disk."""
WARN_SECONDS = 30.0
"""Between two warnings."""
CLOSE_SECONDS = 120.0
"""After which a disk that takes nothing more is given up at the end."""
NOTE_SECONDS = 0.002
"""Between two notes of what is acknowledged."""

Copy = Callable[[int, np.ndarray], tuple[int, int, float]]
"""(place, buffer) -> (version, images, batches that the shard has been stepped on).

Copies the state of a shard into the buffer, and returns what is in it.
"""
Copied = tuple[Record, np.ndarray]
"""A record, and the buffer that its body is in."""


class WriteBehind:
    """The store of one server; the main thread calls `mark_dirty` after each update and `step` often."""

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
        """Start the threads; the writing thread creates the store `path` and calls `before_write` before each write."""
        self.path = path
        self.config = config
        self.copy = copy
        self.before_write = before_write
        self.create = lambda: StoreFile(path, shards, parts, position_bytes)
        self.bytes = [4 * len(parts) * shard.size for shard in shards] + [position_bytes]
        """Record -> its size."""
        self.dirty: dict[int, float] = {}
        """Record -> since when it has an update that is not copied; the oldest first."""
        self.in_flight: dict[int, float] = {}
        """The same for those that are copied and not on disk."""
        self.pause = 0.0
        """Until when nothing is copied, after an error."""
        self.patience = 0.0
        """Seconds for which the updates of a record gather before it is copied."""
        self.closing: float | None = None
        """At the end: when the disk took something for the last time."""
        self.missing: set[int] | None = None
        """Records that have never been written; all of them at the first step."""
        self.error: Exception | None = None
        self.warned = 0.0
        self.looked = 0.0
        self.stepped = 0.0
        self.written = 0
        """Bytes on disk so far."""
        self.acknowledged = (0, 0)
        """Pushes, and their images."""
        self.changed = threading.Event()
        """Wakes the thread that notes what is acknowledged."""
        self.ended = False
        self.file: StoreFile | None = None
        self.free = [np.empty(max(self.bytes), np.uint8) for _ in range(BUFFERS)]
        self.copied: SimpleQueue[Copied | None] = SimpleQueue()
        """To the writing thread; None ends it."""
        self.done: SimpleQueue[tuple[list[Copied], Exception | None]] = SimpleQueue()
        """From the writing thread."""
        self.thread = threading.Thread(target=self._write_groups, name="store", daemon=True)
        self.notes = threading.Thread(target=self._note, name="store notes", daemon=True)
        self.notes.start()
        self.thread.start()

    @property
    def complete(self) -> bool:
        """Return whether every record has been written to the store at least once."""
        return self.missing == set()

    @property
    def lag(self) -> float:
        """Return the seconds since the oldest update that write-behind has not brought to disk."""
        oldest = min([*self.in_flight.values(), *list(self.dirty.values())[:1]], default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def mark_dirty(self, place: int) -> None:
        """Note that the record at `place` has changed since it was written to the store."""
        self.dirty.setdefault(place, time.monotonic())

    def note_acknowledged(self, pushes: int, images: int) -> None:
        """Have the store note how many `pushes` and `images` are acknowledged, as soon as the disk takes it."""
        self.acknowledged = (pushes, images)
        self.changed.set()

    def step(self) -> None:
        """Take back what has been written to the store, copy what is due, and warn when the disk is slow."""
        now = time.monotonic()
        if self.missing is None:
            self.missing = set(range(len(self.bytes)))
            self.dirty = dict.fromkeys(self.missing, now)
        if not self.done.empty():
            self._take_back_written()
        if self.dirty and now >= self.pause:
            self._copy_due(now, self.missing)
        self.stepped = now
        if now - self.looked > self.config.interval / 8:
            self.looked = now
            if self.lag > self.config.interval:
                self._warn_slow_disk("slow disk" if self.error is None else reason(self.error))

    def close(self) -> bool:
        """Write all dirty records to the store; return True when that is done, or the disk does not take it.

        To be called again between steps until it returns True: however long it takes, the server does not wait.
        """
        if self.closing is None:
            self.closing = time.monotonic()
            self.pause = 0.0
            self.error = None
        hangs = time.monotonic() - self.closing > CLOSE_SECONDS
        if (self.dirty or self.in_flight) and self.error is None and not hangs:
            return False
        if self.dirty or self.in_flight:
            trouble = reason(self.error) if self.error else f"the disk has taken nothing for {CLOSE_SECONDS:g} s"
            print_and_log(f"warning: store {self.path}: {trouble}; it ends {self.lag:.1f} s behind")
        self.end()
        return True

    def end(self) -> None:
        """Copy nothing more for the store; what is in flight is still written, if the disk takes it."""
        self.copied.put(None)

    def _copy_due(self, now: float, missing: set[int]) -> None:
        """Copy one dirty record for the store; more where steps are so rare that all would take too long."""
        count = 1 + int(len(self.dirty) * (now - self.stepped) / (self.config.interval / 8))
        while count and self.dirty and self.free:
            place, since = next(iter(self.dirty.items()))
            # Its updates gather for a while, and what is in flight is written before it is copied again.
            gathers = now - since < self.patience and place not in missing and self.closing is None
            if place in self.in_flight or gathers:
                return
            self._copy_record(place)
            count -= 1

    def _copy_record(self, place: int) -> None:
        """Copy the record at `place` into a free buffer for the writing thread of the store."""
        buffer = self.free.pop()
        body = buffer[: self.bytes[place]]
        version, images, stepped = self.copy(place, body)
        record = Record(
            place=place,
            version=version,
            images=images,
            nanoseconds=time.time_ns(),
            body=body,
            pushes=self.acknowledged[0],
            stepped=stepped,
        )
        self.in_flight[place] = self.dirty.pop(place)
        self.copied.put((record, buffer))

    def _take_back_written(self) -> None:
        """Take back the groups of records that the writing thread has written or failed to write."""
        if self.closing is not None:
            self.closing = time.monotonic()
        while not self.done.empty():
            group, error = self.done.get()
            for record, buffer in group:
                self.free.append(buffer)
                since = self.in_flight.pop(record.place)
                if error is not None:
                    # Back to the front: nothing has been dirty for longer.
                    self.dirty = {record.place: since} | {p: s for p, s in self.dirty.items() if p != record.place}
            if error is None:
                self._count_written(group)
            else:
                self._pause_after(error)

    def _count_written(self, group: list[Copied]) -> None:
        """Count a group of records as written to the store."""
        assert self.missing is not None, "the first step has been taken"
        self.missing -= {record.place for record, _ in group}
        self.patience = self.config.interval / 2
        self.written += sum(record.body.nbytes for record, _ in group)
        self.error = None
        if self.warned and self.lag < self.config.interval:
            self.warned = 0.0
            print_and_log(f"store {self.path}: has caught up")

    def _pause_after(self, error: Exception) -> None:
        # HDF5 has errors of its own when a file cannot be made.
        """Pause the writing to the store after the `error` of a disk; raise any other error."""
        if not isinstance(error, OSError | RuntimeError):
            raise error
        self.error = error
        self.pause = time.monotonic() + self.config.interval / 4
        self._warn_slow_disk(reason(error))

    def _warn_slow_disk(self, trouble: str) -> None:
        """Warn of a store that its disk does not take in time; raise UserError where it is required."""
        if self.config.required:
            cure = "store.required = true: make room, or give another store.dir"
            raise UserError(f"store {self.path}: {trouble}; {cure}")
        if not self.warned or time.monotonic() - self.warned > WARN_SECONDS:
            self.warned = time.monotonic()
            print_and_log(f"warning: store {self.path}: {trouble}; {self.lag:.1f} s behind; training continues")

    def _write_groups(self) -> None:
        """Write the copied records to the store, a group at a time, in the writing thread."""
        while group := self._next_group():
            try:
                self.before_write()
                self.file = self.file or self.create()
                with trace.span("flush"):
                    self.file.write([record for record, _ in group])
                self.changed.set()
                self.done.put((group, None))
            except Exception as error:  # handled by the main thread
                self.done.put((group, error))
        self.ended = True
        self.changed.set()
        self.notes.join()
        if self.file is not None:
            self.file.close()
            self.file = None

    def _note(self) -> None:
        """Note in the store how many pushes are acknowledged whenever that has changed; the second thread."""
        noted = self.acknowledged
        while True:
            self.changed.wait()
            self.changed.clear()
            acknowledged = self.acknowledged
            file = self.file
            ended = self.ended
            if file is not None and acknowledged != noted:
                with suppress(OSError):
                    file.note_acknowledged(*acknowledged)
                    noted = acknowledged
            if ended:
                return
            # Many notes a second would take the interpreter from the main thread.
            time.sleep(NOTE_SECONDS)

    def _next_group(self) -> list[Copied]:
        """Wait for a copied record, and take all that are there besides; an empty list at the end."""
        group = []
        copied = self.copied.get()
        while copied is not None:
            group.append(copied)
            try:
                copied = self.copied.get_nowait()
            except Empty:
                return group
        if group:
            self.copied.put(None)
        return group
