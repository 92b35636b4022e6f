"""Multiply a list of values by a small constant matrix, in few operations.

Rows, and columns, come in pairs that differ in signs only. For two such rows the halves that agree and those that do
not are summed once; for two such columns, sum and difference of the values are taken first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

HALVES = np.array([[0.5, 0.5], [0.5, -0.5]])


def apply(matrix: Sequence[Sequence[float]], values: Sequence[Any], add: Callable) -> list[Any]:
    """Return `matrix` times `values`.

    `add(result, coefficient, value)` returns result + coefficient * value, where a result of None is zero.
    """
    given = list(values)
    coefficients = np.array(matrix, float)
    for first in _pairs(coefficients.T):
        pair = slice(first, first + 2)
        coefficients[:, pair] = coefficients[:, pair] @ HALVES
        given[pair] = _sum_and_difference(given[pair], add)
    rows = _pairs(coefficients)
    for first in rows:
        coefficients[first : first + 2] = HALVES @ coefficients[first : first + 2]
    results = [_sum(row, given, add) for row in coefficients]
    for first in rows:
        results[first : first + 2] = _sum_and_difference(results[first : first + 2], add)
    return results


def _pairs(rows: np.ndarray) -> list[int]:
    """Return where each pair of neighbors that differ in signs only begins."""
    found: list[int] = []
    for first in range(len(rows) - 1):
        one = rows[first]
        other = rows[first + 1]
        alike = np.array_equal(abs(one), abs(other)) and np.any(one == -other, where=one != 0)
        if alike and np.any(one == other, where=one != 0) and (not found or found[-1] < first - 1):
            found.append(first)
    return found


def _sum_and_difference(pair: Sequence[Any], add: Callable) -> list[Any]:
    return [add(pair[0], 1, pair[1]), add(pair[0], -1, pair[1])]


def _sum(row: np.ndarray, values: Sequence[Any], add: Callable) -> Any:
    # Ones first: they need no product to begin with.
    result = None
    for place in sorted(np.flatnonzero(row).tolist(), key=lambda place: row[place] != 1):
        result = add(result, float(row[place]), values[place])
    return result
