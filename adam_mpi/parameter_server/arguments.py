"""Check the arguments of pushes and pulls before anything is changed or sent. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from adam_mpi.base.errors import UserError
from adam_mpi.config import Config, Optimizer, load
from adam_mpi.optimizer.rules import RULES, rule_of
from adam_mpi.optimizer.settings import Settings

GAP = 4096
"""Parameters between two wanted ones that a read takes along rather than being split."""
MOST_PIECES = 64
"""Reads that one run of parameters is split into at most."""


def to_float32(values: ArrayLike, what: str) -> np.ndarray:
    """Return the `values` to push as float32; raise UserError if that would round them, or for several dimensions."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise UserError(f"{what} of shape {given.shape}: must have one dimension; give values.ravel() if you mean that")
    if not np.can_cast(given.dtype, np.float32):
        cast = "give values.astype(np.float32) if you mean that"
        raise UserError(f"{what} of type {given.dtype}: would be rounded to float32; {cast}")
    return np.ascontiguousarray(given, np.float32)


def check_range(offset: int, count: int, size: int) -> tuple[int, int]:
    """Return `offset` and `count` of a push or pull as ints; raise UserError unless inside of `size` parameters."""
    if count < 0:
        raise UserError(f"count = {count}: must be 0 or more")
    if offset < 0 or offset + count > size:
        raise UserError(f"parameters {offset} to {offset + count - 1}: there are {size}, numbered from 0")
    return int(offset), int(count)


def to_indices(indices: ArrayLike, size: int, values: int | None = None) -> np.ndarray:
    """Return `indices` of a push or pull as int64; raise UserError unless below `size` and as many as `values`."""
    given = np.asarray(indices)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        what = f"indices of type {given.dtype} and shape {given.shape}"
        raise UserError(f"{what}: must be whole numbers in one dimension")
    if values is not None and given.size != values:
        raise UserError(f"{values} values with {given.size} indices: must be as many")
    if given.size and (int(given.min()) < 0 or int(given.max()) >= size):
        wrong = int(given[(given < 0) | (given >= size)][0])
        raise UserError(f"indices: there is no parameter {wrong}; there are {size}, numbered from 0")
    return given.astype(np.int64)


def sum_duplicates(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `indices` of a push in increasing order, each once, with the sums of their values."""
    if not indices.size:
        return indices, values
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    reordered = values[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    if firsts.size == ordered.size:
        return ordered, reordered
    return ordered[firsts], np.add.reduceat(reordered, firsts)


def read_slices(indices: np.ndarray) -> list[slice]:
    """Split increasing `indices` of a pull at gaps into slices that are each read at once, or into one slice."""
    splits = np.flatnonzero(np.diff(indices) > GAP) + 1
    if splits.size >= MOST_PIECES:
        return [slice(0, indices.size)]
    edges: Sequence[int] = [0, *splits.tolist(), indices.size]
    return [slice(first, last) for first, last in zip(edges, edges[1:], strict=False)]


def check_counts(size: int, servers: int, ranks: int, shard: int, copies: int, threads: int, seconds: float) -> None:
    """Raise UserError unless the numbers that a ParameterServer on `ranks` ranks is made with are possible."""
    if not 0 < servers < max(ranks, 2):
        raise UserError(f"servers = {servers}: must leave a client among {ranks} ranks")
    for name, number in {"size": size, "shard": shard, "copies": copies, "threads": threads}.items():
        if number < 1:
            raise UserError(f"{name} = {number}: must be at least 1")
    if not seconds > 0:
        raise UserError(f"seconds = {seconds}: must be above 0")


def to_config(
    optimizer: str,
    learning_rate: float,
    settings: Mapping[str, float],
    shard: int,
    transport: str,
    copies: int,
    threads: int,
    seconds: float,
) -> Config:
    """Return the configuration of a ParameterServer's job; raise UserError for an unknown `optimizer`."""
    config = Config(optimizer=_to_optimizer(optimizer, learning_rate, settings))
    config.train.batch = 1
    config.server.shard = shard
    config.server.copies = copies
    config.server.threads = threads
    config.cluster.transport = transport
    config.cluster.seconds = seconds
    return config


def _to_optimizer(kind: str, learning_rate: float, settings: Mapping[str, float]) -> Optimizer:
    """Return a ParameterServer's optimizer section for the rule `kind` with `settings`; raise UserError if wrong."""
    if kind not in RULES:
        raise UserError(f"optimizer = {kind!r}: must be one of {', '.join(RULES)}")
    if wrong := settings.keys() - set(Settings._fields):
        names = ", ".join(Settings._fields)
        raise UserError(f"settings: {', '.join(sorted(wrong))}: unknown; allowed: {names}")
    where = "worker" if kind == "additive" else "server"
    rule = "momentum" if kind in ("additive", "descent") else kind
    given = {"kind": rule, "where": where, "learning_rate": float(learning_rate), "schedule": "constant"}
    # What a program pushes is applied as it is, however late.
    given["stale"] = "keep"
    optimizer = load({"optimizer": {**given, **settings}}).optimizer
    if rule_of(optimizer).name != kind:
        raise UserError(f'optimizer = "{kind}": needs settings={{"momentum": ...}} above 0, or is "descent"')
    return optimizer
