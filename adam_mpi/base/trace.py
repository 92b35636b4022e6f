"""What each thread did and when, kept in memory until the job ends; nothing unless `observe.trace` is set.

with trace.span("apply"):
    trace.receives((pusher, sequence, server))    # the point of an arrow; `sends` is its tail
"""

import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

Event = tuple[str, int, int, tuple[int, ...]]
"""(name, began, ended, numbers of an arrow), in nanoseconds of `now`; an end of an arrow takes no time."""

TAIL, POINT = "sends", "receives"
now = time.perf_counter_ns


@dataclass
class Recorder:
    room: int
    """Events that each row keeps, the newest ones."""
    rows: list[tuple[str, deque[Event]]] = field(default_factory=list)
    """A row for each thread, and for each kind of work that goes on beside them."""
    local: threading.local = field(default_factory=threading.local)
    apart: dict[str, deque[Event]] = field(default_factory=dict)

    def own(self) -> deque[Event]:
        """The row of the calling thread."""
        if not hasattr(self.local, "row"):
            self.local.row = self._add(threading.current_thread().name)
        return self.local.row

    def named(self, name: str) -> deque[Event]:
        if name not in self.apart:
            self.apart[name] = self._add(name)
        return self.apart[name]

    def _add(self, name: str) -> deque[Event]:
        row: deque[Event] = deque(maxlen=self.room)
        self.rows.append((name, row))
        return row


class Span:
    __slots__ = ("began", "name", "recorder")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def __enter__(self) -> None:
        self.began = now()

    def __exit__(self, *error: object) -> None:
        self.recorder.own().append((self.name, self.began, now(), ()))


NOTHING: AbstractContextManager[Any] = nullcontext()
_recorder: Recorder | None = None


def start(room: int) -> Recorder:
    """Record from now on."""
    global _recorder
    _recorder = Recorder(room)
    return _recorder


def stop() -> None:
    global _recorder
    _recorder = None


def span(name: str) -> AbstractContextManager[Any]:
    """Work of the calling thread, as long as the `with` takes."""
    return NOTHING if _recorder is None else Span(_recorder, name)


def record(name: str, began: int, row: str = "") -> None:
    """What began at `began` and has just ended; in a row of its own if it went on beside the thread's work."""
    if _recorder is not None:
        (_recorder.named(row) if row else _recorder.own()).append((name, began, now(), ()))


def sends(arrow: tuple[int, ...]) -> None:
    """The tail of an arrow, inside a span."""
    if _recorder is not None:
        _recorder.own().append((TAIL, now(), 0, arrow))


def receives(arrow: tuple[int, ...]) -> None:
    """Its point, inside a span."""
    if _recorder is not None:
        _recorder.own().append((POINT, now(), 0, arrow))
