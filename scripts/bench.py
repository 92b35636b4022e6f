#!/usr/bin/env python3
"""Benchmarks: `scripts/bench.py NAME [--check] [options of the bench]` prints one JSON object per line.

Each bench is a module in scripts/benches/ with `measure(arguments)`, which yields the lines, and where it has options
of its own `arguments(parser)`.
`--check` exits with 1 when a value misses its target.
"""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

# One core against one core; the libraries look at this when they are loaded.
for library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

FOLDER = Path(__file__).parent / "benches"
HOME = Path(__file__).resolve().parents[1] / ".venv"


def main() -> int:
    # Called without an environment: the one that scripts/test has made.
    if importlib.util.find_spec("adam_mpi") is None and HOME.exists() and "ADAM_MPI_BENCH" not in os.environ:
        python = str(HOME / "bin" / "python")
        os.execve(python, [python, *sys.argv], os.environ | {"ADAM_MPI_BENCH": "home"})
    names = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=names)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a value misses its target")
    sys.path.insert(0, str(FOLDER))
    name = next((word for word in sys.argv[1:] if word in names), None)
    module = importlib.import_module(name) if name else None
    if module is not None and hasattr(module, "arguments"):
        module.arguments(parser)
    arguments = parser.parse_args()
    missed = 0
    for line in module.measure(arguments):
        print(json.dumps({"bench": arguments.bench, **line}), flush=True)
        missed += _misses(line)
    return int(arguments.check and missed > 0)


def _misses(line: dict) -> bool:
    """A target is a least value, or with `most` a largest one."""
    if line.get("target") is None:
        return False
    return line["value"] > line["target"] if line.get("most") else line["value"] < line["target"]


if __name__ == "__main__":
    sys.exit(main())
