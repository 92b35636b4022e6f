"""The commands of `adam-mpi` and `python -m adam_mpi`; each is one short function, and `train` is the default."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.cluster.report_once import launched_rank, print_line, print_once
from adam_mpi.options import parser

NO_CACHE = "no locator available"
"""Part of the message of numba when it finds no folder for what it compiles."""
WITHOUT_COMMAND = ("-h", "--help", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (of the process, by default) begin with; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0] not in COMMANDS and given[0] not in WITHOUT_COMMAND):
        given.insert(0, "train")
    options = parser({name: function.__doc__ or "" for name, function in COMMANDS.items()}).parse_args(given)
    try:
        code = COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except UserError as error:
        print_once(f"adam_mpi: {error}")
        return 2
    except RuntimeError as error:
        if NO_CACHE not in str(error):
            raise
        advice = "set ADAM_MPI_CACHE to a folder that can be written"
        print_once(f"adam_mpi: compiled kernels can be kept neither in {Path(__file__).parent} nor at home; {advice}")
        return 2
    except KeyboardInterrupt as interruption:
        if not launched_rank():
            print_line(f"adam_mpi: {interruption or 'interrupted'}")
        return 130
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed it; the last flush of Python must find an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def train(options: argparse.Namespace) -> int:
    """Train a network; started by mpirun with any number of ranks."""
    from adam_mpi.runtime import run

    return run.train_command(
        options.config,
        options.set,
        options.run,
        options.resume,
        minutes=options.max_minutes,
        take_over=options.take_over,
    )


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate trained weights on validation and test data; started by mpirun, each rank has a strip of the network."""
    from adam_mpi.inference.evaluate import evaluate_parts

    return evaluate_parts(Path(options.path), options.classes)


def plan(options: argparse.Namespace) -> int:
    """Print the roles, memory and traffic of a job without starting it."""
    from adam_mpi.planning.report import plan_text

    print(plan_text(config.load(options.config, options.set), options.ranks, options.hosts, options.images))
    return 0


def fetch(options: argparse.Namespace) -> int:
    """Download or copy a data set into the data folder."""
    from adam_mpi.data.fetch_and_pack import fetch_data_set
    from adam_mpi.data.sets import home

    fetch_data_set(options.name, options.source, home() / options.name)
    return 0


def pack(options: argparse.Namespace) -> int:
    """Write a data set as one chunked HDF5 file."""
    from adam_mpi.data.fetch_and_pack import pack_data_set

    print(pack_data_set(options.source, Path(options.output), options.size, options.on_bad))
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Print what is in a snapshot, a store, a file of weights or a run; exit with 1 if it is not intact."""
    from adam_mpi.checkpoint.inspect import inspect
    from adam_mpi.checkpoint.run_directory import compare_copies

    path = Path(options.path)
    if options.layers or options.image:
        return _inspect_model(options)
    text, whole = compare_copies(path, seconds=30.0) if options.copies else inspect(path)
    print(text)
    return 0 if whole else 1


def join(options: argparse.Namespace) -> int:
    """Join a running job as a new rank; the job itself starts this command."""
    from adam_mpi.runtime import run

    return run.join_command(Path(options.run))


def grow(options: argparse.Namespace) -> int:
    """Add ranks to a running job, if its launcher has slots for them."""
    from adam_mpi.checkpoint.run_directory import grow

    print(grow(Path(options.run), options.ranks))
    return 0


def _inspect_model(options: argparse.Namespace) -> int:
    """Print the layers of a trained network, or draw what they make of an image."""
    from adam_mpi.inference.trained import load
    from adam_mpi.report import layer_report

    model = load(options.path)
    if options.layers:
        print("\n".join(layer_report.layer_table(model)))
    if options.image:
        print(layer_report.image(model, options.image, options.output))
    return 0


def merge(options: argparse.Namespace) -> int:
    """Write a snapshot as one HDF5 file with a dataset per tensor."""
    from adam_mpi.checkpoint.model_file import merge_snapshot

    print(merge_snapshot(Path(options.path), Path(options.output)))
    return 0


def top(options: argparse.Namespace) -> int:
    """Show a running job rank by rank: which are slow, and which ranks they wait for."""
    from adam_mpi.monitor.live_view import top

    top(Path(options.run), options.once)
    return 0


def report(options: argparse.Namespace) -> int:
    """Write an HTML page about a run, or about several side by side."""
    from adam_mpi.report import write_report

    print(write_report(options.runs, options.output))
    return 0


def simulate(options: argparse.Namespace) -> int:
    """Predict throughput and staleness of a job on machines that a TOML file describes."""
    try:
        from adam_mpi.simulate.prediction import simulate
    except ModuleNotFoundError as error:
        raise UserError(f"simulate needs {error.name}; install it: pip install 'adam-mpi[simulate]'") from None

    print(simulate(Path(options.cluster), options.config, options.set))
    return 0


def predict(options: argparse.Namespace) -> int:
    """Print the classes of images, with probabilities."""
    from adam_mpi.inference.predict import predict_lines
    from adam_mpi.inference.trained import load

    for line in predict_lines(load(options.path), options.images, options.output):
        print(line)
    return 0


def export(options: argparse.Namespace) -> int:
    """Write a trained network for other programs."""
    from adam_mpi.inference.export import export
    from adam_mpi.inference.trained import load

    print(export(load(options.path), options.output, options.format))
    return 0


def import_(options: argparse.Namespace) -> int:
    """Convert the weights of another program to a file that training can start from."""
    from adam_mpi.inference.import_weights import import_weights

    print(import_weights(options.file, config.load(options.config, options.set), options.output))
    return 0


def models(options: argparse.Namespace) -> int:
    """List the ready configurations, or print one."""
    from adam_mpi.config import models

    print(models.find(options.name).read_text() if options.name else models.listing())
    return 0


def sweep(options: argparse.Namespace) -> int:
    """Train with every value of some keys, and recommend one; the same command resumes an interrupted sweep."""
    from adam_mpi.sweep.command import Sweep, sweep

    wanted = Sweep(
        config=options.config,
        settings=options.set,
        over=options.over,
        seeds=options.seeds,
        ranks=options.ranks,
        folder=options.output,
        target=options.target,
        launch=options.launch,
        only_table=options.table,
    )
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
