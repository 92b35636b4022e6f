#!/usr/bin/env python
"""Writes docs/reference/configuration.md from the dataclasses in adam_mpi/config/sections.py; a test compares them."""

import dataclasses
import itertools
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tomli_w  # noqa: E402

from adam_mpi.config import Config, documentation  # noqa: E402
from adam_mpi.model.layers import FUNCTIONS, KINDS  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "configuration.md"
HEAD = """# Configuration reference

A configuration is a TOML file with these sections; `--set section.key=value` overrides single keys. Unknown keys and
values that are not allowed are named before anything starts. `python -m adam_mpi models` lists ready configurations.
A run
keeps its resolved configuration as `config.toml`.

`scripts/config_reference.py` makes this page from the dataclasses in `adam_mpi/config`; `adam_mpi train --help` prints
it too.
"""
LAYERS = """
## Layers of `model.layers`

Each entry is the name of an activation, or a table with a `kind` and the fields below (defaults in parentheses; fields
without one are required). Layers are named by kind and number: `conv1`, `relu1`, `max_pool1`.

| kind | fields | meaning |
| --- | --- | --- |
"""


def limits() -> dict[str, Any]:
    """section.key -> what is allowed, of every field."""
    return dict(_limits("", Config))


def _limits(prefix: str, kind: Any) -> Iterator[tuple[str, str]]:
    hints = typing.get_type_hints(kind)
    for known in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[known.name]):
            yield from _limits(f"{prefix}{known.name}.", hints[known.name])
        else:
            yield prefix + known.name, _allowed(known.metadata)


def _allowed(metadata: Any) -> str:
    low, high = metadata.get("low"), metadata.get("high")
    words = ", ".join(f"`{word}`" for word in (*metadata.get("choices", ()), *metadata.get("words", ())))
    if low is None:
        return words
    span = f"{low:g} or more" if high is None else f"{low:g} to {high:g}"
    return f"{span}, {words}" if words else span


def _shown(key: str, default: Any) -> str:
    if key == "model.layers":
        return "the paper's MNIST network"
    return "`" + tomli_w.dumps({"value": default}).removeprefix("value = ").strip() + "`" if default != {} else "`{}`"


def page() -> str:
    allowed, parts = limits(), [HEAD]
    for section, rows in itertools.groupby(documentation(), lambda row: row[0].rpartition(".")[0]):
        parts.append(f"\n## {section}\n\n| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n")
        for key, default, sentence in rows:
            parts.append(f"| `{key}` | {_shown(key, default)} | {allowed[key]} | {sentence} |\n")
    return "".join(parts) + layers()


def layers() -> str:
    """Return the section about the kinds of layers: their fields, defaults and meaning, from their dataclasses."""
    rows = [f'| `"{name}"` | | Activation, element by element. |' for name in FUNCTIONS]
    for name, kind in KINDS.items():
        fields = ", ".join(_field(known) for known in dataclasses.fields(kind))
        rows.append(f"| `{name}` | {fields} | {(kind.__doc__ or '').splitlines()[0]} |")
    return LAYERS + "\n".join(rows) + "\n"


def _field(known: dataclasses.Field) -> str:
    if known.default is dataclasses.MISSING:
        return f"`{known.name}`"
    return f"`{known.name}` ({'`size`' if known.default is None else f'{known.default:g}'})"


if __name__ == "__main__":
    PAGE.write_text(page())
