"""A small process beside the ranks of one host that says which rank died, whatever the MPI does about it.

Some launchers kill every other rank at once when one dies, so no rank is left to tell. Each rank keeps a
connection to its host's sentinel; a connection that ends without a word is a death. The first one to make
`log/failure.txt` in the run directory tells it; deaths that follow from it are not news. Interruptions go the same
way: launchers also interrupt the others when a rank has died, and kill them a moment later.
Where the job may go on without a rank, a death is told only if the others end too before they have gone on; if they
neither go on nor end in a given time, it ends them: they may hang inside MPI, where no check of theirs reaches.

It also finds ranks that hang because they are stopped (SIGSTOP) or frozen (a cgroup's freezer: a paused container):
after a while it ends them, and they are dead like others. It asks the kernel, so that neither load nor a long
compilation is ever taken for a hang, and no rank that was given up wakes up again. Ranks that hang in other ways are
found by the head, which hears no more of them: it leaves an order in `log/silent.jsonl`, and their sentinel ends them.
Once the reason of a failure is written, ranks that do not end by themselves within a few seconds are ended too.

While it watches, `log/watched-HOST-PID.txt` has the names of its ranks: one that is left over when the job has ended is
of a host that was lost as a whole.

Run as a plain file with the standard library only, so that it starts in milliseconds:
    sentinel.py SOCKET FAILURE_FILE RANKS SURVIVABLE PATIENCE GRACE ELSEWHERE HOST
"""

import fcntl
import json
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

OWNER_FILE = "ADAM_MPI_OWNER_FILE"
"""The variable with the claim under which a job has its run directory; it is gone when another job has taken that."""
BYE, WENT_ON = b"bye", b"went on\n"
CONNECT_SECONDS = 60.0
LOOK_SECONDS = 0.25
TELL_SECONDS = 1.0
REPORT_SECONDS = 6.0
READ_SECONDS, END_SECONDS = 0.5, 5.0
"""Between two looks at the files of the run directory; for ranks to end once the failure of their job is written."""
SOCKET_PATH = 100
"""Bytes that the path of a socket may have: 107 on Linux, 103 elsewhere."""
ORDERS = "silent.jsonl"


def start(
    failure_file: Path,
    ranks: int,
    survivable: bool = False,
    patience: float = 0.0,
    grace: float = 60.0,
    elsewhere: bool = False,
    host: str = "",
) -> str:
    """Start the sentinel of this host for so many ranks, and those that join later; returns what they connect to.

    `survivable`: the others may go on after a death, within `grace` seconds. `patience`: seconds that a rank may be
    stopped; 0 lets it be. `elsewhere`: there are ranks on other hosts, which may go on when all of these are dead.
    `host`: how the ranks call this host, in orders to end one of them.
    """
    path = _folder() + "/sentinel"
    words = [path, str(failure_file), str(ranks), str(int(survivable)), str(patience), str(grace), str(int(elsewhere))]
    command = [sys.executable, "-I", "-S", __file__, *words, host]
    # A session of its own: launchers end the process groups of the ranks they started.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return path


def _folder() -> str:
    """Make a folder for the socket, in TMPDIR unless that makes the socket's path too long for the system."""
    places = [place for place in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm") if len(place) < SOCKET_PATH]
    for place in places:
        folder = ""
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="adam_mpi-", dir=place)
        if folder and len(os.fsencode(folder + "/sentinel")) <= SOCKET_PATH:
            return folder
        if folder:
            os.rmdir(folder)
    raise OSError(f"no folder for a socket in {', '.join(places)}: each path is too long or cannot be written")


def order_end(failure_file: Path, host: str, pid: int, text: str) -> None:
    """Have the sentinel of a host end one of its ranks and tell that it "TEXT and is ended"; raises OSError."""
    with failure_file.with_name(ORDERS).open("a") as file:
        file.write(json.dumps([host, pid, text]) + "\n")


def report(failure_file: Path, text: str, status: str = "failed", exit_code: int = 1) -> None:
    """Tell why the job ends, and note it in the summary, unless somebody has told already.

    A run directory that does not answer keeps nobody from telling; where another job has it by now, it is only told.
    """
    said = threading.Event()
    if not within(REPORT_SECONDS, lambda: _report(failure_file, text, status, exit_code, said)) and not said.is_set():
        _tell(text)


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Do something that may hang, on a thread of its own; whether it was done within so many seconds."""
    thread = threading.Thread(target=work, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _report(failure_file: Path, text: str, status: str, exit_code: int, said: threading.Event) -> None:
    if OWNER_FILE in os.environ and not Path(os.environ[OWNER_FILE]).exists():
        return _tell(text)
    try:
        file = failure_file.open("x")
    except FileExistsError:
        # The caller ends the job next, and with it the one that is about to tell; unless that was killed on the way.
        if told(failure_file, 2 * TELL_SECONDS):
            return
        file = failure_file.open("w")
    except OSError:
        said.set()
        return _tell(text)
    # Noted and told before it is written: who finds it written may end the job, and us with it.
    with suppress(OSError, ValueError):
        _note(failure_file.parent.parent / "summary.json", text, status, exit_code)
    said.set()
    _tell(text)
    with suppress(OSError), file:
        file.write(text + "\n")


def told(failure_file: Path, seconds: float) -> bool:
    """Whether somebody tells within a while why the job ends."""
    limit = time.monotonic() + seconds
    while not (failure_file.exists() and failure_file.stat().st_size):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def exit_code(failure_file: Path) -> int:
    """What was told with the reason: 2 where it is no better the second time."""
    with suppress(OSError, ValueError, KeyError):
        return json.loads((failure_file.parent.parent / "summary.json").read_text())["exit_code"]
    return 1


def _tell(text: str) -> None:
    # What stands in for the real one may have no more than `write`.
    with suppress(OSError, ValueError, AttributeError):
        # In one piece: others write to the same terminal.
        sys.stderr.write(f"adam_mpi: {text}\n")
        sys.stderr.flush()
        taken(sys.stderr.fileno(), TELL_SECONDS)


def taken(pipe: int, seconds: float) -> bool:
    """Whether the launcher reads all of a pipe within a while: what it has not when the job ends, some throw away."""
    limit = time.monotonic() + seconds
    while stat.S_ISFIFO(os.fstat(pipe).st_mode) and any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
        if time.monotonic() > limit:
            return False
        time.sleep(0.001)
    return True


def _note(path: Path, text: str, status: str, exit_code: int = 1) -> None:
    summary = json.loads(path.read_text()) if path.exists() else {}
    part, news = path.with_suffix(".failed"), {"status": status, "failure": text, "exit_code": exit_code}
    part.write_text(json.dumps(summary | news, indent=2) + "\n")
    part.replace(path)


class SentinelConnection:
    """A rank's connection to its sentinel."""

    def __init__(self, path: str, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.sendall(json.dumps([name, os.getpid()]).encode() + b"\n")

    def say(self, word: bytes) -> None:
        with suppress(OSError):
            self.socket.sendall(word)

    def bye(self, interruption: str = "") -> None:
        """From here on the end of this rank is no surprise; if somebody asked for it, the sentinel tells who."""
        self.say(interruption.encode() or BYE)
        self.socket.close()


@dataclass
class Rank:
    name: str
    pid: int
    stopped: float | None = None
    """Since when it was seen to be stopped or frozen, without a break."""
    given_up: bool = False


class Watch:
    """What the sentinel does: it hears from ranks, and looks at them now and then."""

    def __init__(
        self,
        path: str,
        failure_file: Path,
        ranks: int,
        survivable: bool,
        patience: float,
        grace: float,
        elsewhere: bool,
        host: str,
    ) -> None:
        self.failure_file, self.expected, self.survivable, self.host = failure_file, ranks, survivable, host
        self.patience, self.grace, self.elsewhere = patience, grace, elsewhere
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(ranks)
        # epoll hands out events in the order they happened: the first death seen is the first death.
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.watched = failure_file.with_name(f"watched-{socket.gethostname()}-{os.getpid()}.txt")
        self.ranks: list[Rank] = []
        self.deaths: list[str] = []
        """Those after which nobody has gone on yet."""
        self.died = 0.0
        """When the first of them was seen."""
        self.orders: list[tuple[str, int, str]] = []
        """Ranks of any host that are to be ended: (host, process, why)."""
        self.failed: float | None = None
        """Since when the run directory says why the job ends."""
        # On a thread of its own: a file system that hangs must not keep us from ranks that die.
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def run(self) -> None:
        """Until the last rank has gone, or too few have come."""
        limit = time.monotonic() + CONNECT_SECONDS
        while self.ranks or (self.expected > 0 and time.monotonic() < limit):
            for key, _ in self.selector.select(LOOK_SECONDS):
                if key.fileobj is self.listener:
                    self._welcome()
                else:
                    self._hear(cast(socket.socket, key.fileobj), key.data)
            if self.patience:
                self._look(time.monotonic())
            self._carry_out()
            if self.deaths and time.monotonic() - self.died > self.grace:
                self._end_others()
            if self.failed and time.monotonic() - self.failed > END_SECONDS:
                self._kill_all()
        with suppress(OSError):
            self.watched.unlink()

    def _welcome(self) -> None:
        connection, _ = self.listener.accept()
        # The name is read first, and no more: what follows is an event, and before any death there is none.
        with connection.makefile("rb", buffering=0) as stream:
            rank = Rank(*json.loads(stream.readline()))
        self.ranks.append(rank)
        self.expected -= 1
        with suppress(OSError):
            self.watched.write_text("".join(f"{rank.name}\n" for rank in self.ranks))
        self.selector.register(connection, selectors.EVENT_READ, rank)

    def _hear(self, connection: socket.socket, rank: Rank) -> None:
        last = connection.recv(4096)
        if last.startswith(WENT_ON):
            self.deaths.clear()
            last = last.replace(WENT_ON, b"")
            if not last:
                return
        # Whatever else is said comes right before the end.
        while last and (more := connection.recv(4096)):
            last += more
        self.selector.unregister(connection)
        connection.close()
        self.ranks.remove(rank)
        if not last and not rank.given_up:
            self._note_death(f"{rank.name} died; the job ends")
        elif last and last != BYE:
            report(self.failure_file, last.decode(), "interrupted")
        elif last and self.survivable:
            # Who ends in order has gone on, or has told why he does not.
            self.deaths.clear()
        self._tell_death()

    def _look(self, now: float) -> None:
        """End ranks that have been stopped for too long: launchers would wait for them for ever."""
        for rank in self.ranks:
            state = _halted(rank.pid)
            rank.stopped = (rank.stopped or now) if state else None
            if rank.stopped and now - rank.stopped > self.patience:
                self._give_up(rank, f"was {state} for {self.patience:g} s")

    def _carry_out(self) -> None:
        """End the ranks that the head has ordered to be ended."""
        for host, pid, why in self.orders:
            for rank in self.ranks:
                if (host, pid) == (self.host, rank.pid):
                    self._give_up(rank, why)

    def _give_up(self, rank: Rank, why: str) -> None:
        if rank.given_up:
            return
        rank.given_up, death = True, f"{rank.name} {why} and is ended"
        self._note_death(f"{death}; the job ends")
        self._tell_death()
        if self.survivable:
            _tell(death)
        with suppress(OSError):
            os.kill(rank.pid, signal.SIGKILL)

    def _read(self) -> None:
        """Look into the run directory now and then, for orders and for the reason why the job ends."""
        orders = self.failure_file.with_name(ORDERS)
        # Who opens a file that is there sees what it has now; that there is one, NFS may not tell for a minute.
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
        self.died = self.died if self.deaths else time.monotonic()
        self.deaths.append(text)

    def _end_others(self) -> None:
        """They have neither gone on nor ended."""
        if self.survivable:
            report(self.failure_file, f"{self.deaths[0]}: the others have not gone on for {self.grace:g} s")
            self._kill_all()
        self.deaths.clear()

    def _kill_all(self) -> None:
        for rank in self.ranks:
            with suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)

    def _tell_death(self) -> None:
        """The first one, unless somebody is left who may go on."""
        if self.deaths and not (self.survivable and (self.ranks or self.elsewhere)):
            report(self.failure_file, self.deaths[0])


def _halted(pid: int) -> str:
    """Whether a process is "stopped" or "frozen", by the kernel's word; where it does not say (no /proc), neither."""
    try:
        # The name, in parentheses, may have anything in it.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return "stopped"
    except OSError:
        return ""
    return "frozen" if _is_frozen(pid) else ""


def _is_frozen(pid: int) -> bool:
    """Whether the freezer of its control group, of version 1 or 2, holds a process: its state then looks like sleep."""
    with suppress(OSError):
        places = _freezers()
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and "frozen 1" in _inside(places.get("cgroup2"), path, "cgroup.events"):
                return True
            first = "freezer" in controllers.split(",")
            if first and "FROZEN" in _inside(places.get("freezer"), path, "freezer.state"):
                return True
    return False


def _freezers() -> dict[str, tuple[str, str]]:
    """Where the control groups with a freezer are mounted, each with the group that is seen there."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount, (kind, _, options) = *before.split()[3:5], after.split()[:3]
        if kind == "cgroup2":
            found["cgroup2"] = root, mount
        elif kind == "cgroup" and "freezer" in options.split(","):
            found["freezer"] = root, mount
    return found


def _inside(place: tuple[str, str] | None, path: str, name: str) -> str:
    """What a file of a control group says; nothing where it is not to be seen, as that of the outermost one."""
    root, mount = place or ("", "")
    with suppress(OSError):
        return Path(mount, path.removeprefix(root.rstrip("/")).lstrip("/"), name).read_text() if place else ""
    return ""


def _note_again(failure_file: Path) -> None:
    """The head may have been about to write its summary when the end was noted there: now it writes no more."""
    summary = failure_file.parent.parent / "summary.json"
    with suppress(OSError, ValueError):
        text = failure_file.read_text().rstrip()
        if text and json.loads(summary.read_text())["status"] == "running":
            _note(summary, text, "interrupted" if text.startswith("interrupted") else "failed")


def main() -> None:
    path, failure_file, ranks, survivable, patience, grace, elsewhere, host = sys.argv[1:]
    try:
        limits = float(patience), float(grace)
        watch = Watch(path, Path(failure_file), int(ranks), survivable == "1", *limits, elsewhere == "1", host)
        print("listening", flush=True)
        watch.run()
        _note_again(watch.failure_file)
    finally:
        Path(path).unlink(missing_ok=True)
        Path(path).parent.rmdir()


if __name__ == "__main__":
    main()
