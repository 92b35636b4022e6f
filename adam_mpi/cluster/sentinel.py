"""A small process beside the ranks of one host that says which rank died, whatever the MPI does about it.

Some launchers kill every other rank at once when one dies, so no rank is left to tell. Each rank keeps a
connection to its host's sentinel; a connection that ends without a word is a death. The first one to make
`log/failure.txt` in the run directory tells it; deaths that follow from it are not news. Interruptions go the same
way: launchers also interrupt the others when a rank has died, and kill them a moment later.
Where the job may go on without a rank, a death is told only if the others end too before they have gone on; if they
neither go on nor end in a given time, it ends them: they may hang inside MPI, where no check of theirs reaches.

It also finds ranks that hang because they are stopped (SIGSTOP): after a while it ends them, and they are dead like
others. It asks the kernel, so that neither load nor a long compilation is ever taken for a hang, and no rank that was
given up wakes up again.

While it watches, `log/watched-HOST-PID.txt` has the names of its ranks: one that is left over when the job has ended is
of a host that was lost as a whole.

Run as a plain file with the standard library only, so that it starts in milliseconds:
    sentinel.py SOCKET FAILURE_FILE RANKS SURVIVABLE PATIENCE GRACE ELSEWHERE
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
import time
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


def start(
    failure_file: Path, ranks: int, survivable: bool = False, patience: float = 0.0, grace: float = 60.0,
    elsewhere: bool = False,
) -> str:  # fmt: skip
    """Start the sentinel of this host for so many ranks, and those that join later; returns what they connect to.

    `survivable`: the others may go on after a death, within `grace` seconds. `patience`: seconds that a rank may be
    stopped; 0 lets it be. `elsewhere`: there are ranks on other hosts, which may go on when all of these are dead.
    """
    path = tempfile.mkdtemp(prefix="adam_mpi-") + "/sentinel"
    words = [path, str(failure_file), str(ranks), str(int(survivable)), str(patience), str(grace), str(int(elsewhere))]
    command = [sys.executable, "-I", "-S", __file__, *words]
    # A session of its own: launchers end the process groups of the ranks they started.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return path


def report(failure_file: Path, text: str, status: str = "failed", exit_code: int = 1) -> None:
    """Tell why the job ends, and note it in the summary, unless somebody has told already.

    Where another job has the run directory by now, it is only told.
    """
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
        return _tell(text)
    # Noted and told before it is written: who finds it written may end the job, and us with it.
    with suppress(OSError):
        _note(failure_file.parent.parent / "summary.json", text, status, exit_code)
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


class Wire:
    """A rank's connection to its sentinel."""

    def __init__(self, path: str | None, name: str) -> None:
        """Nobody watches over a rank without a path: one that came later."""
        self.socket = socket.socket(socket.AF_UNIX)
        if path is None:
            return
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
    """Since when it was seen to be stopped, without a break."""
    given_up: bool = False


class Watch:
    """What the sentinel does: it hears from ranks, and looks at them now and then."""

    def __init__(
        self, path: str, failure_file: Path, ranks: int, survivable: bool, patience: float, grace: float,
        elsewhere: bool,
    ) -> None:  # fmt: skip
        self.failure_file, self.expected, self.survivable = failure_file, ranks, survivable
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
            if self.deaths and time.monotonic() - self.died > self.grace:
                self._end_others()
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
            rank.stopped = (rank.stopped or now) if _is_stopped(rank.pid) else None
            if rank.stopped and now - rank.stopped > self.patience and not rank.given_up:
                rank.given_up, death = True, f"{rank.name} was stopped for {self.patience:g} s and is ended"
                self._note_death(f"{death}; the job ends")
                self._tell_death()
                if self.survivable:
                    _tell(death)
                os.kill(rank.pid, signal.SIGKILL)

    def _note_death(self, text: str) -> None:
        self.died = self.died if self.deaths else time.monotonic()
        self.deaths.append(text)

    def _end_others(self) -> None:
        """They have neither gone on nor ended."""
        if self.survivable:
            report(self.failure_file, f"{self.deaths[0]}: the others have not gone on for {self.grace:g} s")
            for rank in self.ranks:
                with suppress(OSError):
                    os.kill(rank.pid, signal.SIGKILL)
        self.deaths.clear()

    def _tell_death(self) -> None:
        """The first one, unless somebody is left who may go on."""
        if self.deaths and not (self.survivable and (self.ranks or self.elsewhere)):
            report(self.failure_file, self.deaths[0])


def _is_stopped(pid: int) -> bool:
    """Whether the kernel says so; where it does not say (no /proc), nobody is."""
    try:
        # The name, in parentheses, may have anything in it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _note_again(failure_file: Path) -> None:
    """The head may have been about to write its summary when the end was noted there: now it writes no more."""
    summary = failure_file.parent.parent / "summary.json"
    with suppress(OSError, ValueError):
        text = failure_file.read_text().rstrip()
        if text and json.loads(summary.read_text())["status"] == "running":
            _note(summary, text, "interrupted" if text.startswith("interrupted") else "failed")


def main() -> None:
    path, failure_file, ranks, survivable, patience, grace, elsewhere = sys.argv[1:]
    try:
        limits = float(patience), float(grace)
        watch = Watch(path, Path(failure_file), int(ranks), survivable == "1", *limits, elsewhere == "1")
        print("listening", flush=True)
        watch.run()
        _note_again(watch.failure_file)
    finally:
        Path(path).unlink(missing_ok=True)
        Path(path).parent.rmdir()


if __name__ == "__main__":
    main()
