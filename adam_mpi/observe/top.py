"""`adam_mpi top RUN`: a running job rank by rank, from its run directory, on any machine that sees it."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from adam_mpi.errors import UserError
from adam_mpi.observe import screen

ENDS = {"DONE": "done", "STOPPED": "stopped", "log/failure.txt": "failed"}
LOOK_SECONDS = 0.5


def top(run: Path, once: bool) -> None:
    """Show the job until it has ended; once where no terminal is looking."""
    console = Console()
    if once or not console.is_terminal:
        console.print(view(run, read(run)))
        return
    with Live(view(run, read(run)), console=console, auto_refresh=False) as live:
        while not ended(run):
            time.sleep(LOOK_SECONDS)
            live.update(view(run, read(run)), refresh=True)


def read(run: Path) -> dict[str, Any]:
    """What the job's head wrote last."""
    path = run / "status.json"
    if not (run / "config.toml").exists():
        raise UserError(f"{run}: no run directory; give that of a job that is running or has run")
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def ended(run: Path) -> str:
    """How the job ended, if it has."""
    return next((word for file, word in ENDS.items() if (run / file).exists()), "")


def view(run: Path, status: dict[str, Any]) -> Group:
    if not status:
        return Group(Text(f"{run}: {ended(run) or 'starting'}; nothing told yet"))
    age, end = time.time() - status["time"], ended(run)
    note = f"{run}: {end or 'running'}, {status['seconds']:.0f} s"
    if not end and age > 5 * max(status["interval"], 1.0):
        note += f"; not heard of for {age:.0f} s: is it still there?"
    spares = status.get("spares", {"ready": 0, "coming": 0})
    if any(spares.values()):
        note += f"; spares: {spares['ready']} stand by, {spares['coming']} on their way"
    return Group(Text(note, style="bold"), screen.run_line(status["run"]), screen.by_rank(status["ranks"]))
