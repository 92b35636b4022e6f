"""Progress of a job for people: on a terminal a view that stays in place, elsewhere a plain line per interval."""

import os
import sys
from typing import TYPE_CHECKING, Any

from adam_mpi.sharding.phases import Phase

if TYPE_CHECKING:
    from rich.live import Live


class Progress:
    """Prints the state of the job at intervals."""

    def __init__(self, epochs: int) -> None:
        """Show the progress of a job of `epochs` epochs."""
        self.epochs = epochs
        # Launchers put a pipe between a rank and the terminal; scripts/train knows whether a terminal is at its end.
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        self.live = _live() if terminal or os.environ.get("ADAM_MPI_TERMINAL", "") == "1" else None

    def update(self, status: dict[str, Any]) -> None:
        """Show the state of the job; `status`: as in `status.json`."""
        if self.live is None:
            self.say(plain(status["run"]))
            return
        from rich.console import Group

        from adam_mpi.monitor import live_view

        run = status["run"]
        # The empty line: mpirun forwards whole lines only, and the view ends without an end of line.
        view = Group(live_view.run_line(run), live_view.by_role(status["groups"], run["staleness"]), "")
        self.live.update(view, refresh=True)

    def end(self, status: dict[str, Any]) -> None:
        """Print the line of a phase that is over; it stays."""
        self.say(plain(status["run"]))

    def close(self) -> None:
        """Remove the view from the terminal."""
        if self.live is not None:
            self.live.update("", refresh=True)
            self.live.stop()
            self.live = None

    def say(self, text: str) -> None:
        """Print `text` above the view."""
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def name(self, phase: Phase) -> str:
        """Return the name of `phase` for people."""
        return f"epoch {phase.epoch}/{self.epochs} {phase.part}" if phase.part != "test" else "test"


def plain(run: dict[str, Any]) -> str:
    """Return the line about the `run` part of a status, without control codes."""
    from adam_mpi.monitor import live_view

    text = "  ".join(f"{name} {value}" for name, value in live_view.figures(run).items())
    return f"{run['name']}  {run['share']:4.0%}  {text}"


def _live() -> "Live":
    from rich.console import Console
    from rich.live import Live

    live = Live("", console=Console(force_terminal=True), auto_refresh=False, redirect_stdout=False)
    live.start()
    return live
