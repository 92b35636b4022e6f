"""Results: a JSON file each, written whole or not at all; what is there is not made again."""

import argparse
import json
import math
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.base.files import write_json

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "results"


def arguments(parser: argparse.ArgumentParser) -> None:
    """What every reproduction is given."""
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so long; the same command goes on")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change jobs, to try it; needs -o"
    )
    parser.add_argument("-o", dest="folder", type=Path, default=FOLDER, help="folder of results (docs/results)")


@dataclass(frozen=True)
class Results:
    folder: Path

    def read(self, name: str) -> dict[str, Any]:
        """What is kept under a name; nothing if there is none."""
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def keep(self, name: str, result: dict[str, Any]) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{name}.json", result)
        return result


def results(options: argparse.Namespace, name: str, changed: bool = False) -> Results:
    """Those of one reproduction; what is `changed` from what it is to be must not lie among the real ones."""
    if (changed or options.set) and options.folder.resolve() == FOLDER:
        raise UserError("scaled down or changed: give another folder for these results with -o FOLDER")
    return Results(options.folder / name)


def commit_of(file: Path) -> str:
    """The commit that a file of this project is as in; a file that is not committed is an error."""
    told = _git("status", "--porcelain", "--", str(file))
    commit = _git("log", "-1", "--format=%H", "--", str(file))
    if told or not commit:
        raise UserError(f"{file.relative_to(ROOT)}: commit it first; a recipe is older than any look at the test set")
    return commit


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise UserError(f"git {words[0]}: {done.stderr.strip()}; results are kept in a clone of the project")
    return done.stdout.strip()


def heading(title: str, *commands: str) -> Iterator[str]:
    """Of a part of docs/measurements/results.md: what it is, and how it is repeated."""
    yield f"## {title}"
    yield ""
    yield from (f"    scripts/reproduce {command}" for command in commands)
    yield ""


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield `rows`, of which the first is the header, as a table of Markdown."""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |"
        if not number:
            yield f"| {' | '.join('---' for _ in row)} |"
    yield ""


def not_run() -> Iterator[str]:
    yield "Not run yet."
    yield ""


@dataclass(frozen=True)
class Clock:
    """The time that a reproduction may take."""

    end: float

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Clock":
        return cls(time.monotonic() + 60 * options.minutes)

    @property
    def minutes(self) -> float:
        return (self.end - time.monotonic()) / 60

    @property
    def over(self) -> bool:
        """No job is begun for less than some seconds."""
        return self.minutes < 0.1
