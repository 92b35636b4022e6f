"""The figures of a run over time: a line of `metrics.jsonl` each, and event files for TensorBoard where wanted."""

import errno
import importlib.util
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from adam_mpi.base.errors import UserError


def check() -> None:
    """Before a job starts that is to write event files."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError("observe.tensorboard = true: tensorboardX is missing; pip install 'adam-mpi[tensorboard]'")


class Metrics:
    """Figures are kept by `add` and written by `write`: one that failed is called again, and goes on where it was."""

    MOST_WAITING = 10_000

    def __init__(self, directory: Path, tensorboard: bool) -> None:
        self.path = directory / "metrics.jsonl"
        self.lines: deque[str] = deque(maxlen=self.MOST_WAITING)
        self.events = Events(directory / "tensorboard") if tensorboard else None

    def add(self, line: dict[str, Any], step: int) -> None:
        """`step`: images trained on so far, the axis of TensorBoard's plots."""
        self.lines.append(json.dumps(line) + "\n")
        if self.events is not None:
            self.events.add(line, step)

    def write(self) -> None:
        """Append all lines that wait; what could not be written whole is taken back. Raises OSError."""
        while self.lines:
            line = self.lines[0]
            _append(self.path, line.encode())
            # It may have been pushed out meanwhile.
            if self.lines and self.lines[0] is line:
                self.lines.popleft()
        if self.events is not None:
            self.events.write()


def _append(path: Path, line: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise


class Events:
    """The event file of TensorBoard. Its package's own writer waits for ever once its thread has met a full disk."""

    PAUSE_SECONDS = 30.0

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.pause = folder, 0, 0.0
        self.file: Any = None
        self.waiting: deque[Any] = deque(maxlen=100 * Metrics.MOST_WAITING)

    def add(self, line: dict[str, Any], step: int) -> None:
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

        def put(made: Any) -> None:
            self.waiting.append(Event(wall_time=time.time(), step=step, summary=made))

        part, done = line["part"], line["done"]
        for name, value in scalars(line):
            # Loss and accuracy mean something else in each part of the data; of held-out ones only whole passes do.
            if name in ("loss", "accuracy") and (part == "train" or done):
                put(summary.scalar(f"{name}/{part}", value))
            elif name not in ("loss", "accuracy") and part == "train":
                put(summary.scalar(name, value))
        if line["staleness_histogram"]:
            put(summary.histogram_raw("staleness_histogram", **_raw(line)))

    def write(self) -> None:
        """Write all events that wait. Raises OSError: then all of them go into a new file, after a while."""
        if time.monotonic() < self.pause:
            return
        count = len(self.waiting)
        try:
            self.file = self.file or self._new_file()
            for event in list(islice(self.waiting, count)):
                self.file.write_event(event)
            self.file.flush()
        except OSError:
            # A record of the old file may be torn; what follows one is not read.
            self.file, self.pause = None, time.monotonic() + self.PAUSE_SECONDS
            raise
        for _ in range(count):
            self.waiting.popleft()

    def _new_file(self) -> Any:
        from tensorboardX.event_file_writer import EventsWriter

        self.folder.mkdir(exist_ok=True)
        self.files += 1
        return EventsWriter(str(self.folder / "events"), f".{self.files}" if self.files > 1 else "")


def scalars(line: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line by name, those of nested ones as "busy/worker". Pure."""
    for name, value in line.items():
        if isinstance(value, dict) and name != "staleness_histogram":
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value


def _raw(line: dict[str, Any]) -> dict[str, Any]:
    """The histogram of staleness as TensorBoard takes it: a bucket up to half a clock above each value."""
    pairs = sorted((int(value), count) for value, count in line["staleness_histogram"].items())
    values, counts = [value for value, _ in pairs], [count for _, count in pairs]
    return {
        "min": values[0],
        "max": values[-1],
        "num": sum(counts),
        "sum": sum(v * c for v, c in pairs),
        "sum_squares": sum(v * v * c for v, c in pairs),
        "bucket_limits": [value + 0.5 for value in values],
        "bucket_counts": counts,
    }
