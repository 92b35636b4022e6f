"""The fence: the members of each generation, written where all can read them. Who is not in the newest is out.

A rank that was stopped for so long that the others took it for dead may wake up and believe that it is they who are
gone. Whoever begins a generation claims it first, and only one can; who finds it claimed without him ends.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path


class Evicted(Exception):
    """The others have gone on without this rank."""


def claim(folder: Path, generation: int, members: Collection[int]) -> None:
    """Begin a generation, unless others have."""
    path, part = _path(folder, generation), folder / f".generation-{os.getpid()}"
    part.write_text(json.dumps(sorted(members)))
    try:
        # A link is made whole or not at all.
        os.link(part, path)
    except FileExistsError:
        if set(json.loads(path.read_text())) != set(members):
            raise Evicted(f"generation {generation} has begun with others") from None
    finally:
        part.unlink()


def check(folder: Path, generation: int, member: int) -> None:
    """Raises where a later generation than this has begun without this member."""
    newest = max((int(path.stem.partition("-")[2]) for path in folder.glob("generation-*.json")), default=0)
    if newest > generation and member not in json.loads(_path(folder, newest).read_text()):
        raise Evicted(f"was taken for dead; generation {newest} goes on without it, and it ends")


def clear(folder: Path) -> None:
    """Generations of an earlier job."""
    for path in folder.glob("generation-*.json"):
        path.unlink(missing_ok=True)


def _path(folder: Path, generation: int) -> Path:
    return folder / f"generation-{generation}.json"


class Watch:
    """While the ranks that are left find together: ends this one when that takes too long, or goes on without it.

    On a thread of its own: the main thread may be inside MPI, and hear nothing.
    """

    PERIOD = 0.05

    def __init__(self, folder: Path, seconds: float, late: Callable[[], None], out: Callable[[Evicted], None]) -> None:
        self.folder, self.seconds, self.late, self.out = folder, seconds, late, out
        self.over: threading.Event | None = None

    def begin(self, generation: int, member: int) -> None:
        # Who has just woken up may be out already, and MPI may end him before the thread has looked.
        self._look(generation, member)
        if self.over is None:
            self.over = threading.Event()
            threading.Thread(target=self._run, args=(self.over, generation, member), name="watch", daemon=True).start()

    def end(self) -> bool:
        """Everybody is together again; whether they had to."""
        if self.over is None:
            return False
        self.over.set()
        self.over = None
        return True

    def _run(self, over: threading.Event, generation: int, member: int) -> None:
        limit = time.monotonic() + self.seconds
        while not over.wait(self.PERIOD):
            self._look(generation, member)
            if time.monotonic() > limit:
                self.late()

    def _look(self, generation: int, member: int) -> None:
        try:
            # A disk that fails proves nothing; the end of our time counts all the same.
            with suppress(OSError):
                check(self.folder, generation, member)
        except Evicted as error:
            self.out(error)
