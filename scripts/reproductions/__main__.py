"""`scripts/reproduce NAME`: each reproduction is a module here with `reproduce(options)`, which yields lines to print,
`arguments(parser)`, and `page(folder)`, its part of docs/measurements/results.md."""

import argparse
import importlib
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("table1", "figures", "ddp", "speech", "clicks", "results")
# What the benchmarks share is used here too.
sys.path.append(str(HERE.parent / "benches"))

from adam_mpi.base.errors import UserError  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/reproduce", description="Repeats the paper's results.")
    choice = parser.add_subparsers(dest="name", required=True, metavar="|".join(NAMES))
    for name in NAMES:
        module = importlib.import_module(name)
        about = module.__doc__.replace("%", "%%")
        module.arguments(choice.add_parser(name, help=about, description=about))
    options = parser.parse_args()
    # As an exception: whoever has started a job ends it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for line in importlib.import_module(options.name).reproduce(options):
            print(line, flush=True)
    except UserError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
