#!/usr/bin/env python
"""Makes docs/images/terminal.svg: a real job in a real terminal (tmux), a rank of it killed, training that continues.

.venv/bin/python scripts/terminal_picture.py
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS, ROWS, SECONDS = 110, 24, 180.0
KILLED = "inject.faults=['kill rank=2 at=apply step=250']"
SETTINGS = (
    f'--set layout.servers=2 --set server.copies=2 --set observe.interval=1 --set train.epochs=6 --set "{KILLED}"'
)


def tmux(socket: str, *words: str) -> str:
    """Return what tmux prints for a command."""
    command = ["tmux", "-L", socket, "-f", "/dev/null", *words]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=20).stdout


def wait(screen: Callable[[], str], pattern: str) -> str:
    """Return the screen once it matches `pattern`; raise SystemExit when it does not in time."""
    limit = time.monotonic() + SECONDS
    while not re.search(pattern, text := screen()):
        if time.monotonic() > limit:
            raise SystemExit(f"the terminal did not show {pattern!r} within {SECONDS:g} s; it shows\n{text}")
        time.sleep(0.2)
    return text


def main() -> None:
    """Run the job, take the screen in the middle of training after the loss, and write the picture."""
    socket = f"adam-mpi-picture-{time.time_ns()}"
    command = f"scripts/train -n 6 --run {tempfile.mkdtemp()}/run {SETTINGS}"
    shown = "scripts/train -n 6 --set layout.servers=2 --set server.copies=2   # and rank 2, a server, is killed"
    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    tmux(socket, "new-session", "-d", *size, "-c", str(ROOT), "bash", "-c", f"{command}; sleep 60")
    try:
        wait(lambda: tmux(socket, "capture-pane", "-p"), r"lost;")
        wait(lambda: tmux(socket, "capture-pane", "-p"), r"(?s)lost;.*epoch \d/6")
        screen = tmux(socket, "capture-pane", "-p", "-e").rstrip()
    finally:
        subprocess.run(["tmux", "-L", socket, "kill-server"], capture_output=True, check=False, timeout=20)
    console = Console(record=True, width=COLUMNS, file=sys.stderr, force_terminal=True)
    console.print(Text(f"$ {shown}", style="bold"))
    console.print(Text.from_ansi(screen))
    console.save_svg(str(PICTURE), title="adam_mpi")


if __name__ == "__main__":
    main()
