"""The timeline of a run: `trace.json.gz`, for https://ui.perfetto.dev or chrome://tracing.

Each rank writes its own part, in the time of rank 0; when all are written, one rank merges them into one file.
"""

import gzip
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi.base import trace
from adam_mpi.cluster.world import World

MOST_EVENTS = 1_000_000
"""The most events of a whole run: about 100 bytes each in memory, a tenth of that in the file."""
TraceEvent = dict[str, Any]
"""An object of the trace event format."""
log = logging.getLogger(__name__)


class Timeline:
    """The events of this rank, and their file."""

    def __init__(self, world: World, directory: Path) -> None:
        """Record the timeline from now on, for the run in `directory`; collective."""
        self.name = str(world.place)
        self.number = world.rank
        self.generation = world.generation
        self.folder = directory / "log"
        self.whole = directory / "trace.json.gz"
        self.part.unlink(missing_ok=True)
        self.room = MOST_EVENTS // world.comm.size
        """The most events of this rank."""
        self.offset, wrong = offset(world)
        self.began = trace.now()
        log.info("clock %+.6f s from rank 0's, to %.6f s", -self.offset / 1e9, wrong / 1e9)
        self.recorder = trace.start(self.room)

    @property
    def part(self) -> Path:
        """Return the file of this rank's part of the timeline."""
        return self.folder / f"trace-{self.number:05d}.jsonl"

    def write(self, world: World) -> None:
        """Write this rank's part of the timeline at the end of the job, corrected for clock drift. Collective."""
        trace.stop()
        # Another rank may be rank 0 now: then only what was measured at the start is known.
        last = offset(world)[0] if world.generation == self.generation else self.offset
        drift = (last - self.offset) / max(trace.now() - self.began, 1)

        def aligned(time: int) -> float:
            """Return `time` in microseconds of rank 0's clock."""
            return (time + self.offset + drift * (time - self.began)) / 1000

        with self.part.open("w") as file:
            for event in self._events(aligned):
                file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def merge(self) -> None:
        """Merge all parts of the timeline, once they are written, into one file; to be called by one rank."""
        parts = sorted(self.folder.glob("trace-*.jsonl"))
        unfinished = self.whole.with_suffix(".part")
        with gzip.open(unfinished, "wt", compresslevel=5) as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for index, part in enumerate(parts):
                file.write((",\n" if index else "") + part.read_text().strip().replace("\n", ",\n"))
            file.write("\n]}\n")
        unfinished.replace(self.whole)
        for part in parts:
            part.unlink()

    def _events(self, aligned: Callable[[int], float]) -> Iterator[TraceEvent]:
        """Yield the events of this rank's timeline in the trace event format."""
        process = {"pid": self.number}
        yield _name_event("process", self.name) | process | {"tid": 0}
        found: list[tuple[int, int, trace.Event]] = []
        for tid, (name, row) in enumerate(list(self.recorder.rows)):
            yield _name_event("thread", name) | process | {"tid": tid}
            found += [(event[1], tid, event) for event in list(row)]
        # The newest of all threads together, so that a rank with many threads stays within its room.
        for _, tid, event in sorted(found)[-self.room :]:
            yield _trace_event(event, aligned) | process | {"tid": tid}


def _name_event(kind: str, name: str) -> TraceEvent:
    """Return the event that names a process or thread in the timeline."""
    return {"name": f"{kind}_name", "ph": "M", "args": {"name": name}}


def _trace_event(event: trace.Event, aligned: Callable[[int], float]) -> TraceEvent:
    """Return `event` of the timeline in the trace event format: X is a span, s and f are the ends of an arrow."""
    name, began, ended, arrow = event
    start = round(aligned(began), 3)
    if not arrow:
        return {"name": name, "ph": "X", "ts": start, "dur": round(aligned(ended) - start, 3)}
    flow = {"name": "push", "cat": "push", "id": "-".join(map(str, arrow)), "ts": start}
    return flow | ({"ph": "s"} if name == trace.TAIL else {"ph": "f", "bp": "e"})


ROUNDS = 16
SECONDS = 30.0
"""Seconds after which a rank that does not answer counts as lost."""
TAG = 77


def offset(world: World, now: Callable[[], int] = trace.now) -> tuple[int, int]:
    """Return the nanoseconds to add to this rank's clock `now` in a timeline, and their error (collective).

    Rank 0 serves one rank after the other. The quickest of its answers counts: it is taken to have been made half-way
    between question and answer.
    """
    if world.rank:
        return _ask_rank_0(world, now)
    for rank in range(1, world.comm.size):
        for _ in range(ROUNDS):
            _receive_clock(world, rank)
            _send_clock(world, rank, now())
    return 0, 0


def _ask_rank_0(world: World, now: Callable[[], int]) -> tuple[int, int]:
    """Return this rank's offset for the timeline, and its maximum error, from the quickest of several questions."""
    offset = 0
    shortest = 1 << 62
    for _ in range(ROUNDS):
        asked = now()
        _send_clock(world, 0, 0)
        there = _receive_clock(world, 0)
        answered = now()
        if answered - asked < shortest:
            offset = there - (asked + answered) // 2
            shortest = answered - asked
    return offset, shortest // 2


def _send_clock(world: World, rank: int, value: int) -> None:
    """Send the clock `value` to `rank`, to correct timelines for clock drift."""
    request = world.comm.Isend(np.array([value], np.int64), rank, TAG)
    world.wait(request.Test, f"rank {rank} to compare clocks", SECONDS)


def _receive_clock(world: World, rank: int) -> int:
    """Return the clock value that `rank` sends, to correct timelines for clock drift."""
    value = np.zeros(1, np.int64)
    request = world.comm.Irecv(value, rank, TAG)
    world.wait(request.Test, f"rank {rank} to compare clocks", SECONDS)
    return int(value[0])
