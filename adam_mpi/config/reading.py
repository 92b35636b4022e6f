"""Read a configuration from a TOML file, a dict and `--set section.key=value`; check every value against its field."""

import ast
import copy
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from adam_mpi.base.errors import UserError
from adam_mpi.config import models
from adam_mpi.config.sections import Config, check_together

Given = str | Path | Mapping[str, Any] | Config | None

RENAMED = {
    "optimiser": "optimizer",
    "optimizer.rate": "optimizer.learning_rate",
    "optimizer.warm_up": "optimizer.warmup",
    "optimizer.average": "optimizer.ema",
    "optimizer.staleness_scale": "optimizer.stale",
    "data.transform.normalise": "data.transform.normalize",
}
"""Former name of a section or key -> its present name, which the error about the former one gives."""


def load(given: Given = None, overrides: Sequence[str] = ()) -> Config:
    """Return the defaults, overridden by `given` and then by each `section.key=value` of `overrides`.

    `given` is a TOML file, the name of a ready model, a dict of sections, or a whole configuration. Raises UserError
    for an unknown key and for a value that is not allowed.
    """
    config = copy.deepcopy(given) if isinstance(given, Config) else Config()
    if isinstance(given, Mapping):
        fill_section(config, given, "", "config")
    elif isinstance(given, str | Path):
        fill_section(config, read_toml(models.find(given), models.names()), "", str(given))
    for override in overrides:
        fill_section(config, _parse_override(override), "", "--set")
    check_together(config)
    return config


def from_toml(text: str, source: str) -> Config:
    """Return the configuration that `to_toml` has written as `text`; errors name `source`."""
    config = Config()
    fill_section(config, tomllib.loads(text), "", source)
    check_together(config)
    return config


def read_toml(path: Path, known: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of the TOML file `path`; the error for a missing file suggests the names in `known`."""
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


def fill_section(section: Any, given: Mapping[str, Any], prefix: str, source: str) -> None:
    """Set the fields of `section` to the values in `given`, each checked against its field.

    `prefix` is the name of the section with a dot, and `source` says in errors where the values come from.
    """
    fields = {known.name: known for known in dataclasses.fields(section)}
    hints = typing.get_type_hints(type(section))
    for key, value in given.items():
        name = prefix + key
        if key not in fields:
            what = _renamed(name, value) if name in RENAMED else _unknown(prefix, key, list(fields))
            raise UserError(f"{source}: {what}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise UserError(f"{source}: {name} = {value!r}: a section, expected keys {name}.…")
            fill_section(getattr(section, key), value, name + ".", source)
        elif dataclasses.is_dataclass(item := _item_type(hints[key])):
            setattr(section, key, _filled_list(name, value, item, source))
        else:
            setattr(section, key, _checked(name, value, hints[key], fields[key].metadata, source))


def _item_type(kind: Any) -> Any:
    """Return the type of the items of a list type; None for other types."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is list else None


def _filled_list(name: str, value: Any, kind: Any, source: str) -> list[Any]:
    """Return a section of the type `kind` for each of the tables in `value`."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise UserError(f"{source}: {name} = {value!r}: expected a list of tables")
    filled = [kind() for _ in value]
    for number, (section, item) in enumerate(zip(filled, value, strict=True)):
        fill_section(section, item, f"{name}[{number}].", source)
    return filled


def _renamed(name: str, value: Any) -> str:
    """Return an error text that gives the new names of the key `name` and of the keys in it."""
    new = RENAMED[name]
    inside = [f"{new}.{key}" for key in value] if isinstance(value, Mapping) else []
    renamed = {name: new} | {key: RENAMED[key] for key in inside if key in RENAMED}
    return ", ".join(f"{old} is now {present}" for old, present in renamed.items()) + "; use the new name"


def _unknown(prefix: str, key: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, allowed, 1)
    hint = f"did you mean {prefix}{close[0]}?" if close else f"allowed: {', '.join(allowed)}"
    return f"unknown key {prefix}{key}; {hint}"


def _checked(name: str, value: Any, kind: Any, limits: types.MappingProxyType, source: str) -> Any:
    """Return `value` converted to the type `kind` of its field; raise UserError if the field does not allow it."""
    plain = typing.get_origin(kind) or kind
    if isinstance(value, str):
        value = limits.get("words", {}).get(value, value)
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not _has_type(value, plain, typing.get_args(kind)):
        raise UserError(f"{source}: {name} = {value!r}: expected {_type_name(plain)}")
    low = limits.get("low")
    high = limits.get("high")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        allowed = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise UserError(f"{source}: {name} = {value!r}: must be {allowed}")
    choices = limits.get("choices")
    if choices and value not in choices:
        raise UserError(f"{source}: {name} = {value!r}: must be one of {', '.join(map(str, choices))}")
    return value


def _has_type(value: Any, plain: Any, arguments: tuple[Any, ...]) -> bool:
    if not isinstance(value, plain) or (plain is not bool and isinstance(value, bool)):
        return False
    return plain is not list or arguments[0] is not str or all(isinstance(item, str) for item in value)


def _type_name(plain: type) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", list: "a list", dict: "a table"}
    names[bool] = "true or false"
    return names[plain]


def to_toml(config: Config) -> str:
    """Return `config` as TOML text that `from_toml` reads."""
    return tomli_w.dumps(dataclasses.asdict(config))


def documentation() -> Iterator[tuple[str, Any, str]]:
    """Yield (section.key, default, documentation) of every field, in the order of the sections."""
    for section in dataclasses.fields(Config):
        yield from _documented(section.name, typing.get_type_hints(Config)[section.name])


def _documented(prefix: str, section: Any) -> Iterator[tuple[str, Any, str]]:
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {
        statement.target.id: " ".join(ast.literal_eval(following.value).split())
        for statement, following in itertools.pairwise([*body.body, ast.Pass()])
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
    }
    for name, hint in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(hint):
            yield from _documented(f"{prefix}.{name}", hint)
        else:
            yield f"{prefix}.{name}", getattr(section(), name), texts[name]
