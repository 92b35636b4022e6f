"""The sentence under each field, for people."""

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
    """(section.key, default, sentence) of every field, in order."""
    for section in dataclasses.fields(Config):
        yield from _documented(section.name, typing.get_type_hints(Config)[section.name])


def _documented(prefix: str, kind: Any) -> Iterator[tuple[str, Any, str]]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    sentences = {
        statement.target.id: ast.literal_eval(following.value)
        for statement, following in itertools.pairwise([*body.body, ast.Pass()])
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
    }
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from _documented(f"{prefix}.{name}", hint)
        else:
            yield f"{prefix}.{name}", getattr(kind(), name), sentences[name]
