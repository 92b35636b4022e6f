"""Recipes: candidates for a data set, from the TOML files in candidates/; and the ones that were chosen."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "candidates"
Recipe = dict[str, Any]


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def candidates(data: str) -> dict[str, Recipe]:
    """By name: the base with what each candidate changes."""
    told = tomllib.loads((FOLDER / f"{data}.toml").read_text())
    return {name: merged(told["base"], changes) for name, changes in told["candidates"].items()}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Recipe:
    """Sections are merged key by key, everything else is replaced."""
    both = {key: merged(base[key], value) for key, value in changes.items() if isinstance(base.get(key), Mapping)}
    return {**base, **changes, **both}


def read(file: Path) -> Recipe:
    return tomllib.loads(file.read_text())
