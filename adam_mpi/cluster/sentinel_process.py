"""The sentinel: a small process beside the ranks of one host that reports which rank died, whatever the MPI does.

Some launchers kill every other rank at once when one dies, so that no rank is left to report it. Each rank keeps a
connection to its host's sentinel; a connection that closes without a farewell is a death. The first process that
creates `log/failure.txt` in the run directory reports; deaths that follow from the first are not reported.
Interruptions go the same way: launchers also interrupt the other ranks when one has died, and kill them soon after.
Where the job may continue without a rank, a death is reported only if the other ranks end too before they have
recovered; if they neither recover nor end within a time limit, the sentinel kills them: they may hang inside MPI.

It also finds ranks that are stopped (SIGSTOP) or frozen (a cgroup's freezer: a paused container), and kills them after
a time limit. It asks the kernel, so that neither load nor a long compilation looks like a hang, and no rank that was
given up wakes up again. Ranks that hang in other ways are found by the coordinator, which no longer hears from them: it
appends an order to `log/silent.jsonl`, and their sentinel kills them. Once the reason of a failure is written, ranks
that do not end within a few seconds are killed too.

While the sentinel runs, `log/watched-HOST-PID.txt` has the names of its ranks; a file that is left when the job has
ended belongs to a host that was lost as a whole.

The process is started with `python -I -S`, so it imports the standard library only and starts in milliseconds.
"""

import json
import os
import selectors
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from adam_mpi.cluster.report_once import print_error, repair_summary, report_failure

BYE = b"bye"
RECOVERED = b"recovered\n"
"""What a rank sends before it ends in order, and when it has recovered from the loss of another rank."""
ORDERS = "silent.jsonl"
"""The file, beside the failure file, with orders to kill ranks: one JSON list (host, process, reason) per line."""
CONNECT_SECONDS = 60.0
"""Seconds after which ranks that have not connected are no longer expected."""
LOOK_SECONDS = 0.25
"""Seconds between two checks for stopped ranks."""
READ_SECONDS = 0.5
"""Seconds between two looks at the files of the run directory."""
END_SECONDS = 5.0
"""Seconds in which ranks must end once the failure of their job is written."""


@dataclass(frozen=True)
class Settings:
    """What a sentinel must know of its job."""

    ranks: int
    """Number of ranks of this host at the start; ranks that join later connect too."""
    survivable: bool = False
    """Whether the surviving ranks may continue after a death."""
    patience: float = 0.0
    """Seconds that a rank may be stopped before it is killed; 0 is no limit."""
    grace: float = 60.0
    """Seconds in which the surviving ranks must recover or end after a death."""
    elsewhere: bool = False
    """Whether other hosts have ranks, which may continue when all ranks of this host are dead."""
    host: str = ""
    """Name of this host in orders to kill a rank."""


@dataclass
class WatchedRank:
    name: str
    pid: int
    stopped: float | None = None
    """Since when the rank has been stopped or frozen without interruption."""
    given_up: bool = False


class Sentinel:
    """Receive what the ranks of this host send, check whether they are stopped, and report the first death."""

    def __init__(self, path: str, failure_file: Path, settings: Settings) -> None:
        self.failure_file = failure_file
        self.settings = settings
        self.expected = settings.ranks
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(settings.ranks)
        # epoll returns events in the order they happened: the first death seen is the first death.
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.watched = failure_file.with_name(f"watched-{socket.gethostname()}-{os.getpid()}.txt")
        self.ranks: list[WatchedRank] = []
        self.deaths: list[str] = []
        """Deaths from which the surviving ranks have not recovered yet."""
        self.died = 0.0
        """When the first of them was seen."""
        self.orders: list[tuple[str, int, str]] = []
        """Ranks of any host that are to be killed: (host, process, reason)."""
        self.failed: float | None = None
        """Since when the run directory has the reason why the job ends."""
        # On a thread of its own: a file system that hangs must not delay the report of a death.
        threading.Thread(target=self._read_files, name="orders", daemon=True).start()

    def run(self) -> None:
        """Serve the sentinel's socket until the last rank has left, or until no rank has connected in time."""
        limit = time.monotonic() + CONNECT_SECONDS
        while self.ranks or (self.expected > 0 and time.monotonic() < limit):
            for key, _ in self.selector.select(LOOK_SECONDS):
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    self._receive(cast(socket.socket, key.fileobj), key.data)
            if self.settings.patience:
                self._check_stopped(time.monotonic())
            self._execute_orders()
            if self.deaths and time.monotonic() - self.died > self.settings.grace:
                self._end_recovery()
            if self.failed and time.monotonic() - self.failed > END_SECONDS:
                self._kill_all()
        with suppress(OSError):
            self.watched.unlink()

    def _accept(self) -> None:
        """Accept the connection of a rank that this sentinel is to watch."""
        connection, _ = self.listener.accept()
        # No more than the name is read: what follows is an event, to be handled in the order of events.
        with connection.makefile("rb", buffering=0) as stream:
            rank = WatchedRank(*json.loads(stream.readline()))
        self.ranks.append(rank)
        self.expected -= 1
        with suppress(OSError):
            self.watched.write_text("".join(f"{rank.name}\n" for rank in self.ranks))
        self.selector.register(connection, selectors.EVENT_READ, rank)

    def _receive(self, connection: socket.socket, rank: WatchedRank) -> None:
        """Receive what a watched rank sends its sentinel; an end of its connection may be its death."""
        last = connection.recv(4096)
        if last.startswith(RECOVERED):
            self.deaths.clear()
            last = last.replace(RECOVERED, b"")
            if not last:
                return
        # Anything else is a farewell, right before the connection closes.
        while last and (more := connection.recv(4096)):
            last += more
        self.selector.unregister(connection)
        connection.close()
        self.ranks.remove(rank)
        if not last and not rank.given_up:
            self._note_death(f"{rank.name} died; the job ends")
        elif last and last != BYE:
            report_failure(self.failure_file, last.decode(), "interrupted")
        elif last and self.settings.survivable:
            # A rank that ends in order has recovered, or has reported why it has not.
            self.deaths.clear()
        self._report_death()

    def _check_stopped(self, now: float) -> None:
        """Kill watched ranks that have been stopped for too long: launchers would wait for them forever."""
        for rank in self.ranks:
            state = halted_state(rank.pid)
            rank.stopped = (rank.stopped or now) if state else None
            if rank.stopped and now - rank.stopped > self.settings.patience:
                self._give_up(rank, f"was {state} for {self.settings.patience:g} s")

    def _execute_orders(self) -> None:
        """Kill the watched ranks that the coordinator has ordered the sentinel to kill."""
        for host, pid, reason in self.orders:
            for rank in self.ranks:
                if (host, pid) == (self.settings.host, rank.pid):
                    self._give_up(rank, reason)

    def _give_up(self, rank: WatchedRank, reason: str) -> None:
        """Report that the sentinel gives up the watched `rank` for this `reason`, and kill it."""
        if rank.given_up:
            return
        rank.given_up = True
        death = f"{rank.name} {reason} and is ended"
        self._note_death(f"{death}; the job ends")
        self._report_death()
        if self.settings.survivable:
            print_error(death)
        with suppress(OSError):
            os.kill(rank.pid, signal.SIGKILL)

    def _read_files(self) -> None:
        """Read orders for the sentinel, and the reason why the job ends, from the run directory at intervals."""
        orders = self.failure_file.with_name(ORDERS)
        # NFS may hide a new file for a minute, but an existing file that is opened has its present content.
        with suppress(OSError):
            orders.touch()
        while True:
            time.sleep(READ_SECONDS)
            with suppress(OSError, ValueError):
                self.orders = [tuple(json.loads(line)) for line in orders.read_text().splitlines()]
            with suppress(OSError):
                if not self.failed and self.failure_file.stat().st_size:
                    self.failed = time.monotonic()

    def _note_death(self, text: str) -> None:
        """Note that a watched rank has died, and when."""
        self.died = self.died if self.deaths else time.monotonic()
        self.deaths.append(text)

    def _end_recovery(self) -> None:
        """Kill the surviving ranks of the sentinel's host, which have neither recovered nor ended in time."""
        if self.settings.survivable:
            seconds = f"{self.settings.grace:g} s"
            report_failure(self.failure_file, f"{self.deaths[0]}: the surviving ranks did not recover within {seconds}")
            self._kill_all()
        self.deaths.clear()

    def _kill_all(self) -> None:
        """Kill all ranks that this sentinel watches."""
        for rank in self.ranks:
            with suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)

    def _report_death(self) -> None:
        """Report the first death that the sentinel saw, unless there are ranks that may continue without it."""
        if self.deaths and not (self.settings.survivable and (self.ranks or self.settings.elsewhere)):
            report_failure(self.failure_file, self.deaths[0])


def main(path: str, failure_file: str, settings: str) -> None:
    """Run a sentinel that listens at `path`, with `settings` as JSON, and remove the socket and its folder."""
    try:
        sentinel = Sentinel(path, Path(failure_file), Settings(**json.loads(settings)))
        print("listening", flush=True)
        sentinel.run()
        repair_summary(sentinel.failure_file)
    finally:
        Path(path).unlink(missing_ok=True)
        Path(path).parent.rmdir()


def halted_state(pid: int) -> str:
    """Return "stopped" or "frozen" for a watched process that is, else ""; also "" where there is no /proc."""
    try:
        # The name, in parentheses, may contain spaces and parentheses.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return "stopped"
    except OSError:
        return ""
    return "frozen" if _is_frozen(pid) else ""


def _is_frozen(pid: int) -> bool:
    """Return whether a cgroup freezer, of version 1 or 2, holds `pid`, whose state then looks like sleep."""
    with suppress(OSError):
        freezers = _freezers()
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and "frozen 1" in _read_cgroup_file(freezers.get("cgroup2"), path, "cgroup.events"):
                return True
            version_1 = "freezer" in controllers.split(",")
            if version_1 and "FROZEN" in _read_cgroup_file(freezers.get("freezer"), path, "freezer.state"):
                return True
    return False


def _freezers() -> dict[str, tuple[str, str]]:
    """Return (group at the mount point, mount point) of the cgroup hierarchies that can freeze a process, by kind."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            found["cgroup2"] = root, mount
        elif kind == "cgroup" and "freezer" in options.split(","):
            found["freezer"] = root, mount
    return found


def _read_cgroup_file(hierarchy: tuple[str, str] | None, path: str, name: str) -> str:
    """Return the content of file `name` of the control group `path` (cgroup), or "" where it is not visible."""
    if hierarchy is None:
        return ""
    root, mount = hierarchy
    with suppress(OSError):
        return Path(mount, path.removeprefix(root.rstrip("/")).lstrip("/"), name).read_text()
    return ""
