"""Define the kit of functions on vectors for numpy: emitted source runs uncompiled, so tests can try many shapes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from adam_mpi.model.engine import functions, numpy_vector_bundle


def kit(lanes: int) -> dict[str, Any]:
    """Return functions of the same names and meaning as those of `vector.kit`."""
    basic = _memory(lanes) | _arithmetic(lanes)
    basic |= numpy_vector_bundle.kit(basic)
    entry = {"kernel": _as_it_is, "entry": _as_it_is, "flush_to_zero": lambda: None, "restore": lambda before: None}
    return basic | functions.over(basic) | entry


def row_kit(lanes: int) -> dict[str, Any]:
    """Return the kit under names that begin with `row_`, for kernels with one image per block: see `row_vectors`."""
    return {f"row_{name}": function for name, function in kit(lanes).items()}


def _as_it_is(function: Callable) -> Callable:
    return function


def _memory(lanes: int) -> dict[str, Callable]:
    """Return loads and stores, which assert that they stay inside the array."""

    def load(array: np.ndarray, index: int) -> np.ndarray:
        return load_part(array, index, lanes)

    def load_part(array: np.ndarray, index: int, count: int) -> np.ndarray:
        assert 0 <= index <= index + count <= array.size
        return np.concatenate([array[index : index + count], np.zeros(lanes - count, array.dtype)])

    def store(array: np.ndarray, index: int, value: np.ndarray) -> None:
        store_part(array, index, value, lanes)

    def store_part(array: np.ndarray, index: int, value: np.ndarray, count: int) -> None:
        assert 0 <= index <= index + count <= array.size
        array[index : index + count] = value[:count]

    def broadcast(array: np.ndarray, index: int) -> np.ndarray:
        assert 0 <= index < array.size
        return np.full(lanes, array[index])

    return {f.__name__: f for f in (load, load_part, store, store_part, broadcast)}


def _arithmetic(lanes: int) -> dict[str, Callable]:
    """Return arithmetic on vectors, and choices lane by lane."""
    return {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "fma": lambda a, b, c: a * b + c,
        "root": np.sqrt,
        "whole": np.rint,
        "power": np.exp2,
        "exponent": lambda v: (np.frexp(v)[1] - 1).astype(np.float32),
        "mantissa": lambda v: np.frexp(v)[0] * np.float32(2),
        "zero": lambda: np.zeros(lanes, np.float32),
        "splat": lambda value: np.full(lanes, value, np.float32),
        "greater": lambda a, b, yes, no: np.where(a > b, yes, no),
        "equal": lambda a, b, yes, no: np.where(a == b, yes, no),
        "total": np.sum,
        "maximum": lambda a, b: np.where(a > b, a, b),
    }
