"""The view of a running job in a terminal: a line about the run, a table by role, and one by rank."""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from adam_mpi.base.errors import UserError
from adam_mpi.base.log import format_bytes, format_duration
from adam_mpi.sharding.training_state import Phase

ENDS = {"DONE": "done", "STOPPED": "stopped", "log/failure.txt": "failed"}
"""File that a job leaves -> how it ended."""
REFRESH_SECONDS = 0.5
FIGURES = ("loss", "accuracy")
"""What is shown of a run that does not name its metrics."""


def run_line(run: dict[str, Any]) -> Text:
    """Return the live view's line about the `run` part of a status: epoch, progress, loss, metrics, speed."""
    text = Text(f"{run['name']}  {run['share']:4.0%}", style="bold", no_wrap=True, overflow="ellipsis")
    for name, value in run_figures(run).items():
        text.append(f"  {name} ", style="dim")
        text.append(value, style="not dim")
    return text


def run_figures(run: dict[str, Any]) -> dict[str, str]:
    """Return the live view's figures of the `run` part of a status as text, by name."""
    found = {name.replace("_", " "): f"{run[name]:.4f}" for name in run.get("metrics", FIGURES) if name in run} | {
        "images/s": f"{run['images_per_second']:.0f}",
        "staleness": f"{run['staleness']:.2f}",
    }
    return found | ({"ETA": format_duration(run["eta"])} if run.get("eta") is not None else {})


def by_role(groups: list[dict[str, Any]], staleness: float) -> Table:
    """Return the live view's table of a status's `groups`, one row per role."""
    table = _empty_table("role", "ranks", "busy", "waiting for", "queue", "staleness", "traffic")
    for group in groups:
        waited = f"{group['waiting']} {group['waited']:.0%}" if group["waiting"] else ""
        stale = "" if group["role"] == "data" else f"{staleness:.2f}"
        traffic = f"{format_bytes(group['bytes'])}/s"
        table.add_row(
            group["role"], str(group["ranks"]), _busy_text(group["busy"]), waited, f"{group['queue']:g}", stale, traffic
        )
    return table


def by_rank(ranks: list[dict[str, Any]]) -> Table:
    """Return the live view's table of a status's `ranks`, one row per role of a rank."""
    table = _empty_table("rank", "role", "host", "busy", "waiting for", "queue", "images/s", "traffic", "")
    for row in ranks:
        strip = "" if row["replica"] is None or row["role"] != "worker" else f" {row['replica']}.{row['strip']}"
        images = f"{row['images']:.0f}" if row["role"] == "worker" else ""
        notes = ["slow"] * row["slow"] + [f"silent for {row['silent']:.0f} s"] * (row["silent"] > 10)
        table.add_row(
            str(row["rank"]),
            row["role"] + strip,
            row["host"],
            _busy_text(row["busy"]),
            row["waiting"],
            str(row["queue"]),
            images,
            f"{format_bytes(row['bytes'])}/s",
            Text(", ".join(notes), style="red"),
        )
    return table


def _busy_text(share: float) -> Text:
    """Return a busy share as colored text for the live view."""
    return Text(f"{share:4.0%}", style="green" if share > 0.8 else "yellow" if share > 0.3 else "")


def _empty_table(*columns: str) -> Table:
    """Return an empty table of the live view with these `columns`."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in ("ranks", "busy", "queue", "images/s") else "left")
    return table


def top(run: Path, once: bool) -> None:
    """Show the live view of the job in `run` until it has ended; with `once`, or without a terminal, only once."""
    console = Console()
    if once or not console.is_terminal:
        console.print(view(run, read_status(run)))
        return
    with Live(view(run, read_status(run)), console=console, auto_refresh=False) as live:
        while not ended(run):
            time.sleep(REFRESH_SECONDS)
            live.update(view(run, read_status(run)), refresh=True)


def read_status(run: Path) -> dict[str, Any]:
    """Return the status for the live view that the coordinator wrote last; empty before the first one."""
    path = run / "status.json"
    if not (run / "config.toml").exists():
        raise UserError(f"{run}: no run directory; give that of a job that is running or has run")
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def ended(run: Path) -> str:
    """Return how the job that the live view of `run` shows has ended; an empty text while it runs."""
    return next((end for file, end in ENDS.items() if (run / file).exists()), "")


def view(run: Path, status: dict[str, Any]) -> Group:
    """Return the live view of the job in the directory `run` with this `status`."""
    if not status:
        return Group(Text(f"{run}: {ended(run) or 'starting'}; no status yet"))
    age = time.time() - status["time"]
    end = ended(run)
    note = f"{run}: {end or 'running'}, {status['seconds']:.0f} s"
    if not end and age > 5 * max(status["interval"], 1.0):
        note += f"; no status for {age:.0f} s: is it still there?"
    spares = status.get("spares", {"ready": 0, "coming": 0})
    if any(spares.values()):
        note += f"; spares: {spares['ready']} stand by, {spares['coming']} are starting"
    return Group(Text(note, style="bold"), run_line(status["run"]), by_rank(status["ranks"]))


if TYPE_CHECKING:
    from rich.live import Live


class Progress:
    """Prints the state of the job at intervals."""

    def __init__(self, epochs: int) -> None:
        """Show the live progress line of a job of `epochs` epochs."""
        self.epochs = epochs
        # Launchers put a pipe between a rank and the terminal; scripts/train knows whether a terminal is at its end.
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self.live = _start_display() if terminal or os.environ.get("ADAM_MPI_TERMINAL", "") == "1" else None

    def update(self, status: dict[str, Any]) -> None:
        """Show the state of the job in the progress line; `status`: as in `status.json`."""
        if self.live is None:
            self.say(plain(status["run"]))
            return
        from rich.console import Group

        pass

        run = status["run"]
        # The empty line: mpirun forwards whole lines only, and the view ends without an end of line.
        view = Group(run_line(run), by_role(status["groups"], run["staleness"]), "")
        self.live.update(view, refresh=True)

    def end(self, status: dict[str, Any]) -> None:
        """Print the progress line of a phase that is over; it stays."""
        self.say(plain(status["run"]))

    def close(self) -> None:
        """Remove the progress view from the terminal."""
        if self.live is not None:
            self.live.update("", refresh=True)
            self.live.stop()
            self.live = None

    def say(self, text: str) -> None:
        """Print `text` above the progress view."""
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def name(self, phase: Phase) -> str:
        """Return the name of `phase` in the progress line."""
        return f"epoch {phase.epoch}/{self.epochs} {phase.part}" if phase.part != "test" else "test"


def plain(run: dict[str, Any]) -> str:
    """Return the progress line about the `run` part of a status, without control codes."""
    pass

    text = "  ".join(f"{name} {value}" for name, value in run_figures(run).items())
    return f"{run['name']}  {run['share']:4.0%}  {text}"


def _start_display() -> "Live":
    """Start rich's live display on the terminal, and return it."""
    from rich.console import Console
    from rich.live import Live

    live = Live("", console=Console(force_terminal=True), auto_refresh=False, redirect_stdout=False)
    live.start()
    return live
