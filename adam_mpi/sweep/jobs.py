"""Run what is missing of a sweep, one job after the other; each is a process of its own under mpirun."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from adam_mpi.base.errors import UserError
from adam_mpi.base.files import write_json
from adam_mpi.sweep.points import Point, lines

LIST, ABOUT = "jobs.txt", "sweep.json"
LAST_LINES = 5
END_SECONDS = 20.0
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train"


def prepare(folder: Path, points: Sequence[Point], base: Sequence[str], ranks: int) -> str:
    """Note what the sweep is, and refuse a folder that holds another; returns the line for Slurm."""
    if (given := other(folder, base, ranks)) is not None:
        raise UserError(f"{folder}: holds a sweep of other jobs ({given}); give another folder with -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; give another folder with -o") from None
    write_json(folder / ABOUT, {"arguments": list(base), "ranks": ranks})
    (folder / LIST).write_text(lines(points, base))
    return f"sbatch --array=1-{len(points)} --ntasks={ranks} slurm/train.sh @{folder / LIST}"


def other(folder: Path, base: Sequence[str], ranks: int) -> str | None:
    """Return what the jobs of the sweep in a folder are given, where it holds one of other jobs than these."""
    if not (folder / ABOUT).exists():
        return None
    held = json.loads((folder / ABOUT).read_text())
    same = held == {"arguments": list(base), "ranks": ranks}
    return None if same else f"{shlex.join(held['arguments'])} -n {held['ranks']}"


def run(points: Sequence[Point], base: Sequence[str], ranks: int, launch: str | None) -> Iterator[str]:
    """A line for each job as it ends; those that are done already are left alone."""
    for number, point in enumerate(points, 1):
        if done(point):
            continue
        output = point.run.with_name(point.run.name + ".txt")
        command = [*_launcher(ranks, launch), *point.arguments(base)]
        with output.open("w") as file:
            code = _run(command, file)
        told = "done" if done(point) else f"FAILED ({code}): {_end(output)}"
        yield f"{number}/{len(points)} {point.name}: {told}"


def _run(command: Sequence[str], output: IO[str]) -> int:
    """Run a job to its end; return its exit code. What interrupts us (Ctrl-C, TERM) ends the job first."""
    handler = signal.signal(signal.SIGTERM, _interrupt)
    # A group of its own: it is interrupted once, by us.
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    try:
        return job.wait()
    finally:
        signal.signal(signal.SIGTERM, handler)
        _end_job(job)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _end_job(job: subprocess.Popen) -> None:
    """End a job that still runs, in order where it can; a second Ctrl-C does not leave it running either."""
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            if job.poll() is None:
                job.send_signal(number)
                job.wait(END_SECONDS)
    if job.poll() is None:
        with suppress(OSError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def done(point: Point) -> bool:
    """The marker tells: mpirun can return 0 although its ranks were killed."""
    return (point.run / "DONE").exists()


def _launcher(ranks: int, launch: str | None) -> list[str]:
    """As given; or the project's script, which knows the options of each MPI; or plain mpirun where it is installed."""
    program = [sys.executable, "-m", "adam_mpi", "train"]
    if launch:
        return [*shlex.split(launch), *program]
    return [str(SCRIPT), "-n", str(ranks)] if SCRIPT.exists() else ["mpirun", "-n", str(ranks), *program]


def _end(output: Path) -> str:
    """Where to read more, and the last lines of it."""
    last = output.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
    return "\n    ".join([str(output), *last])
