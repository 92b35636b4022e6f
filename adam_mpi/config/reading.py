"""Fill the sections from a TOML file and from `--set section.key=value`; every value is checked against its field."""

import copy
import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from adam_mpi.base.errors import UserError
from adam_mpi.config import models
from adam_mpi.config.checks import check_together
from adam_mpi.config.sections import Config

Given = str | Path | Mapping[str, Any] | Config | None


def load(given: Given = None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then what is given (a file, the name of a model, sections as a dict), then each `section.key=value`."""
    config = copy.deepcopy(given) if isinstance(given, Config) else Config()
    if isinstance(given, Mapping):
        fill(config, given, "", "config")
    elif isinstance(given, str | Path):
        fill(config, read(models.find(given), models.names()), "", str(given))
    for override in overrides:
        fill(config, _parse_override(override), "", "--set")
    check_together(config)
    return config


def from_toml(text: str, source: str) -> Config:
    """A configuration that `to_toml` wrote, e.g. into a file of weights; `source` is named where it is wrong."""
    config = Config()
    fill(config, tomllib.loads(text), "", source)
    check_together(config)
    return config


def read(path: Path, known: Sequence[str] = ()) -> dict[str, Any]:
    """`known`: names that could have been given instead."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        others = f", or one of {', '.join(known)}" if known else ""
        raise UserError(f"config {path}: {error.strerror}; give a TOML file{others}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config {path}: not TOML: {error}") from None


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise UserError(f"--set {text}: expected section.key=value, e.g. --set train.epochs=3")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return parsed


def fill(section: Any, given: Mapping[str, Any], prefix: str, source: str) -> None:
    """Put the given values into a section of the configuration, each checked against its field."""
    fields = {f.name: f for f in dataclasses.fields(section)}
    hints = typing.get_type_hints(type(section))
    for key, value in given.items():
        name = prefix + key
        if key not in fields:
            close = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"allowed: {', '.join(fields)}"
            raise UserError(f"{source}: unknown key {name}; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise UserError(f"{source}: {name} = {value!r}: a section, expected keys {name}.…")
            fill(getattr(section, key), value, name + ".", source)
        else:
            setattr(section, key, _checked(name, value, hints[key], fields[key].metadata, source))


def _checked(name: str, value: Any, kind: Any, limits: types.MappingProxyType, source: str) -> Any:
    """The value in its field's type, or an error that says what is allowed."""
    plain = typing.get_origin(kind) or kind
    if isinstance(value, str):
        value = limits.get("words", {}).get(value, value)
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, plain) or (plain is not bool and isinstance(value, bool)):
        raise UserError(f"{source}: {name} = {value!r}: expected {_kind_name(kind)}")
    inner = typing.get_args(kind)
    if plain is list and inner[0] is str and not all(isinstance(item, str) for item in value):
        raise UserError(f"{source}: {name} = {value!r}: expected {_kind_name(kind)}")
    low, high, choices = limits.get("low"), limits.get("high"), limits.get("choices")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        allowed = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise UserError(f"{source}: {name} = {value!r}: must be {allowed}")
    if choices and value not in choices:
        raise UserError(f"{source}: {name} = {value!r}: must be one of {', '.join(map(str, choices))}")
    return value


def _kind_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", list: "a list", dict: "a table"}
    names[bool] = "true or false"
    return names[typing.get_origin(kind) or kind]


def to_toml(config: Config) -> str:
    return tomli_w.dumps(dataclasses.asdict(config))
