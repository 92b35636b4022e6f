"""Functions on vectors of either kit: exponential and logarithm, and products with small constant matrices.

Rows, and columns, come in pairs that differ in signs only. For two such rows the halves that agree and those that do
not are summed once; for two such columns, sum and difference of the values are taken first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Polynomial of 2**x - 1 on [-0.5, 0.5], relative error below 1e-7.
COEFFICIENTS = (1.535336188e-4, 1.339887440e-3, 9.618437357e-3, 5.550332471e-2, 2.402264791e-1, 6.931472028e-1)


def functions_over(kit: dict[str, Any]) -> dict[str, Callable]:
    """Return `exponential` and `logarithm`, made of the functions of `kit`."""
    # Closures hold them by name: numba compiles what it finds in their cells.
    add = kit["add"]
    sub = kit["sub"]
    mul = kit["mul"]
    div = kit["div"]
    fma = kit["fma"]
    maximum = kit["maximum"]
    exponent = kit["exponent"]
    mantissa = kit["mantissa"]
    zero = kit["zero"]
    splat = kit["splat"]
    whole = kit["whole"]
    power = kit["power"]
    c6, c5, c4, c3, c2, c1 = COEFFICIENTS

    def exponential(x: Any) -> Any:
        """Return e ** x as 2 ** whole * 2 ** rest; below -87 it is about 1e-38, above 88 about 1e38."""
        x = sub(zero(), maximum(splat(-88.0), sub(zero(), maximum(splat(-87.0), x))))
        scaled = mul(x, splat(1.4426950408889634))
        number = whole(scaled)
        # x - number * ln 2 in two steps keeps the digits that one product would lose.
        rest = fma(number, splat(-0.693359375), x)
        rest = mul(fma(number, splat(2.12194440e-4), rest), splat(1.4426950408889634))
        value = fma(splat(c6), rest, splat(c5))
        value = fma(value, rest, splat(c4))
        value = fma(value, rest, splat(c3))
        value = fma(value, rest, splat(c2))
        value = fma(value, rest, splat(c1))
        return mul(fma(value, rest, splat(1.0)), power(number))

    def logarithm(x: Any) -> Any:
        """Return ln x for positive x: exponent * ln 2 + 2 artanh((m - 1) / (m + 1)) of the mantissa m, as a series."""
        m = mul(mantissa(x), splat(0.7071067811865476))
        ratio = div(sub(m, splat(1.0)), add(m, splat(1.0)))
        square = mul(ratio, ratio)
        series = fma(square, splat(2 / 11), splat(2 / 9))
        series = fma(series, square, splat(2 / 7))
        series = fma(series, square, splat(2 / 5))
        series = fma(series, square, splat(2 / 3))
        series = fma(series, square, splat(2.0))
        return fma(add(exponent(x), splat(0.5)), splat(0.6931471805599453), mul(series, ratio))

    return {"exponential": exponential, "logarithm": logarithm}


HALVES = np.array([[0.5, 0.5], [0.5, -0.5]])


def apply_matrix(matrix: Sequence[Sequence[float]], values: Sequence[Any], add: Callable) -> list[Any]:
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
