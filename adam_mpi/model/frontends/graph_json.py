"""Write graphs as JSON, and read them: a model that was built in Python is kept with the run's configuration."""

import importlib
import json
from dataclasses import fields, is_dataclass
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.model.expression import FUNCTIONS, Expression
from adam_mpi.model.graph import Graph
from adam_mpi.model.ops.operator import REGISTRY

PACKAGE = "adam_mpi.model."
"""Classes of this package, and operators that are registered, are the only ones that a file may name."""


def write(graph: Graph) -> str:
    """Return `graph` as JSON."""
    return json.dumps(_packed(graph), separators=(",", ":"))


def read(text: str) -> Graph:
    """Return the graph that `write` made `text` from, verified; raise UserError for anything else."""
    try:
        made = _unpacked(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RecursionError) as error:
        raise UserError(f"model.graph: not a graph that this version wrote ({error})") from None
    if not isinstance(made, Graph):
        raise UserError("model.graph: describes no graph")
    return made.verify()


def _packed(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_packed(part) for part in value]
    if is_dataclass(value):
        return {"": _name(type(value))} | {field.name: _packed(getattr(value, field.name)) for field in fields(value)}
    return value


def _name(kind: type) -> str:
    """Return how `_class` finds the class `kind`."""
    registered: str = getattr(kind, "kind", "")
    return registered if registered in REGISTRY else f"{kind.__module__.removeprefix(PACKAGE)}:{kind.__name__}"


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(part) for part in value)
    if not isinstance(value, dict):
        return value
    kind = _class(value[""])
    made = kind(**{name: _unpacked(part) for name, part in value.items() if name})
    if isinstance(made, Expression) and made.function not in (*FUNCTIONS, "input", "constant"):
        raise ValueError(f"there is no function {made.function!r}")
    return made


def _class(name: str) -> Any:
    """Return the class called `name`: an operator's kind, or module and class in the package of models."""
    if name in REGISTRY:
        return REGISTRY[name]
    module, _, kind = name.partition(":")
    found = getattr(importlib.import_module(PACKAGE + module), kind)
    if not isinstance(found, type) or not is_dataclass(found):
        raise ValueError(f"{name} is no part of a graph")
    return found
