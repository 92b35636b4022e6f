"""The stores of a run, wherever they lie: on a file system that all share, or each on the disk of its server's node.

A life is one start of the run; its folder has a file per server. Every rank says which files it sees; each file is
read by one rank that sees it, and where not all can read all, what is in it is passed round: each keeps its share.
"""

import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import store_file
from adam_mpi.checkpoint.hdf5_file import FORMAT
from adam_mpi.checkpoint.identity import Identity
from adam_mpi.checkpoint.owner import Owner
from adam_mpi.checkpoint.store_file import Stored
from adam_mpi.config import Config
from adam_mpi.sharding.spans import Piece, Spans, gathered

DESCRIPTION = "store.json"
# Clocks of nodes may differ by so much.
SKEW_NANOSECONDS = 60 * 10**9


class Sight(NamedTuple):
    """A file as a rank sees it; the same file looks the same from everywhere."""

    life: str
    name: str
    modified: int
    inode: int


@dataclass(frozen=True)
class Attempt:
    path: Path
    """Where the rank that has looked for it would find it."""
    told: dict[str, Any]
    files: dict[str, Stored] = field(default_factory=dict)
    """What is in each file, without the values."""
    readers: dict[str, int] = field(default_factory=dict)
    """The rank that reads each file."""
    shared: bool = True
    """Whether every rank sees all of them."""


@dataclass(frozen=True)
class Seen:
    last: int = 0
    """The number of the last life that has left anything, anywhere."""
    life: Attempt | None = None
    """The newest one that is whole."""
    trouble: tuple[str, ...] = ()
    """What is wrong with newer ones."""


def folder(config: Config, run: Path, identity: Identity) -> Path:
    """Where this rank finds the stores of a run; variables such as $TMPDIR are those of its node.

    Outside of the run directory the folder carries the run's identity, and keeps its name when the run gets another.
    """
    if not config.store.dir:
        return run / "store"
    base = Path(os.path.expandvars(config.store.dir))
    with suppress(OSError):
        if found := sorted(base.glob(f"*-{identity.id}")):
            return found[0]
    return base / f"{run.resolve().name}-{identity.id}"


def survey(comm: MPI.Comm, place: Path, identity: Identity, read: bool) -> Seen:
    """Collective: what there is; with `read` also which life is whole. `place`: where this rank looks."""
    seen = comm.allgather(look(place))
    lives = sorted({sight.life for sights in seen for sight in sights}, key=int, reverse=True)
    last, trouble = max(map(int, lives), default=0), list[str]()
    for name in lives if read else ():
        own = [[sight for sight in sights if sight.life == name] for sights in seen]
        try:
            return Seen(last, _read_life(comm, place / name, identity, own), tuple(trouble))
        except UserError as error:
            trouble.append(str(error))
    return Seen(last, None, tuple(trouble))


def look(place: Path) -> list[Sight]:
    try:
        found = [(path, path.stat()) for life in lives(place) for path in life.glob("server-*.h5")]
    except OSError:
        return []
    return [Sight(path.parent.name, path.name, status.st_mtime_ns, status.st_ino) for path, status in found]


def lives(place: Path) -> list[Path]:
    """The folders of all lives there, the oldest first."""
    return sorted((path for path in place.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name))


def forget(life: Path, identity: Identity, owner: Owner) -> None:
    """Remove those of earlier lives, as far as they lie beside this one and are of the same run.

    Raises LostRun where another job has the run.
    """
    owner.check()
    for path in lives(life.parent):
        if int(path.name) < int(life.name) and not _stranger(_told(path), identity):
            shutil.rmtree(path, ignore_errors=True)


def _stranger(told: dict[str, Any] | str, identity: Identity) -> bool:
    """Whether stores are marked as those of another run; the folder that they are in has told whose the others are."""
    return isinstance(told, dict) and told.get("run", identity.id) not in identity.known


def readers(seen: Sequence[Sequence[Sight]]) -> dict[str, int]:
    """Which rank reads each file of a life: of those that see its newest version, one that reads few. Pure."""
    seers: dict[Sight, list[int]] = defaultdict(list)
    newest: dict[str, Sight] = {}
    for rank, sights in enumerate(seen):
        for sight in sights:
            seers[sight].append(rank)
            newest[sight.name] = max(newest.get(sight.name, sight), sight)
    load: Counter[int] = Counter()
    chosen = {}
    for name in sorted(newest):
        chosen[name] = min(seers[newest[name]], key=lambda rank: (load[rank], rank))
        load[chosen[name]] += 1
    return chosen


def _read_life(comm: MPI.Comm, path: Path, identity: Identity, seen: Sequence[Sequence[Sight]]) -> Attempt:
    """Collective: each rank reads its files from end to end; everybody comes to the same result, or raises the same."""
    chosen = readers(seen)
    mine: dict[str, Stored | str] = {}
    for name in (name for name, rank in chosen.items() if rank == comm.rank):
        try:
            mine[name] = store_file.read(path / name, values=False)
        except UserError as error:
            mine[name] = str(error)
    words = comm.allgather((_told(path), mine))
    told = next((told for told, _ in words if isinstance(told, dict)), words[0][0])
    if isinstance(told, str):
        raise UserError(told)
    if any(_stranger(other, identity) for other, _ in words):
        raise UserError(f"{path}: is of another run; move it away, or give another store.dir")
    files = {name: stored for _, found in words for name, stored in found.items()}
    shared = all(set(sights) == set(seen[0]) for sights in seen)
    return Attempt(path, told, check(path, told, files), chosen, shared)


def _told(path: Path) -> dict[str, Any] | str:
    try:
        told = json.loads((path / DESCRIPTION).read_text())
    except (OSError, ValueError) as error:
        return f"{path}: {DESCRIPTION}: {error}"
    version = told.get("format") if isinstance(told, dict) else None
    return told if version == FORMAT else f"{path}: format {version}, this version reads {FORMAT}"


def check(path: Path, told: Mapping[str, Any], files: Mapping[str, Stored | str]) -> dict[str, Stored]:
    """The files of a life if they are all there and whole, or an error that says what is wrong. Pure."""
    whole: dict[str, Stored] = {}
    for name, stored in files.items():
        if isinstance(stored, str):
            raise UserError(stored)
        if stored.position is None or any(piece is None for piece in stored.pieces):
            raise UserError(f"{path / name}: not every shard has been written")
        if stored.oldest < told["began"] - SKEW_NANOSECONDS:
            raise UserError(f"{path / name}: is of another life, before this one began")
        whole[name] = stored
    found = sum(piece.size for stored in whole.values() for piece in stored.written)
    if found != told["parameters"]:
        raise UserError(f"{path}: {found} of {told['parameters']} parameters are here")
    return whole


def state(
    comm: MPI.Comm, path: Path, chosen: Mapping[str, int], size: int, spans: Iterable[tuple[int, int]]
) -> dict[str, Spans]:
    """Collective: what this rank wants of the flat vectors of a life, by name; its files are read where they lie."""
    passed = (_passed_round(comm, path / name, chosen[name], size) for name in sorted(chosen))
    return gathered(chain.from_iterable(passed), spans)


def _passed_round(comm: MPI.Comm, path: Path, reader: int, size: int) -> Iterator[Piece]:
    """Every shard of a file that one rank reads, on all ranks; or its error, on all ranks."""
    pieces: Iterator[Any] = iter(())
    if comm.rank == reader:
        pieces = _pieces(path, size)
    while (piece := comm.bcast(next(pieces, None), reader)) is not None:
        if isinstance(piece, UserError):
            raise piece
        yield piece


def _pieces(path: Path, size: int) -> Iterator[Piece | UserError]:
    try:
        yield from ((piece.start, piece.values) for piece in store_file.pieces(path, [(0, size)]))
    except UserError as error:
        yield error
