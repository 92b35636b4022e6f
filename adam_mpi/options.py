"""The options of each command; `cli.py` has what the commands do."""

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import adam_mpi
from adam_mpi import config
from adam_mpi.cluster.report_once import launched_rank, print_once
from adam_mpi.config.models import names

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class _Parser(argparse.ArgumentParser):
    """A parser whose errors and help only one rank prints: under mpirun every rank has the same arguments."""

    def error(self, message: str) -> NoReturn:
        """Print the `message` about wrong options from one rank, and exit with 2."""
        print_once(f"adam_mpi: {message}; what is allowed: python -m {self.prog} --help")
        sys.exit(2)

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the help of the options from one rank."""
        if not launched_rank():
            super().print_help(file)


class _Version(argparse.Action):
    """Print the version of the package from one rank; the package's metadata is read only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the version, and exit with 0."""
        if not launched_rank():
            print(f"adam-mpi {adam_mpi.__version__}")
        parser.exit()


class _KeysHelp(argparse.HelpFormatter):
    """Help that ends with the configuration keys, which are collected only when it is printed."""

    def format_help(self) -> str:
        """Return the help with the configuration keys at its end."""
        return f"{super().format_help()}\n{_keys()}\n"


def parser(commands: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of the options of `commands`, which map the name of each command to a sentence about it."""
    made = _Parser(prog="adam_mpi", description="Without a command, `train` is run.")
    made.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    choice = made.add_subparsers(dest="command", required=True)
    for name, sentence in commands.items():
        OPTIONS[name](choice.add_parser(name, help=sentence, description=sentence))
    return made


def _config(command: argparse.ArgumentParser) -> None:
    """Add the options of the configuration to `command`."""
    command.formatter_class = _KeysHelp
    command.add_argument("config", nargs="?", help="TOML file, or the name of a ready one (see models)")
    command.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="set a key")


def _output(command: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add -o to `command`; it is required where there is no `default`."""
    text = f"default: {default}" if default else "the file to write"
    given = Path(default) if default else None
    command.add_argument("-o", dest="output", type=Path, metavar="FILE", required=not default, default=given, help=text)


def _weights(command: argparse.ArgumentParser) -> None:
    """Add the options that name trained weights to `command`."""
    command.add_argument("path", help="a run directory, a snapshot or a file of weights")


def _train(command: argparse.ArgumentParser) -> None:
    _config(command)
    command.add_argument("--run", metavar="DIR", help="run directory (default: runs/NAME)")
    command.add_argument("--resume", action="store_true", help="continue the run that the directory holds")
    command.add_argument("--take-over", action="store_true", help="take the run directory away from a job that has it")
    command.add_argument(
        "--max-minutes", type=float, default=math.inf, metavar="M", help="take a snapshot and stop after M minutes"
    )


def _evaluate(command: argparse.ArgumentParser) -> None:
    _weights(command)
    command.add_argument("--classes", action="store_true", help="also the accuracy and the errors of each class")


def _plan(command: argparse.ArgumentParser) -> None:
    _config(command)
    command.add_argument("-n", dest="ranks", type=int, required=True, help="number of ranks")
    command.add_argument("--hosts", metavar="4x16", help="hosts x ranks per host (default: one host)")
    command.add_argument(
        "--images", metavar="3x256x256:1000", help="images and classes to plan for, instead of those of a data set"
    )


def _simulate(command: argparse.ArgumentParser) -> None:
    command.add_argument("cluster", help="TOML file: hosts, links, stragglers, costs")
    _config(command)


def _fetch(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", help="mnist or fashion")
    command.add_argument("--from", dest="source", metavar="DIR|URL", help="take the files from here")


def _pack(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", help="name or path of a data set, as in data.set")
    command.add_argument("--size", type=int, default=0, help="side that images of a folder are scaled to")
    command.add_argument("--on-bad", choices=("stop", "skip"), default="stop", help="what to do with a bad image")
    _output(command)


def _inspect(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", help="a run directory, a snapshot, a store or a file of weights")
    command.add_argument("--copies", action="store_true", help="compare all copies of a run's shards, live")
    command.add_argument("--layers", action="store_true", help="shapes, statistics and histograms, by layer")
    command.add_argument("--image", type=Path, metavar="FILE", help="draw what each layer makes of this image")
    _output(command, "activations.png")


def _grow(command: argparse.ArgumentParser) -> None:
    command.add_argument("ranks", type=int, help="number of ranks to add")
    command.add_argument("run", help="run directory")


def _join(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="run directory; the job sends everything else through MPI")


def _merge(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", help="a snapshot, or a run directory, of which the newest snapshot is taken")
    _output(command)


def _report(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories, or folders of sweeps")
    _output(command, "report.html")


def _top(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="its run directory")
    command.add_argument("--once", action="store_true", help="show it once, and exit")


def _predict(command: argparse.ArgumentParser) -> None:
    _weights(command)
    command.add_argument("images", type=Path, nargs="+", help="images, folders of images, npz files")
    command.add_argument("-o", dest="output", type=Path, metavar="FILE", help="npz file for all probabilities")


def _export(command: argparse.ArgumentParser) -> None:
    _weights(command)
    command.add_argument("--format", choices=("onnx", "safetensors", "npz"), help="default: the file's ending")
    _output(command)


def _import(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, help="a .safetensors, .npz, .pt or .pth file")
    _config(command)
    _output(command)


def _models(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", nargs="?", choices=names(), metavar="NAME", help="print its TOML")


def _sweep(command: argparse.ArgumentParser) -> None:
    _config(command)
    pairs = "SECTION.KEY=VALUE,VALUE"
    command.add_argument("--over", action="append", required=True, metavar=pairs, help="values to try; may be repeated")
    command.add_argument("--seeds", type=int, default=1, help="runs of each value (default: 1)")
    command.add_argument("-n", dest="ranks", type=int, default=4, help="ranks of a job (default: 4)")
    command.add_argument("-o", dest="output", type=Path, metavar="DIR", help="folder (runs/sweep-KEY, or -2 ...)")
    command.add_argument("--target", type=float, help="value of train.monitor to reach (train.target, or the median)")
    example = "mpirun --host localhost:4 --bind-to none -n 4"
    command.add_argument("--launch", metavar="COMMAND", help=f"what starts a job, e.g. '{example}'")
    command.add_argument("--table", action="store_true", help="train nothing, show the table of what is done")


OPTIONS = {
    "train": _train,
    "eval": _evaluate,
    "plan": _plan,
    "simulate": _simulate,
    "fetch": _fetch,
    "pack": _pack,
    "inspect": _inspect,
    "merge": _merge,
    "grow": _grow,
    "join": _join,
    "report": _report,
    "top": _top,
    "predict": _predict,
    "export": _export,
    "import": _import,
    "models": _models,
    "sweep": _sweep,
}


def _keys() -> str:
    """Return the configuration keys with their defaults and sentences, for the help text."""
    rows = []
    for key, default, sentence in config.documentation():
        shown = "(the paper's MNIST network)" if key == "model.layers" else default
        rows.append(f"  {key} = {shown}\n      {sentence}")
    return "configuration keys and their defaults:\n" + "\n".join(rows)
