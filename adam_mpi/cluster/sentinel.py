"""A small process beside the ranks of one host that says which rank died, whatever the MPI does about it.

Some launchers kill every other rank at once when one dies, so no rank is left to tell. Each rank keeps a
connection to its host's sentinel; a connection that ends without a word is a death. The first one to make
`log/failure.txt` in the run directory tells it; deaths that follow from it are not news. Interruptions go the same
way: launchers also interrupt the others when a rank has died, and kill them a moment later.

Run as a plain file with the standard library only, so that it starts in milliseconds:
    sentinel.py SOCKET FAILURE_FILE RANKS
"""

import json
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

BYE = b"bye"
CONNECT_SECONDS = 60.0


def start(failure_file: Path, ranks: int) -> str:
    """Start the sentinel of this host for so many ranks; returns the path they connect to."""
    path = tempfile.mkdtemp(prefix="adam_mpi-") + "/sentinel"
    command = [sys.executable, "-I", "-S", __file__, path, str(failure_file), str(ranks)]
    # A session of its own: launchers end the process groups of the ranks they started.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return path


def report(failure_file: Path, text: str, status: str = "failed") -> None:
    """Tell why the job ends, and note it in the summary, unless somebody has told already."""
    try:
        file = failure_file.open("x")
    except FileExistsError:
        return
    except OSError:
        return _tell(text)
    # Told and noted before it is written: who finds it written may end the job, and us with it.
    _tell(text)
    with suppress(OSError), file:
        _note(failure_file.parent.parent / "summary.json", text, status)
        file.write(text + "\n")


def told(failure_file: Path, seconds: float) -> bool:
    """Whether somebody tells within a while why the job ends."""
    limit = time.monotonic() + seconds
    while not (failure_file.exists() and failure_file.stat().st_size):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def _tell(text: str) -> None:
    with suppress(OSError):
        # In one piece: others write to the same terminal.
        sys.stderr.write(f"adam_mpi: {text}\n")
        sys.stderr.flush()


def _note(path: Path, text: str, status: str) -> None:
    summary = json.loads(path.read_text()) if path.exists() else {}
    part = path.with_suffix(".failed")
    part.write_text(json.dumps(summary | {"status": status, "failure": text}, indent=2) + "\n")
    part.replace(path)


class Wire:
    """A rank's connection to its sentinel."""

    def __init__(self, path: str, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.sendall(json.dumps(name).encode() + b"\n")

    def bye(self, interruption: str = "") -> None:
        """From here on the end of this rank is no surprise; if somebody asked for it, the sentinel tells who."""
        with suppress(OSError):
            self.socket.sendall(interruption.encode() or BYE)
        self.socket.close()


def _watch(path: str, failure_file: Path, ranks: int) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(ranks)
    listener.settimeout(CONNECT_SECONDS)
    print("listening", flush=True)
    # epoll hands out events in the order they happened: the first death seen is the first death.
    selector = selectors.DefaultSelector()
    for _ in range(ranks):
        connection, _ = listener.accept()
        stream = connection.makefile("rb")
        # The name is read first: a connection with unread words would be an event before any death.
        selector.register(connection, selectors.EVENT_READ, (json.loads(stream.readline()), stream))
    while selector.get_map():
        for key, _ in selector.select():
            name, stream = key.data
            selector.unregister(key.fileobj)
            last = stream.read()
            if not last:
                report(failure_file, f"{name} died; the job ends")
            elif last != BYE:
                report(failure_file, last.decode(), "interrupted")


def _note_again(failure_file: Path) -> None:
    """The head may have been about to write its summary when the end was noted there: now it writes no more."""
    summary = failure_file.parent.parent / "summary.json"
    with suppress(OSError, ValueError):
        text = failure_file.read_text().rstrip()
        if text and json.loads(summary.read_text())["status"] == "running":
            _note(summary, text, "interrupted" if text.startswith("interrupted") else "failed")


def main() -> None:
    path, failure_file, ranks = sys.argv[1:]
    try:
        _watch(path, Path(failure_file), int(ranks))
        _note_again(Path(failure_file))
    except TimeoutError:
        pass
    finally:
        Path(path).unlink(missing_ok=True)
        Path(path).parent.rmdir()


if __name__ == "__main__":
    main()
