"""Operators of the user's own: classes with rules, registered by a Python file that the configuration names."""

import importlib.util
import traceback
from dataclasses import is_dataclass
from pathlib import Path

from adam_mpi.base.errors import UserError
from adam_mpi.model.ops.operator import REGISTRY, Operator

KEY = "model.operators"
_loaded: dict[Path, tuple[str, ...]] = {}


def load(given: str) -> tuple[str, ...]:
    """Run the Python file `given`, unless it was run before; return the kinds of operators that it registers.

    Raises UserError for a file that is missing, fails, registers nothing, or registers what is no operator; the
    registry is then as before.
    """
    path = Path(given).resolve()
    if path in _loaded:
        return _loaded[path]
    if not path.is_file():
        raise UserError(f"{KEY} is {given!r}, which is no file; give the path of a Python file")
    before = set(REGISTRY)
    try:
        _run(given, path)
        _loaded[path] = _checked(given, before)
    except UserError:
        for kind in set(REGISTRY) - before:
            del REGISTRY[kind]
        raise
    return _loaded[path]


def _run(given: str, path: Path) -> None:
    """Run the file at `path`; raise UserError that names the line where it fails."""
    spec = importlib.util.spec_from_file_location(f"operators_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{KEY} is {given!r}, which is no Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except UserError as error:
        raise UserError(f"{KEY}: {given}: {error}") from None
    except SyntaxError as error:
        raise UserError(f"{KEY}: {given}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{given}, line {lines[-1]}" if lines else given
        raise UserError(f"{KEY}: {where}: {type(error).__name__}: {error}") from None


def _checked(given: str, before: set[str]) -> tuple[str, ...]:
    """Return the kinds that are new since `before`; raise UserError if there is none, or one is no operator."""
    kinds = tuple(kind for kind in REGISTRY if kind not in before)
    if not kinds:
        raise UserError(f'{KEY}: {given} registers no operator; write @register("KIND") before a class of it')
    for kind in kinds:
        made = REGISTRY[kind]
        if not (isinstance(made, type) and issubclass(made, Operator) and is_dataclass(made)):
            raise UserError(f"{KEY}: {given}: {kind!r} is no frozen dataclass derived from Operator")
    return kinds
