"""The jobs of a sweep: every combination of the values, with every seed, run one after the other under mpirun."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from adam_mpi.base.errors import UserError
from adam_mpi.base.files import write_json


@dataclass(frozen=True)
class Point:
    """One run: its values and seed, and its run directory."""

    values: tuple[str, ...]
    """`section.key=value` of each key that is swept over."""
    seed: int
    run: Path

    @property
    def name(self) -> str:
        """Return the values and the seed of a point of the sweep as text."""
        return f"{' '.join(self.values)} seed={self.seed}"

    def arguments(self, base: Sequence[str]) -> list[str]:
        """Return the arguments of `train` for this run of the sweep, after those that all runs have."""
        settings = [word for pair in (*self.values, f"run.seed={self.seed}") for word in ("--set", pair)]
        return [*base, *settings, "--run", str(self.run), "--resume"]


def points(over: Sequence[str], seeds: int, folder: Path) -> list[Point]:
    """Return the runs of a sweep, all values with all seeds; seeds vary slowest: every value is soon tried once."""
    axes = [_settings_of_key(text) for text in over]
    return [
        Point(values, seed, folder / _file_name(values, seed))
        for seed in range(1, seeds + 1)
        for values in itertools.product(*axes)
    ]


def command_lines(points: Sequence[Point], base: Sequence[str]) -> str:
    """Return the arguments of each run of a sweep as a line for the shell, which a Slurm array's tasks read."""
    return "".join(shlex.join(point.arguments(base)) + "\n" for point in points)


def _settings_of_key(text: str) -> list[str]:
    """Return the settings of one key of a sweep: "consistency.staleness=0,1" has two; raise UserError for others."""
    key, equals, values = text.partition("=")
    if not equals or "." not in key or not all(values.split(",")):
        raise UserError(f"--over {text}: expected section.key=value,value, e.g. --over consistency.staleness=0,4,inf")
    if key == "run.seed":
        raise UserError("--over run.seed: give the number of seeds, e.g. --seeds 3")
    return [f"{key}={value}" for value in values.split(",")]


def _file_name(values: Sequence[str], seed: int) -> str:
    """Return the name of the run directory of `values` and `seed` in a sweep."""
    return re.sub(r"[^\w.=+-]+", "_", ",".join([*values, f"seed={seed}"]))


LIST = "jobs.txt"
"""File with the arguments of each job, a line for each."""
ABOUT = "sweep.json"
"""File with what is the same in all jobs of a sweep."""
LAST_LINES = 5
"""Lines of the output of a failed job that are shown."""
END_SECONDS = 20.0
"""How long an interrupted job may take to end after each signal."""
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train"


def prepare_sweep(folder: Path, points: Sequence[Point], base: Sequence[str], ranks: int) -> str:
    """Write the files that describe the sweep, and return the command for Slurm; raise UserError for a used folder."""
    if (given := other(folder, base, ranks)) is not None:
        raise UserError(f"{folder}: holds a sweep of other jobs ({given}); give another folder with -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; give another folder with -o") from None
    write_json(folder / ABOUT, {"arguments": list(base), "ranks": ranks})
    (folder / LIST).write_text(command_lines(points, base))
    return f"sbatch --array=1-{len(points)} --ntasks={ranks} slurm/train.sh @{folder / LIST}"


def other(folder: Path, base: Sequence[str], ranks: int) -> str | None:
    """Return the arguments of the sweep in `folder` if it has other jobs than these; else None."""
    if not (folder / ABOUT).exists():
        return None
    held = json.loads((folder / ABOUT).read_text())
    same = held == {"arguments": list(base), "ranks": ranks}
    return None if same else f"{shlex.join(held['arguments'])} -n {held['ranks']}"


def run_jobs(points: Sequence[Point], base: Sequence[str], ranks: int, launch: str | None) -> Iterator[str]:
    """Run the jobs of a sweep that are not done; yield a line for each as it ends."""
    for number, point in enumerate(points, 1):
        if done(point):
            continue
        output = point.run.with_name(point.run.name + ".txt")
        command = [*_launcher(ranks, launch), *point.arguments(base)]
        with output.open("w") as file:
            code = _run_one_job(command, file)
        outcome = "done" if done(point) else f"FAILED ({code}): {_last_lines(output)}"
        yield f"{number}/{len(points)} {point.name}: {outcome}"


def _run_one_job(command: Sequence[str], output: IO[str]) -> int:
    """Run a job of a sweep to its end; return its exit code. Ctrl-C or TERM of this process ends the job first."""
    handler = signal.signal(signal.SIGTERM, _interrupt)
    # A process group of its own, so that only this process interrupts it.
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    try:
        return job.wait()
    finally:
        signal.signal(signal.SIGTERM, handler)
        _end_job(job)


def _interrupt(number: int, frame: object) -> NoReturn:
    """Raise KeyboardInterrupt for a signal, so that a sweep ends its job."""
    raise KeyboardInterrupt


def _end_job(job: subprocess.Popen) -> None:
    """End a sweep's job that still runs: by signals, at last by SIGKILL, whatever further Ctrl-C comes."""
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
    """Return whether the sweep's run has its marker: mpirun can return 0 although its ranks were killed."""
    return (point.run / "DONE").exists()


def _launcher(ranks: int, launch: str | None) -> list[str]:
    """Return the command that starts a sweep's job: `launch`, the project's script in a source tree, or mpirun."""
    program = [sys.executable, "-m", "adam_mpi", "train"]
    if launch:
        return [*shlex.split(launch), *program]
    return [str(SCRIPT), "-n", str(ranks)] if SCRIPT.exists() else ["mpirun", "-n", str(ranks), *program]


def _last_lines(output: Path) -> str:
    """Return the path of the output of a sweep's job, and the last lines of it."""
    last = output.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
    return "\n    ".join([str(output), *last])
