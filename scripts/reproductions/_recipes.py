"""Recipes: candidates for a data set, from candidates.toml; and the ones that were chosen."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Recipe = dict[str, Any]
TOLD = tomllib.loads(Path(__file__).with_name("candidates.toml").read_text())
SETS = tuple(TOLD["sets"])
"""Names of the data sets."""


def candidates(data: str) -> dict[str, Recipe]:
    """By name: the base for a data set with what each candidate changes."""
    base = merged(TOLD["base"], TOLD["sets"][data])
    return {name: merged(base, changes) for name, changes in TOLD["candidates"].items()}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Recipe:
    """Sections are merged key by key, everything else is replaced."""
    both = {key: merged(base[key], value) for key, value in changes.items() if isinstance(base.get(key), Mapping)}
    return {**base, **changes, **both}


def read(file: Path) -> Recipe:
    return tomllib.loads(file.read_text())
