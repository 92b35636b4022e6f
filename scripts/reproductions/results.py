"""Writes docs/measurements/results.md from the files in docs/results."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

import figures
from _results import FOLDER, ROOT, table

PAGE = ROOT / "docs" / "measurements" / "results.md"
PARTS = ("table1", "figures", "ddp", "speech", "clicks")
HEAD = """# Results

The paper's results beside ours. Made by `scripts/reproduce results` from the JSON files in `docs/results`; each part
has the command that makes its files. What has not been run is not here, or says so. Every command runs only what is
missing, and goes on where it was cut.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", dest="folder", type=Path, default=FOLDER, help="folder of results (docs/results)")


def reproduce(options: argparse.Namespace) -> Iterator[str]:
    file = PAGE if options.folder.resolve() == FOLDER else options.folder / PAGE.name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(options.folder))
    yield f"written: {file}"


def page(folder: Path) -> str:
    lines = [line for part in PARTS for line in importlib.import_module(part).page(folder)]
    return "\n".join([HEAD, *lines, *_provenance(folder)]).rstrip() + "\n"


def _provenance(folder: Path) -> Iterator[str]:
    """Where the figures come from: how they were made, at which commit, on which machine, beside what."""
    rows = list(figures.provenance(folder))
    if rows:
        yield "## Where the figures come from"
        yield ""
        yield from table([["figure", "made by", "commit", "machine", "other programs"], *rows])
