"""Training from Python: in a notebook, which is one rank, or in any MPI program, on all ranks of a communicator."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mpi4py import MPI

from adam_mpi.config import Given
from adam_mpi.inference.trained import Trained, load
from adam_mpi.runtime.run import run as run_job


def train(
    config: Given = None,
    *,
    set: Sequence[str] = (),
    run: str | Path | None = None,
    resume: bool = False,
    comm: MPI.Comm | None = None,
    take_over: bool = False,
) -> Trained:
    """Collective over `comm` (all ranks by default): train, and return the trained network on every rank.

    `config` is a TOML file, the name of a model, a dict of sections, or a `Config`; `set` has further keys, as in
    `set=["train.epochs=1"]`; `run` is the run directory, and `take_over` takes it away from a job that has
    it. Raises `UserError` where something is wrong with them.
    """
    with _signals_restored():
        directory = run_job(
            comm or MPI.COMM_WORLD, config, set, str(run) if run else None, resume, take_over=take_over, inside=True
        )
    return load(directory)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """A job catches signals; whoever called it wants its own handlers back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
