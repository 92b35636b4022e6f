"""How much training a job with losses gets done: a rank is killed every so often, against the same job undisturbed.

`goodput`: images of acknowledged pushes per second, of the disturbed job against the undisturbed one. The undisturbed
job runs in two halves, before and after the other, so that a machine that becomes slower or faster counts for neither.
Kills take roles in a random order, each as often as the layout has it, the head too. `stall`: seconds without an
acknowledged push per kill. `spawn`: seconds from the order for a new rank until it is ready to join.
`newcomer_cpu`: what it has computed until then.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from _jobs import LAUNCH, ROOT

SETTINGS = ("layout.servers=3", "train.epochs=100000", "observe.interval=0.5")
START_SECONDS, END_SECONDS = 180.0, 60.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=300.0, help="of each of the two jobs")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--spares", type=int, default=1, help="recover.spares; less than 0: nobody replaces the lost")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the kills")
    parser.add_argument("--set", action="append", default=[], help="further settings of both jobs")
    parser.add_argument("--keep", type=Path, help="a folder that the run directories stay in")


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    first = _play(arguments, "before", arguments.seconds / 2)
    disturbed = _play(arguments, "disturbed", arguments.seconds, _Killer(arguments))
    last = _play(arguments, "after", arguments.seconds / 2)
    undisturbed, killer, losses = mean([first.rate, last.rate]), disturbed.killer, disturbed.summary["recoveries"]
    yield {"name": "goodput", "value": round(disturbed.rate / undisturbed, 4), "unit": "x", "target": 0.85}
    yield {"name": "kills", "value": len(killer.killed), "unit": "", "roles": killer.roles}
    yield {"name": "undisturbed", "value": round(undisturbed), "unit": "images/s", "halves": [first.rate, last.rate]}
    yield {"name": "stall", "value": round(_stall(losses, killer.killed), 3), "unit": "s", "generations": len(losses)}
    started = disturbed.summary["started"]
    for name, key in (("spawn", "seconds"), ("newcomer_cpu", "cpu")):
        yield {"name": name, "value": round(mean([word[key] for word in started] or [0.0]), 2), "unit": "s"}
    yield {"name": "ranks_at_the_end", "value": disturbed.summary["ranks"]["total"], "unit": ""}


class _Killer:
    """Kills a rank every so many seconds, beginning after half of that, so that no recovery is cut off by the end."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.every, self.random = arguments.every, random.Random(arguments.seed)
        self.until = arguments.seconds - arguments.every / 4
        self.bag: list[str] = []
        self.killed: list[float] = []
        self.roles: list[str] = []

    def look(self, run: Path, family: list[psutil.Process], seconds: float) -> None:
        if (len(self.killed) + 0.5) * self.every < min(seconds, self.until):
            rows, running = _read(run / "status.json")["ranks"], _ranks(run, family)
            if not rows or not running:
                return
            self.bag = self.bag or self.random.sample(every := [row["role"] for row in rows], len(every))
            role = self.bag.pop()
            candidates = sorted({row["rank"] for row in rows if row["role"] == role} & set(running))
            victim = self.random.choice(candidates or sorted(running))
            self.killed.append(time.time())
            self.roles.append(role)
            running[victim].kill()


class _Play:
    """A job that has run: images per second of the part that counts, its summary, and who killed its ranks."""

    def __init__(self, rate: float, summary: dict[str, Any], killer: _Killer | None) -> None:
        self.rate, self.summary, self.killer = rate, summary, killer


def _play(arguments: argparse.Namespace, name: str, seconds: float, killer: _Killer | None = None) -> _Play:
    """Run the job from its first trained image for so many seconds, then stop it in order."""
    folder = arguments.keep / name if arguments.keep else Path(tempfile.mkdtemp(prefix="adam_mpi-goodput-"))
    run = folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output").open("w") as output:
        # A session of its own: whoever interrupts us ends it below.
        job = subprocess.Popen(
            _command(arguments, run),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _until(job, lambda: _line(run), START_SECONDS, f"the first image, see {folder}")
        first, began = _line(run), time.monotonic()
        while time.monotonic() - began < seconds:
            assert job.poll() is None, f"the job has ended early: {(folder / 'output').read_text()}"
            if killer is not None:
                killer.look(run, psutil.Process(job.pid).children(recursive=True), time.monotonic() - began)
            time.sleep(0.1)
        last = _line(run)
        (run / "STOP").touch()
        _until(job, lambda: (run / "STOPPED").exists(), END_SECONDS, f"the end, see {folder}")
        job.wait(END_SECONDS)
        rate = (last["images_trained"] - first["images_trained"]) / (last["seconds"] - first["seconds"])
        return _Play(round(rate, 1), _read(run / "summary.json"), killer)
    finally:
        _end(job)
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _command(arguments: argparse.Namespace, run: Path) -> list[str]:
    """Both jobs are the same: they have the same spares, of which the undisturbed one needs none."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert mpirun, "no mpirun beside this Python or on PATH"
    spares = [] if arguments.spares < 0 else ["recover.respawn=true", f"recover.spares={arguments.spares}"]
    words = [word for setting in (*SETTINGS, *spares, *arguments.set) for word in ("--set", setting)]
    slots = ["--host", f"localhost:{2 * arguments.ranks + max(arguments.spares, 0)}"]
    program = [*slots, sys.executable, "-m", "adam_mpi", "train", "--run", str(run), *words]
    return ["bash", "-c", LAUNCH, str(ROOT / "scripts" / "lib.sh"), mpirun, str(arguments.ranks), *program]


def _line(run: Path) -> dict[str, Any] | None:
    """The newest line of the metrics that counts images; whoever wrote the last may have been killed over it."""
    path = run / "metrics.jsonl"
    for line in reversed(path.read_text().splitlines() if path.exists() else []):
        with suppress(ValueError):
            if (told := json.loads(line))["images_trained"]:
                return told
    return None


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _until(job: subprocess.Popen, happened: Callable[[], object], seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not happened():
        assert job.poll() is None and time.monotonic() < limit, f"the job did not get to {what}"
        time.sleep(0.05)


def _ranks(run: Path, family: list[psutil.Process]) -> dict[int, psutil.Process]:
    """The processes that are ranks now, by their number for life: those that write the log of one."""
    found = {}
    for process in family:
        try:
            files = [Path(file.path) for file in process.open_files()]
        except psutil.Error:
            continue
        logs = [file for file in files if file.parent == run.resolve() / "log" and file.name.startswith("rank-")]
        found |= {int(log.stem.removeprefix("rank-")): process for log in logs}
    return found


def _stall(losses: list[dict[str, Any]], killed: list[float]) -> float:
    """Seconds in which nothing was applied, per kill: until a loss is seen and from then on, and while ranks join."""
    seen = {number: loss["detected"] for number, loss in enumerate(losses) if loss["members"]}
    before = sum(min((at - kill for at in seen.values() if at >= kill), default=0.0) for kill in killed)
    return (before + sum(loss["seconds"] or 0.0 for loss in losses)) / max(len(killed), 1)


def _end(job: subprocess.Popen) -> None:
    """mpirun and whatever it has started, if something went wrong."""
    if job.poll() is not None:
        return
    family = psutil.Process(job.pid).children(recursive=True)
    job.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(family, timeout=5)
    for process in left:
        process.kill()
    job.kill()
    job.wait(10)
