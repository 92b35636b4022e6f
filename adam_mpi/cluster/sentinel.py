"""A rank's side of the sentinel (`sentinel_process.py`): start it, connect to it, order it to kill a silent rank."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from adam_mpi.cluster.sentinel_process import BYE, ORDERS, Settings
from adam_mpi.cluster.sentinel_process import RECOVERED as RECOVERED

SOCKET_PATH = 100
"""Maximum length in bytes of the path of a socket: 107 on Linux, 103 elsewhere."""
PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from adam_mpi.cluster.sentinel_process import main; main(*sys.argv[2:])"
)


def start_sentinel(
    failure_file: Path,
    ranks: int,
    survivable: bool = False,
    patience: float = 0.0,
    grace: float = 60.0,
    elsewhere: bool = False,
    host: str = "",
) -> str:
    """Start the sentinel of this host and return the path of its socket, to which ranks connect.

    The parameters after `failure_file` are the fields of `sentinel_process.Settings`.
    """
    path = _make_folder() + "/sentinel"
    settings = Settings(ranks, survivable, patience, grace, elsewhere, host=host)
    package = Path(__file__).parents[2]
    arguments = [str(package), path, str(failure_file), json.dumps(asdict(settings))]
    process = subprocess.Popen(
        # Without site packages, so that it starts in milliseconds.
        [sys.executable, "-I", "-S", "-c", PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # A session of its own: launchers kill the process groups of the ranks they have started.
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return path


def _make_folder() -> str:
    """Make a folder for the sentinel's socket, in TMPDIR unless the socket's path is too long there."""
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


def order_kill(failure_file: Path, host: str, pid: int, reason: str) -> None:
    """Have the sentinel of `host` kill its rank `pid` and report that it "REASON and is ended"; raise OSError."""
    with failure_file.with_name(ORDERS).open("a") as file:
        file.write(json.dumps([host, pid, reason]) + "\n")


class SentinelConnection:
    """The connection of a rank to its host's sentinel, which takes its unannounced end for the rank's death."""

    def __init__(self, path: str, name: str) -> None:
        """Connect to the sentinel's socket `path` as the rank called `name` in reports."""
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.sendall(json.dumps([name, os.getpid()]).encode() + b"\n")

    def send(self, message: bytes) -> None:
        """Send `message` to the sentinel, for example RECOVERED; a sentinel that is gone is no error."""
        with suppress(OSError):
            self.socket.sendall(message)

    def close(self, interruption: str = "") -> None:
        """Tell the sentinel that this rank ends in order; it reports `interruption`, if any, as the reason."""
        self.send(interruption.encode() or BYE)
        self.socket.close()
