"""Define vectors and bundles of vectors for numpy: emitted source runs uncompiled, so tests can try many shapes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adam_mpi.model.engine import vector_functions

Bundle = tuple[np.ndarray, ...]


def bundle_kit(basic: dict[str, Any]) -> dict[str, Callable]:
    """Return what makes functions on bundles, by name; offsets count from the place that a function is called with."""
    return _bundle_memory(basic) | _bundle_arithmetic(basic)


def _bundle_memory(basic: dict[str, Any]) -> dict[str, Callable]:
    """Return what makes loads and stores of bundles."""
    load = basic["load"]
    store = basic["store"]
    broadcast = basic["broadcast"]
    zero = basic["zero"]

    def loads(*offsets: int | None) -> Callable:
        """Load a vector at each offset; None stands for zero."""
        return lambda array, place: tuple(
            zero() if offset is None else load(array, place + offset) for offset in offsets
        )

    def broadcasts(*offsets: int) -> Callable:
        return lambda array, place: tuple(broadcast(array, place + offset) for offset in offsets)

    def stores(*offsets: int | None) -> Callable:
        """Store a vector at each offset; None: that value is not stored."""

        def function(array: np.ndarray, place: int, values: Bundle) -> None:
            for offset, value in zip(offsets, values, strict=True):
                if offset is not None:
                    store(array, place + offset, value)

        return function

    def add_stores(*offsets: int) -> Callable:
        def function(array: np.ndarray, place: int, values: Bundle) -> None:
            for offset, value in zip(offsets, values, strict=True):
                store(array, place + offset, load(array, place + offset) + value)

        return function

    def add_scaled(*offsets: int) -> Callable:
        def function(array: np.ndarray, place: int, values: Bundle, factor: np.float32) -> None:
            for offset, value in zip(offsets, values, strict=True):
                store(array, place + offset, load(array, place + offset) + factor * value)

        return function

    def prefetches(write: bool, *offsets: int) -> Callable:
        """Fetch what will be read, or written, soon; an offset may point past the end, as nothing is read."""
        return lambda array, place: None

    def add_totals(*offsets: int) -> Callable:
        def function(array: np.ndarray, place: int, values: Bundle) -> None:
            for offset, value in zip(offsets, values, strict=True):
                array[place + offset] += value.sum()

        return function

    def add_packed(count: int) -> Callable:
        """Add totals one after the other; compiled, it touches whole vectors, which `add_totals` does not."""
        return add_totals(*range(count))

    return {
        "loads": loads,
        "broadcasts": broadcasts,
        "stores": stores,
        "add_stores": add_stores,
        "add_scaled": add_scaled,
        "prefetches": prefetches,
        "add_totals": add_totals,
        "add_packed": add_packed,
    }


def _bundle_arithmetic(basic: dict[str, Any]) -> dict[str, Callable]:
    """Return what makes arithmetic on bundles."""
    load = basic["load"]
    zero = basic["zero"]

    def combine(*matrix: Sequence[float]) -> Callable:
        """Multiply values by a matrix."""
        return lambda values: tuple(np.array(matrix, np.float32) @ np.array(values))

    def masks(*offsets: int | None) -> Callable:
        """Make a value zero where what lies at its offset is not above zero; None: leave it as it is."""
        return lambda values, array, place: tuple(
            value if offset is None else np.where(load(array, place + offset) > 0, value, np.float32(0))
            for offset, value in zip(offsets, values, strict=True)
        )

    def multiply_adds(count: int, factor: str, *products: tuple[int, int, int]) -> Callable:
        """Add array[f + one] * memory[v + other] to sums[number], for each product (number, one, other)."""

        def function(sums: Bundle, array: np.ndarray, f: int, memory: np.ndarray, v: int) -> Bundle:
            assert len(sums) == count
            results = list(sums)
            for number, one, other in products:
                results[number] = results[number] + basic[factor](array, f + one) * load(memory, v + other)
            return tuple(results)

        return function

    def sandwich(*matrix: Sequence[int]) -> Callable:
        """Multiply values by a matrix from the left, and by its transpose from the right."""

        def function(values: Bundle) -> Bundle:
            sides = np.array(matrix, np.float32)
            inner = len(matrix[0])
            given = np.array(values).reshape(inner, inner, -1)
            return tuple(np.einsum("ik,jl,kln->ijn", sides, sides, given).reshape(len(matrix) ** 2, -1))

        return function

    return {
        "combine": combine,
        "zeros": lambda count: lambda: (zero(),) * count,
        "positives": lambda count: lambda values: tuple(np.where(value < 0, zero(), value) for value in values),
        "masks": masks,
        "multiply_adds": multiply_adds,
        "sandwich": sandwich,
        "transpose": lambda count: lambda values: tuple(np.array(values).T.copy()),
    }


def kit(lanes: int) -> dict[str, Any]:
    """Return functions of the same names and meaning as those of `vector.kit`."""
    basic = _memory(lanes) | _arithmetic(lanes)
    basic |= bundle_kit(basic)
    entry = {"kernel": _as_it_is, "entry": _as_it_is, "flush_to_zero": lambda: None, "restore": lambda before: None}
    return basic | vector_functions.functions_over(basic) | entry


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
