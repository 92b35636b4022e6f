"""Train from Python: in a notebook, which is one rank, or in any MPI program, on all ranks of a communicator."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from mpi4py import MPI

from adam_mpi.base.errors import UserError
from adam_mpi.config import Given
from adam_mpi.inference.trained import Trained, load
from adam_mpi.model.frontends import graph_json
from adam_mpi.model.graph import Graph
from adam_mpi.runtime.run import run_job

Overrides = Sequence[str] | Mapping[str, Any]
"""`["train.epochs=1"]` or `{"train.epochs": 1}`."""


def train(
    config: Given = None,
    *,
    model: Graph | None = None,
    overrides: Overrides = (),
    run: str | Path | None = None,
    resume: bool = False,
    comm: MPI.Comm | None = None,
    take_over: bool = False,
) -> Trained:
    """Train a network, and return it on every rank; collective over `comm`.

    Parameters
    ----------
    config : str, pathlib.Path, dict or Config, optional
        A TOML file, the name of a ready model, a dict of sections, or a `Config`; the defaults train the network of
        the paper on generated digits.
    model : Graph, optional
        A model that `adam_mpi.nn` built, in place of the layers in the configuration.
    overrides : sequence of str or dict, optional
        Keys to set besides, as ``["train.epochs=1"]`` or ``{"train.epochs": 1}``.
    run : str or pathlib.Path, optional
        Run directory; by default `runs/` and the name in the configuration.
    resume : bool, default False
        Continue the run that the directory holds.
    comm : mpi4py.MPI.Comm, optional
        The ranks that train; all ranks by default.
    take_over : bool, default False
        Take the run directory away from a job that has it.

    Returns
    -------
    Trained
        The trained network, read from the run directory.

    Raises
    ------
    UserError
        If the configuration, the data or the run directory cannot be used.

    Notes
    -----
    With one rank, an exception of the job is raised here. With several ranks, a job that fails later ends all its
    processes. Signal handlers of the program are restored when it returns.

    Examples
    --------
    >>> import adam_mpi
    >>> model = adam_mpi.train(
    ...     {"data": {"images": 640}, "kernels": {"engine": "reference"}},
    ...     overrides={"train.epochs": 1, "model.layers": [{"kind": "dense", "units": 10}]},
    ...     run="runs/small",
    ... )  # doctest: +ELLIPSIS
    kernels: reference...
    >>> model.summary["status"]
    'done'
    """
    with _signals_restored():
        directory = run_job(
            comm or MPI.COMM_WORLD,
            config,
            [*_as_settings(overrides), *(_as_settings({"model.graph": graph_json.write(model)}) if model else ())],
            str(run) if run else None,
            resume=resume,
            take_over=take_over,
            inside=True,
        )
    return load(directory)


def _as_settings(overrides: Overrides) -> list[str]:
    """Return `overrides` of `train` as a list of `section.key=value`; raise UserError for what TOML cannot hold."""
    if isinstance(overrides, str):
        raise UserError(f"overrides = {overrides!r}: give a list of strings, or a dict")
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={_as_toml(key, value)}" for key, value in overrides.items()]


def _as_toml(key: str, value: Any) -> str:
    """Return the Python `value` as it stands in TOML after an equals sign."""
    try:
        # A table inside of two lists is written in braces; anywhere else it would be a section.
        text = tomli_w.dumps({"value": [[value]]})
    except TypeError as error:
        raise UserError(f"overrides: {key} = {value!r}: {error}") from None
    return text.removeprefix("value = [\n    [\n").removesuffix(",\n    ],\n]\n").strip()


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore the signal handlers of the program that calls `train`, which a job replaces."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
