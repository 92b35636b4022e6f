"""The commands of `python -m adam_mpi`; each is one short function. `train` is meant where none is named."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from adam_mpi import config
from adam_mpi.errors import UserError
from adam_mpi.models import names


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0] not in COMMANDS and given[0] not in ("-h", "--help")):
        given.insert(0, "train")
    options = _parser().parse_args(given)
    try:
        code = COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"adam_mpi: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever reads the output, such as `head`, has seen enough; Python's own last flush must find an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def train(options: argparse.Namespace) -> int:
    """Train a network; started by mpirun with any number of ranks."""
    from adam_mpi import run

    return run.train(options.config, options.set, options.run, options.resume, options.max_minutes)


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate the final weights of a run on its test set."""
    from adam_mpi.evaluate import evaluate

    print(evaluate(Path(options.run)))
    return 0


def plan(options: argparse.Namespace) -> int:
    """Print who would do what, and how much of it, without MPI."""
    from adam_mpi.plan import plan

    print(plan(config.load(options.config, options.set), options.ranks, options.hosts, options.images))
    return 0


def fetch(options: argparse.Namespace) -> int:
    """Get a data set into the data folder."""
    from adam_mpi.data.fetch import fetch
    from adam_mpi.data.sets import home

    fetch(options.name, options.source, home() / options.name)
    return 0


def pack(options: argparse.Namespace) -> int:
    """Write a data set as one chunked HDF5 file."""
    from adam_mpi.data.pack import pack

    print(pack(options.source, Path(options.output), options.size, options.on_bad))
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Tell what is in a snapshot, a store, a file of weights or a run; exit code 1 if it is not whole."""
    from adam_mpi.durable.inspect import inspect
    from adam_mpi.observe.rundir import compare_copies

    path = Path(options.path)
    if options.layers or options.image:
        return _look_into(options)
    text, whole = compare_copies(path, seconds=30.0) if options.copies else inspect(path)
    print(text)
    return 0 if whole else 1


def join(options: argparse.Namespace) -> int:
    """Join a running job; the job itself starts this."""
    from adam_mpi import run

    return run.join()


def grow(options: argparse.Namespace) -> int:
    """Have a running job take in more ranks, where its launcher has places for them."""
    from adam_mpi.observe.rundir import grow

    print(grow(Path(options.run), options.ranks))
    return 0


def _look_into(options: argparse.Namespace) -> int:
    from adam_mpi.observe import layers
    from adam_mpi.trained import load

    model = load(options.path)
    if options.layers:
        print("\n".join(layers.table(model)))
    if options.image:
        print(layers.image(model, options.image, options.output))
    return 0


def merge(options: argparse.Namespace) -> int:
    """Write a snapshot as one HDF5 file with a dataset per tensor."""
    from adam_mpi.durable.merge import merge

    print(merge(Path(options.path), Path(options.output)))
    return 0


def top(options: argparse.Namespace) -> int:
    """Show a running job rank by rank: who is slow, who waits for whom."""
    from adam_mpi.observe.top import top

    top(Path(options.run), options.once)
    return 0


def report(options: argparse.Namespace) -> int:
    """Write one page about a run, or about several side by side."""
    from adam_mpi.observe.report import report

    print(report(options.runs, options.output))
    return 0


def simulate(options: argparse.Namespace) -> int:
    """Predict throughput and staleness of a job on machines described in a TOML file."""
    from adam_mpi.simulate.prediction import simulate

    print(simulate(Path(options.cluster), options.config, options.set))
    return 0


def predict(options: argparse.Namespace) -> int:
    """Tell the classes of images, with probabilities."""
    from adam_mpi.predict import predict
    from adam_mpi.trained import load

    for line in predict(load(options.path), options.images, options.output):
        print(line)
    return 0


def export(options: argparse.Namespace) -> int:
    """Write a trained network for other programs."""
    from adam_mpi.export import export
    from adam_mpi.trained import load

    print(export(load(options.path), options.output, options.format))
    return 0


def import_(options: argparse.Namespace) -> int:
    """Make a file of weights to begin with out of another program's."""
    from adam_mpi.export.foreign import import_weights

    print(import_weights(options.file, config.load(options.config, options.set), options.output))
    return 0


def models(options: argparse.Namespace) -> int:
    """List the ready configurations, or print one."""
    from adam_mpi import models

    print(models.find(options.name).read_text() if options.name else models.listing())
    return 0


def sweep(options: argparse.Namespace) -> int:
    """Train with every value of some keys, and tell which to take; the same command goes on where it was cut."""
    from adam_mpi.sweep.command import Sweep, sweep

    wanted = Sweep(
        options.config, options.set, options.over, options.seeds, options.ranks, options.output, options.target,
        options.launch, options.table,
    )  # fmt: skip
    failed = False
    for line in sweep(wanted):
        print(line, flush=True)
        failed |= ": FAILED (" in line
    return 1 if failed else 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": train,
    "eval": evaluate,
    "plan": plan,
    "fetch": fetch,
    "pack": pack,
    "inspect": inspect,
    "merge": merge,
    "grow": grow,
    "join": join,
    "top": top,
    "report": report,
    "predict": predict,
    "export": export,
    "import": import_,
    "models": models,
    "sweep": sweep,
    "simulate": simulate,
}


# A rank's number as launchers give it, before MPI is up.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class _Parser(argparse.ArgumentParser):
    """Under mpirun every rank has the same mistake to report; one does."""

    def error(self, message: str) -> NoReturn:
        rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
        if rank != "0":
            sys.exit(2)
        super().error(message)


class _KeysHelp(argparse.HelpFormatter):
    """Help that ends with the configuration keys; they are put together only when it is asked for."""

    def format_help(self) -> str:
        return f"{super().format_help()}\n{_keys()}\n"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="adam_mpi", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    made = {
        name: commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        for name, function in COMMANDS.items()
    }
    made["simulate"].add_argument("cluster", help="TOML file: hosts, links, stragglers, costs")
    made["import"].add_argument("file", type=Path, help="a .safetensors, .npz, .pt or .pth file")
    for name in ("train", "plan", "import", "simulate", "sweep"):
        made[name].formatter_class = _KeysHelp
        made[name].add_argument("config", nargs="?", help="TOML file, or the name of a ready one (see models)")
        made[name].add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="set a key")
    made["train"].add_argument("--run", metavar="DIR", help="run directory (default: runs/NAME)")
    made["train"].add_argument("--resume", action="store_true", help="go on from what the run directory holds")
    made["train"].add_argument(
        "--max-minutes", type=float, default=math.inf, metavar="M", help="take a snapshot and stop after so long"
    )
    made["plan"].add_argument("-n", dest="ranks", type=int, required=True, help="number of ranks")
    made["plan"].add_argument("--hosts", metavar="4x16", help="hosts x ranks per host (default: one host)")
    made["plan"].add_argument(
        "--images", metavar="3x256x256:1000", help="plan for such images and classes instead of those of a data set"
    )
    made["eval"].add_argument("run", help="run directory")
    made["fetch"].add_argument("name", help="mnist or fashion")
    made["fetch"].add_argument("--from", dest="source", metavar="DIR|URL", help="take the files from here")
    made["pack"].add_argument("source", help="name or path of a data set, as in data.set")
    made["pack"].add_argument("-o", dest="output", metavar="FILE", required=True, help="the HDF5 file to write")
    made["pack"].add_argument("--size", type=int, default=0, help="side that images of a folder are scaled to")
    made["pack"].add_argument("--on-bad", choices=("stop", "skip"), default="stop", help="what a bad image does")
    made["inspect"].add_argument("--copies", action="store_true", help="compare all copies of a run's shards, live")
    made["inspect"].add_argument("path", help="a run directory, a snapshot, a store or a file of weights")
    made["grow"].add_argument("ranks", type=int, help="how many")
    made["grow"].add_argument("run", help="run directory")
    made["inspect"].add_argument("--layers", action="store_true", help="shapes, statistics and histograms, by layer")
    made["inspect"].add_argument("--image", type=Path, metavar="FILE", help="draw what each layer makes of this image")
    made["inspect"].add_argument(
        "-o", dest="output", type=Path, metavar="FILE", default=Path("activations.png"), help="default: activations.png"
    )
    made["merge"].add_argument("path", help="a snapshot, or a run directory, whose newest one is taken")
    made["merge"].add_argument("-o", dest="output", metavar="FILE", required=True, help="the HDF5 file to write")
    made["report"].add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    made["report"].add_argument(
        "-o", dest="output", type=Path, metavar="FILE", default=Path("report.html"), help="default: report.html"
    )
    made["top"].add_argument("run", help="its run directory")
    made["top"].add_argument("--once", action="store_true", help="show it once, and end")
    for name in ("predict", "export"):
        made[name].add_argument("path", help="a run directory, a snapshot or a file of weights")
    made["predict"].add_argument("images", type=Path, nargs="+", help="images, folders of images, npz files")
    made["predict"].add_argument("-o", dest="output", type=Path, metavar="FILE", help="npz file for all probabilities")
    made["export"].add_argument("--format", choices=("onnx", "safetensors", "npz"), help="default: the file's ending")
    for name in ("export", "import"):
        made[name].add_argument("-o", dest="output", type=Path, metavar="FILE", required=True, help="the file to write")
    made["models"].add_argument("name", nargs="?", choices=names(), metavar="NAME", help="print its TOML")
    _add_sweep(made["sweep"])
    return parser


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    pairs = "SECTION.KEY=VALUE,VALUE"
    parser.add_argument("--over", action="append", required=True, metavar=pairs, help="values to try; may be repeated")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each value (default: 1)")
    parser.add_argument("-n", dest="ranks", type=int, default=4, help="ranks of a job (default: 4)")
    parser.add_argument("-o", dest="output", type=Path, metavar="DIR", help="folder of the runs (runs/sweep-KEY)")
    parser.add_argument("--target", type=float, help="validation accuracy to reach (train.target, or the median)")
    parser.add_argument("--launch", metavar="COMMAND", help="what starts a job, e.g. 'mpirun --bind-to none -n 4'")
    parser.add_argument("--table", action="store_true", help="train nothing, show the table of what is done")


def _keys() -> str:
    """The configuration keys with their defaults, for the help text."""
    rows = []
    for key, default, sentence in config.documentation():
        shown = "(the paper's MNIST network)" if key == "model.layers" else default
        rows.append(f"  {key} = {shown}\n      {sentence}")
    return "configuration keys and their defaults:\n" + "\n".join(rows)
