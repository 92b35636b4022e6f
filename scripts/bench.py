#!/usr/bin/env python3
"""Benchmarks: `scripts/bench.py NAME [--check] [options of the bench]` prints one JSON object per line.

Each bench is a module in scripts/benches/ with `arguments(parser)` and `measure(arguments)`, which yields the lines.
`--check` exits with 1 when a value misses its target.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

# One core against one core; the libraries look at this when they are loaded.
for library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

FOLDER = Path(__file__).parent / "benches"


def main() -> int:
    names = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a value misses its target")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    sys.path.insert(0, str(FOLDER))
    modules = {name: importlib.import_module(name) for name in names}
    for name, module in modules.items():
        bench = benches.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        bench.add_argument("--check", action="store_true", default=argparse.SUPPRESS)
        module.arguments(bench)
    arguments = parser.parse_args()
    missed = 0
    for line in modules[arguments.bench].measure(arguments):
        print(json.dumps({"bench": arguments.bench, **line}), flush=True)
        missed += line.get("target") is not None and line["value"] < line["target"]
    return int(arguments.check and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
