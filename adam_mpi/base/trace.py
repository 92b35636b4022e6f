"""The timeline of each thread, kept in memory until the job ends; nothing is recorded unless `observe.trace` is set.

with trace.span("apply"):
    trace.receives((pusher, sequence, server))    # the end of an arrow, which `sends` begins
"""

import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

Event = tuple[str, int, int, tuple[int, ...]]
"""(name, began, ended, numbers of an arrow), in nanoseconds of `now`; the two ends of an arrow take no time."""

TAIL = "sends"
POINT = "receives"
now = time.perf_counter_ns


@dataclass
class Recorder:
    """The events of all threads of this process."""

    room: int
    """Number of latest events that each row keeps."""
    rows: list[tuple[str, deque[Event]]] = field(default_factory=list)
    """A row for each thread, and for each kind of work beside them."""
    local: threading.local = field(default_factory=threading.local)
    apart: dict[str, deque[Event]] = field(default_factory=dict)

    def own(self) -> deque[Event]:
        """Return the row of the calling thread in the recorded timeline."""
        if not hasattr(self.local, "row"):
            self.local.row = self._add(threading.current_thread().name)
        return self.local.row

    def named(self, name: str) -> deque[Event]:
        """Return the row of the timeline for the work `name`, which is no thread's."""
        if name not in self.apart:
            self.apart[name] = self._add(name)
        return self.apart[name]

    def _add(self, name: str) -> deque[Event]:
        row: deque[Event] = deque(maxlen=self.room)
        self.rows.append((name, row))
        return row


class Span:
    """A context manager that records how long its block took."""

    __slots__ = ("began", "name", "recorder")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name

    def __enter__(self) -> None:
        self.began = now()

    def __exit__(self, *error: object) -> None:
        self.recorder.own().append((self.name, self.began, now(), ()))


NOTHING: AbstractContextManager[Any] = nullcontext()
_recorder: Recorder | None = None


def start(room: int) -> Recorder:
    """Start to record the timeline, with `room` events for each row; return the recorder."""
    global _recorder
    _recorder = Recorder(room)
    return _recorder


def stop() -> None:
    """Stop to record the timeline."""
    global _recorder
    _recorder = None


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that records its block in the timeline as work `name` of the calling thread."""
    return NOTHING if _recorder is None else Span(_recorder, name)


def record(name: str, began: int, row: str = "") -> None:
    """Record work `name`, which began at `began` and has just ended, in the timeline row `row` or the thread's own."""
    if _recorder is not None:
        (_recorder.named(row) if row else _recorder.own()).append((name, began, now(), ()))


def sends(arrow: tuple[int, ...]) -> None:
    """Record the beginning of `arrow` in the timeline, inside a span."""
    if _recorder is not None:
        _recorder.own().append((TAIL, now(), 0, arrow))


def receives(arrow: tuple[int, ...]) -> None:
    """Record the end of `arrow` in the timeline, inside a span."""
    if _recorder is not None:
        _recorder.own().append((POINT, now(), 0, arrow))
