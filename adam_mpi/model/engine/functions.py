"""Build functions from a kit's basic ones: exponential and logarithm, for the compiled and the numpy kit alike."""

from collections.abc import Callable
from typing import Any

# Polynomial of 2**x - 1 on [-0.5, 0.5], relative error below 1e-7.
COEFFICIENTS = (1.535336188e-4, 1.339887440e-3, 9.618437357e-3, 5.550332471e-2, 2.402264791e-1, 6.931472028e-1)


def over(kit: dict[str, Any]) -> dict[str, Callable]:
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
