"""Whole jobs for benchmarks: started with the options of scripts/lib.sh, in a folder that is thrown away."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = '. "$0"; mpi_launch "$1" "$2"; shift 2; exec "${launch[@]}" "$@"'


def run(ranks: int, *settings: str, keep: str | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, metrics of the finished phases) of `mpirun -n RANKS python -m adam_mpi train` with these settings.

    `keep`: a folder that what the job leaves stays in.
    """
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert mpirun, "no mpirun beside this Python or on PATH"
    with tempfile.TemporaryDirectory() if keep is None else nullcontext(keep) as folder:
        words = [word for setting in settings for word in ("--set", setting)]
        program = [sys.executable, "-m", "adam_mpi", "train", "--run", f"{folder}/run", *words]
        command = ["bash", "-c", LAUNCH, ROOT / "scripts" / "lib.sh", mpirun, str(ranks), *program]
        job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)
        assert job.returncode == 0, job.stdout + job.stderr
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        return json.loads(Path(folder, "run", "summary.json").read_text()), [line for line in lines if line["done"]]


def under_mpi(ranks: int, *program: object, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """What `mpirun -n RANKS python PROGRAM` prints."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert mpirun, "no mpirun beside this Python or on PATH"
    words = [ROOT / "scripts" / "lib.sh", mpirun, ranks, sys.executable, *program]
    command = ["bash", "-c", LAUNCH, *map(str, words)]
    settings = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True, "timeout": 300}
    return subprocess.run(command, check=True, env={**os.environ, **environment}, **settings).stdout
