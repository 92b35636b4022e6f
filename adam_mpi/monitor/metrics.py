"""The figures of a run over time: lines of `metrics.jsonl`, and event files for TensorBoard if configured."""

import errno
import importlib.util
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from adam_mpi.base.errors import UserError


def check_tensorboard() -> None:
    """Raise a UserError where tensorboardX is missing, before a job starts that writes event files."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError("observe.tensorboard = true: tensorboardX is missing; pip install 'adam-mpi[tensorboard]'")


class Metrics:
    """`add` keeps lines and `write` writes them; after an error the next `write` continues with the failed line."""

    MOST_WAITING = 10_000

    def __init__(self, directory: Path, tensorboard: bool, names: Sequence[str] = ("loss", "accuracy")) -> None:
        """Write metrics into the run's `directory`; with `tensorboard` event files too.

        `names` are the figures that mean something else in each part of the data.
        """
        self.path = directory / "metrics.jsonl"
        self.lines: deque[str] = deque(maxlen=self.MOST_WAITING)
        self.events = Events(directory / "tensorboard", names) if tensorboard else None

    def add(self, line: Mapping[str, object], step: int) -> None:
        """Keep the `line` of metrics to write; `step`: images trained on so far, the axis of TensorBoard's plots."""
        self.lines.append(json.dumps(line) + "\n")
        if self.events is not None:
            self.events.add_events(line, step)

    def write(self) -> None:
        """Append all waiting lines to `metrics.jsonl`; raise OSError, and remove a torn line, where one fails."""
        while self.lines:
            line = self.lines[0]
            _append(self.path, line.encode())
            # A full queue may have dropped it meanwhile.
            if self.lines and self.lines[0] is line:
                self.lines.popleft()
        if self.events is not None:
            self.events.write_events()


def _append(path: Path, line: bytes) -> None:
    """Append `line` to the metrics file `path`, or nothing of it."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise


class Events:
    """The event file of TensorBoard. Its package's own writer waits forever once its thread has met a full disk."""

    PAUSE_SECONDS = 30.0

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Write TensorBoard's events into `folder`; `names`: figures with another meaning in each part of the data."""
        self.folder = folder
        self.names = names
        self.files = 0
        self.pause = 0.0
        """Until when nothing is written, after an error."""
        self.file: Any = None
        self.waiting: deque[Any] = deque(maxlen=100 * Metrics.MOST_WAITING)

    def add_events(self, line: Mapping[str, object], step: int) -> None:
        """Keep TensorBoard's events of a `line` of metrics; `step`: images trained on so far."""
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

        def put(made: Any) -> None:
            self.waiting.append(Event(wall_time=time.time(), step=step, summary=made))

        part = line["part"]
        done = line["done"]
        for name, value in scalars(line):
            # Of held-out parts only whole passes mean anything.
            if name in self.names and (part == "train" or done):
                put(summary.scalar(f"{name}/{part}", value))
            elif name not in self.names and part == "train":
                put(summary.scalar(name, value))
        histogram = cast("Mapping[str, int]", line["staleness_histogram"])
        if histogram:
            put(summary.histogram_raw("staleness_histogram", **_raw(histogram)))

    def write_events(self) -> None:
        """Write all waiting events for TensorBoard; after an OSError into a new file, PAUSE_SECONDS later."""
        if time.monotonic() < self.pause:
            return
        count = len(self.waiting)
        try:
            self.file = self.file or self._new_file()
            for event in list(islice(self.waiting, count)):
                self.file.write_event(event)
            self.file.flush()
        except OSError:
            # A record of the old file may be torn, and TensorBoard reads nothing behind it.
            self.file = None
            self.pause = time.monotonic() + self.PAUSE_SECONDS
            raise
        for _ in range(count):
            self.waiting.popleft()

    def _new_file(self) -> Any:
        """Open a new event file for TensorBoard."""
        from tensorboardX.event_file_writer import EventsWriter

        self.folder.mkdir(exist_ok=True)
        self.files += 1
        return EventsWriter(str(self.folder / "events"), f".{self.files}" if self.files > 1 else "")


def scalars(line: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a `line` of metrics by name, nested ones as "busy/worker". Pure."""
    for name, value in line.items():
        if isinstance(value, dict) and name != "staleness_histogram":
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value


def _raw(histogram: Mapping[str, int]) -> dict[str, Any]:
    """Return a metric's `histogram` as the arguments of TensorBoard: a bucket up to half a clock above each value."""
    pairs = sorted((int(value), count) for value, count in histogram.items())
    values = [value for value, _ in pairs]
    counts = [count for _, count in pairs]
    return {
        "min": values[0],
        "max": values[-1],
        "num": sum(counts),
        "sum": sum(v * c for v, c in pairs),
        "sum_squares": sum(v * v * c for v, c in pairs),
        "bucket_limits": [value + 0.5 for value in values],
        "bucket_counts": counts,
    }
