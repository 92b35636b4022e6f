"""A real terminal: a tmux pane that a command runs in, and what is to be seen there."""

import subprocess
import time
import uuid
from collections.abc import Callable

import pytest


class Terminal:
    def __init__(self, command: str, columns: int = 120, rows: int = 30) -> None:
        self.socket = f"adam-mpi-{uuid.uuid4().hex}"
        # The pane stays when the command ends, so that its last words can be read.
        size = ["-x", str(columns), "-y", str(rows)]
        self._tmux("new-session", "-d", *size, "bash", "-c", f"{command}; echo ended with $?; sleep 600")

    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    def until(self, seen: Callable[[str], bool], what: str, timeout: float = 60) -> str:
        """What is on the screen once it is as wanted; the test fails when it does not get there."""
        limit = time.monotonic() + timeout
        while not seen(text := self.text()):
            if time.monotonic() > limit:
                pytest.fail(f"no {what} on the screen in {timeout} s; it shows\n{text}", pytrace=False)
            time.sleep(0.05)
        return text

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self.socket, "kill-server"], capture_output=True, check=False, timeout=20)

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self.socket, "-f", "/dev/null", *words]
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=20).stdout
