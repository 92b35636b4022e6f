"""The fence: a file with the members of each generation; a rank that is not in the newest one is evicted.

A rank that was stopped for so long that the others declared it dead may wake up and take the others for dead. The ranks
that begin a generation claim it first, and only one claim succeeds; a rank that finds it claimed without itself ends.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path


class Evicted(Exception):
    """The other ranks have continued without this rank."""


def claim(folder: Path, generation: int, members: Collection[int]) -> None:
    """Write the fence: `members` as those of `generation` into `folder`; raise Evicted if others have claimed it."""
    path = _fence_file(folder, generation)
    part = folder / f".generation-{os.getpid()}"
    part.write_text(json.dumps(sorted(members)))
    try:
        # A link is atomic, on NFS too.
        os.link(part, path)
    except FileExistsError:
        if set(json.loads(path.read_text())) != set(members):
            raise Evicted(f"generation {generation} has begun with other members") from None
    finally:
        part.unlink()


def check_membership(folder: Path, generation: int, member: int) -> None:
    """Raise Evicted if the fence shows a later generation than `generation` that began without `member`."""
    newest = max((int(path.stem.partition("-")[2]) for path in folder.glob("generation-*.json")), default=0)
    if newest > generation and member not in json.loads(_fence_file(folder, newest).read_text()):
        raise Evicted(f"was declared dead; generation {newest} continued without it; this rank ends")


def clear_fences(folder: Path) -> None:
    """Remove the fence files of the generations of an earlier job from `folder`."""
    for path in folder.glob("generation-*.json"):
        path.unlink(missing_ok=True)


def _fence_file(folder: Path, generation: int) -> Path:
    """Return the path of the fence file of `generation`."""
    return folder / f"generation-{generation}.json"


class MembershipWatch:
    """End this rank when the surviving ranks take too long to agree on a membership, or agree on one without it.

    The watch has a thread of its own, since the main thread may hang inside MPI.
    """

    PERIOD = 0.05

    def __init__(self, folder: Path, seconds: float, late: Callable[[], None], out: Callable[[Evicted], None]) -> None:
        """Watch the fence in `folder`; call `late` after `seconds`, and `out` when this rank is evicted."""
        self.folder = folder
        self.seconds = seconds
        self.late = late
        self.out = out
        self.over: threading.Event | None = None

    def begin(self, generation: int, member: int) -> None:
        """Start to watch the fence, as `member` of the `generation` that is over; a running watch continues."""
        # A rank that has just woken up may be evicted already, and MPI may end it before the thread has checked.
        self._check(generation, member)
        if self.over is None:
            self.over = threading.Event()
            threading.Thread(target=self._run, args=(self.over, generation, member), name="watch", daemon=True).start()

    def end(self) -> bool:
        """Stop to watch the fence, since there is a new membership; return whether the watch was running."""
        if self.over is None:
            return False
        self.over.set()
        self.over = None
        return True

    def _run(self, over: threading.Event, generation: int, member: int) -> None:
        """Check the fence at intervals until the watch ends; call `late` if that takes too long."""
        limit = time.monotonic() + self.seconds
        while not over.wait(self.PERIOD):
            self._check(generation, member)
            if time.monotonic() > limit:
                self.late()

    def _check(self, generation: int, member: int) -> None:
        """Check the fence once; call `out` if this rank is evicted."""
        try:
            # A disk that fails proves nothing; the time limit holds all the same.
            with suppress(OSError):
                check_membership(self.folder, generation, member)
        except Evicted as error:
            self.out(error)
