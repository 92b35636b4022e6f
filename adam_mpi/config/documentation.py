"""The documentation of every configuration field, read from the source of the sections."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from adam_mpi.config.sections import Config


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
