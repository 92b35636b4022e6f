"""Declare the fields of operators, with the check that a configuration's value has to pass."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any

from adam_mpi.base.errors import UserError

CHECK = "check"


def _field(check: Callable[[object], str], default: Any) -> Any:
    if default is MISSING:
        return field(metadata={CHECK: check})
    return field(default=default, metadata={CHECK: check})


def whole(minimum: int = 1, default: Any = MISSING, several: bool = False) -> Any:
    """Declare a whole number; with `several` also a list of them, one per axis."""
    what = f"a whole number, {minimum} or more" + (", or a list of them" if several else "")

    def check(value: object) -> str:
        numbers = value if several and isinstance(value, list | tuple) and value else [value]
        return "" if all(isinstance(n, int) and _is_whole(n) and n >= minimum for n in numbers) else what

    return _field(check, default)


def axes(default: Any = MISSING) -> Any:
    """Declare a list of whole numbers of either sign."""

    def check(value: object) -> str:
        fits = isinstance(value, list | tuple) and all(_is_whole(number) for number in value)
        return "" if fits else "a list of whole numbers"

    return _field(check, default)


def number(minimum: float | None = None, default: Any = MISSING, below: float | None = None) -> Any:
    """Declare a number from `minimum` up to, but not including, `below`."""
    limits = "" if minimum is None else f", {minimum:g} or more"
    limits += "" if below is None else f", less than {below:g}"

    def check(value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "a number" + limits
        fits = (minimum is None or value >= minimum) and (below is None or value < below)
        return "" if fits else "a number" + limits

    return _field(check, default)


def numbers(minimum: float = 0.0) -> Any:
    """Declare a list of numbers, `minimum` or more, which is empty by default."""
    known = number(minimum).metadata[CHECK]

    def check(value: object) -> str:
        fits = isinstance(value, list | tuple) and not any(known(part) for part in value)
        return "" if fits else f"a list of numbers, {minimum:g} or more each"

    return _field(check, ())


def optional_whole() -> Any:
    """Declare a whole number of either sign, which is None by default."""
    return _field(lambda value: "" if value is None or _is_whole(value) else "a whole number", None)


def choice(*allowed: str, default: Any = MISSING) -> Any:
    """Declare one of the words in `allowed`."""
    return _field(lambda value: "" if value in allowed else f"one of {', '.join(allowed)}", default)


def flag(default: Any = MISSING) -> Any:
    """Declare true or false."""
    return _field(lambda value: "" if isinstance(value, bool) else "true or false", default)


def hidden(default: Any = MISSING) -> Any:
    """Declare a field that no configuration sets."""
    return field() if default is MISSING else field(default=default)


def settable(operator: type) -> dict[str, Field]:
    """Return the fields of `operator` that users set, by name."""
    return {known.name: known for known in fields(operator) if CHECK in known.metadata}


def make(operator: type, key: str, kind: str, values: dict[str, object]) -> Any:
    """Return an `operator` with `values`; raise UserError, with their place `key`, for one that is wrong or missing."""
    allowed = settable(operator)
    for name, value in values.items():
        if name not in allowed:
            raise UserError(f"{key}.{name} is not known; a {kind} layer has {', '.join(allowed) or 'no keys'}")
        if wanted := allowed[name].metadata[CHECK](value):
            raise UserError(f"{key}.{name} is {value!r}; give {wanted}")
    for name, known in allowed.items():
        if name not in values and known.default is MISSING:
            raise UserError(f"{key}.{name} is missing; a {kind} layer needs it")
    return operator(**{name: _hashable(value) for name, value in values.items()})


def _hashable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def per_axis(value: int | Sequence[int], count: int, name: str) -> tuple[int, ...]:
    """Return `value` once per axis; raise ValueError if it is a list of another length."""
    if isinstance(value, int):
        return (value,) * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} numbers for {count} axes; give one, or {count}")
    return tuple(value)


def pads(value: int | Sequence[int], count: int) -> tuple[tuple[int, int], ...]:
    """Return (before, after) per axis of a pad: one number, one per axis, or all before and then all after."""
    if not isinstance(value, int) and len(value) == 2 * count:
        return tuple(zip(value[:count], value[count:], strict=True))
    return tuple((size, size) for size in per_axis(value, count, "pad"))
