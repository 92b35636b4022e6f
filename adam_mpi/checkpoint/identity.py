"""The identity of a run, whatever its directory is called: a number that is drawn once and marks its stores too."""

import json
import re
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from adam_mpi.base.files import write_json

FILE = "run.json"


@dataclass(frozen=True)
class Identity:
    """Which run a directory holds."""

    id: str
    directory: str = ""
    """Where the run was when a job used it last."""
    before: tuple[str, ...] = ()
    """For a copy: the identities of the runs that it is a copy of."""

    @property
    def known(self) -> tuple[str, ...]:
        """Return the identities that stores inside the run directory may be marked with."""
        return (self.id, *self.before)


def load_or_create(run: Path) -> Identity:
    """Return the identity of the run in the directory `run`; draw one if it has none or is a copy of another run."""
    here = str(run.resolve())
    found = _read(run)
    if found is None:
        now = Identity(_draw(), here)
    elif found.directory != here and _still_there(found, run):
        now = Identity(_draw(), here, found.known)
    else:
        now = Identity(found.id, here, found.before)
    if now != found:
        write_json(run / FILE, asdict(now))
    return now


def _draw() -> str:
    return uuid.uuid4().hex[:16]


def _read(run: Path) -> Identity | None:
    try:
        content = json.loads((run / FILE).read_text())
        found = Identity(content["id"], str(content["directory"]), tuple(content["before"]))
        # It becomes a part of a path.
        return found if all(re.fullmatch("[0-9a-f]{16}", id) for id in found.known) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _still_there(found: Identity, run: Path) -> bool:
    """Return whether the run `found` is still at its old directory, so that `run` is a copy of it and was not moved."""
    other = Path(found.directory)
    there = _read(other)
    return there is not None and there.id == found.id and not other.samefile(run)
