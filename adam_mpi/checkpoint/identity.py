"""Which run it is, whatever its directory is called: a number that is drawn once, and that its stores carry too."""

import json
import re
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from adam_mpi.base.files import write_json

FILE = "run.json"


@dataclass(frozen=True)
class Identity:
    id: str
    directory: str = ""
    """Where it was when it was seen last."""
    before: tuple[str, ...] = ()
    """Of a copy: the runs that it is a copy of."""

    @property
    def known(self) -> tuple[str, ...]:
        """What stores inside of the run directory may be marked with."""
        return (self.id, *self.before)


def of(run: Path) -> Identity:
    """The identity of the run in a directory, drawn if it has none; a copy of a run gets one of its own."""
    here, found = str(run.resolve()), _read(run)
    if found is None:
        now = Identity(_draw(), here)
    elif found.directory != here and _elsewhere(found, run):
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
        told = json.loads((run / FILE).read_text())
        found = Identity(told["id"], str(told["directory"]), tuple(told["before"]))
        # It becomes a part of a path.
        return found if all(re.fullmatch("[0-9a-f]{16}", id) for id in found.known) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _elsewhere(found: Identity, run: Path) -> bool:
    """Whether the run is still where it was, so that this one is a copy of it, and not the same one moved."""
    other = Path(found.directory)
    there = _read(other)
    return there is not None and there.id == found.id and not other.samefile(run)
