"""Declare a configuration field: its default and the values that are allowed for it."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any


def limited(
    default: Any,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[Any] = (),
    words: Mapping[str, Any] | None = None,
) -> Any:
    """Return a dataclass field with `default` whose value is checked when it is read.

    `low` and `high` bound a number (both are allowed), `choices` lists the only allowed values, and `words` maps words
    that may be written to the values they stand for.
    """
    limits = {"low": low, "high": high, "choices": tuple(choices), "words": words or {}}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=limits)
    return field(default=default, metadata=limits)
