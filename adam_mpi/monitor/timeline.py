"""The timeline of a run: `trace.json.gz`, for https://ui.perfetto.dev or chrome://tracing.

Each rank writes its own part, in the time of rank 0; when all have, one makes one file of them.
"""

import gzip
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from adam_mpi.base import trace
from adam_mpi.cluster import clock_offset
from adam_mpi.cluster.world import World

MOST_EVENTS = 1_000_000
"""Of a whole run: about 100 bytes each, a tenth of that in the file."""
log = logging.getLogger(__name__)


class Timeline:
    def __init__(self, world: World, directory: Path) -> None:
        """Collective: records from now on."""
        self.name, self.number, self.generation = str(world.place), world.rank, world.generation
        self.folder, self.whole = directory / "log", directory / "trace.json.gz"
        self.part.unlink(missing_ok=True)
        self.room = MOST_EVENTS // world.comm.size
        self.offset, wrong = clock_offset.offset(world)
        self.began = trace.now()
        log.info("clock %+.6f s from rank 0's, to %.6f s", -self.offset / 1e9, wrong / 1e9)
        self.recorder = trace.start(self.room)

    @property
    def part(self) -> Path:
        return self.folder / f"trace-{self.number:05d}.jsonl"

    def write(self, world: World) -> None:
        """Collective: our part, at the end of the job; clocks that have drifted apart since its start are put right."""
        trace.stop()
        # Another rank may be rank 0 now: what was measured at the start has to do.
        last = clock_offset.offset(world)[0] if world.generation == self.generation else self.offset
        drift = (last - self.offset) / max(trace.now() - self.began, 1)

        def aligned(time: int) -> float:
            """Microseconds of rank 0's clock."""
            return (time + self.offset + drift * (time - self.began)) / 1000

        with self.part.open("w") as file:
            for event in self._events(aligned):
                file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def merge(self) -> None:
        """One file of all parts, once they are written; done by one rank."""
        parts, unfinished = sorted(self.folder.glob("trace-*.jsonl")), self.whole.with_suffix(".part")
        with gzip.open(unfinished, "wt", compresslevel=5) as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for index, part in enumerate(parts):
                file.write((",\n" if index else "") + part.read_text().strip().replace("\n", ",\n"))
            file.write("\n]}\n")
        unfinished.replace(self.whole)
        for part in parts:
            part.unlink()

    def _events(self, aligned: Callable[[int], float]) -> Iterator[dict]:
        process = {"pid": self.number}
        yield _name("process", self.name) | process | {"tid": 0}
        found: list[tuple[int, int, trace.Event]] = []
        for tid, (name, row) in enumerate(list(self.recorder.rows)):
            yield _name("thread", name) | process | {"tid": tid}
            found += [(event[1], tid, event) for event in list(row)]
        # The newest of all rows together, so that a rank with many threads keeps to its room.
        for _, tid, event in sorted(found)[-self.room :]:
            yield _event(event, aligned) | process | {"tid": tid}


def _name(kind: str, name: str) -> dict:
    return {"name": f"{kind}_name", "ph": "M", "args": {"name": name}}


def _event(event: trace.Event, aligned: Callable[[int], float]) -> dict:
    """As the trace event format has it: X is a span, s and f the ends of an arrow."""
    name, began, ended, arrow = event
    start = round(aligned(began), 3)
    if not arrow:
        return {"name": name, "ph": "X", "ts": start, "dur": round(aligned(ended) - start, 3)}
    flow = {"name": "push", "cat": "push", "id": "-".join(map(str, arrow)), "ts": start}
    return flow | ({"ph": "s"} if name == trace.TAIL else {"ph": "f", "bp": "e"})
