"""Training jobs: each in a run directory named by what it is, so that the same job goes on where it was cut."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _child
import tomli_w
from _results import FOLDER, ROOT, Clock

from adam_mpi.base.errors import UserError
from adam_mpi.sweep import table

LAST_LINES = 8
HOSTS = ROOT / "scripts" / "hosts"
Hosts = tuple[int, str, int]
"""How many, how much each sends, and cores that each has: (2, "1gbit", 1)."""


@contextmanager
def made(hosts: Hosts | None) -> Iterator[dict[str, str]]:
    """Test hosts for a while: what a job's environment has to say to run on them."""
    if hosts is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as lab:
        count, rate, cores = hosts
        words = [str(count), "--rate", rate, "--cores", str(cores)]
        subprocess.run([HOSTS, "up", lab, *words], check=True, timeout=60)
        try:
            yield {"ADAM_MPI_HOSTS": lab}
        finally:
            subprocess.run([HOSTS, "down", lab], check=True, timeout=60)


@dataclass(frozen=True)
class Run:
    """A job that is done."""

    path: Path

    @property
    def summary(self) -> dict[str, Any]:
        """Paths of its command as seen from this project's root: results are read elsewhere."""
        told = json.loads((self.path / "summary.json").read_text())
        origin = told["provenance"]
        origin["command"] = [word.removeprefix(f"{ROOT}/") for word in origin["command"]]
        return told

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Seconds and validation accuracy, epoch by epoch."""
        return table.read_outcome(self.path).curve


@dataclass(frozen=True)
class Training:
    results: Path
    """The folder that results go to: those of this project have their runs in its `runs`."""
    clock: Clock
    made: set[Path] = field(default_factory=set)
    """Runs of this call."""

    def run(
        self, recipe: Mapping[str, Any], settings: Sequence[str] = (), ranks: int = 4, hosts: Hosts | None = None
    ) -> Run | None:
        """A training job, on test hosts where they are given; None when time was up first. Raises where it fails."""
        if self.clock.over:
            return None
        what = json.dumps([recipe, list(settings), ranks, hosts], sort_keys=True)
        path = self.runs / hashlib.sha256(what.encode()).hexdigest()[:12]
        if path not in self.made:
            # A run that was done before is asked for again because its result was thrown away.
            if (path / "DONE").exists():
                shutil.rmtree(path)
            with made(hosts) as environment:
                self._start(path, recipe, settings, ranks, environment)
            self.made.add(path)
        return Run(path) if (path / "DONE").exists() else None

    @property
    def runs(self) -> Path:
        return ROOT / "runs" / "reproduce" if self.results.resolve() == FOLDER else self.results / "runs"

    def _start(
        self, path: Path, recipe: Mapping[str, Any], settings: Sequence[str], ranks: int, environment: dict[str, str]
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        config, output = path.with_suffix(".toml"), path.with_suffix(".txt")
        config.write_text(tomli_w.dumps(recipe))
        words = [word for setting in settings for word in ("--set", setting)]
        limit = [] if math.isinf(self.clock.end) else ["--max-minutes", f"{self.clock.minutes:.2f}"]
        (path / "STOPPED").unlink(missing_ok=True)
        command = [ROOT / "scripts" / "train", "-n", str(ranks), config, *words, "--run", path, "--resume", *limit]
        with output.open("w") as file:
            _child.run(command, cwd=ROOT, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT)
        if not (path / "DONE").exists() and not (path / "STOPPED").exists():
            last = "\n  ".join(output.read_text(errors="replace").strip().splitlines()[-LAST_LINES:])
            raise UserError(f"a job failed; {output}:\n  {last}")
