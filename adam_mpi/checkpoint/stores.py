"""The stores of a run, wherever they lie: on a file system that all nodes share, or each on the disk of its node.

An attempt is one start of the run; its folder has a file per server. Every rank says which files it sees; each file is
read by one rank that sees it, and where not all ranks can read all files, the content is broadcast and each rank keeps
its share.
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
from typing import Any, NamedTuple, TypedDict

from mpi4py import MPI

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import store_file
from adam_mpi.checkpoint.hdf5_file import check_format
from adam_mpi.checkpoint.owner import Owner
from adam_mpi.checkpoint.run_directory import Identity
from adam_mpi.checkpoint.store_file import StoreContent
from adam_mpi.config import Config
from adam_mpi.sharding.shards import Gathered, Piece, gathered

DESCRIPTION = "store.json"
# Clocks of nodes may differ by as much as this.
SKEW_NANOSECONDS = 60 * 10**9


class StoreDescription(TypedDict):
    """The content of `store.json`: what a reader of the stores of an attempt must know besides."""

    format: int
    run: str
    """Identity of the run."""
    parameters: int
    replicas: int
    interval: float
    order: dict[str, Any]
    """What the order of the images depends on."""
    began: int
    """When the attempt began, in nanoseconds since 1970."""


class VisibleFile(NamedTuple):
    """A file as a rank sees it; the same file looks the same from everywhere."""

    attempt: str
    name: str
    modified: int
    inode: int


@dataclass(frozen=True)
class Attempt:
    """The stores that one start of the run has left."""

    path: Path
    """Where the rank that has searched for it would find it."""
    description: StoreDescription
    files: dict[str, StoreContent] = field(default_factory=dict)
    """File -> its content, without the values."""
    readers: dict[str, int] = field(default_factory=dict)
    """File -> the rank that reads it."""
    shared: bool = True
    """Whether every rank sees all files."""


@dataclass(frozen=True)
class FoundStores:
    """The stores that were found."""

    last: int = 0
    """The number of the last attempt that has left anything, anywhere."""
    attempt: Attempt | None = None
    """The newest attempt that is whole."""
    trouble: tuple[str, ...] = ()
    """What is wrong with newer ones."""


def folder(config: Config, run: Path, identity: Identity) -> Path:
    """Return the folder in which this rank finds the stores of `run`; variables such as $TMPDIR are those of its node.

    Outside the run directory the folder carries the run's identity, and keeps its name when the run gets another.
    """
    if not config.store.dir:
        return run / "store"
    base = Path(os.path.expandvars(config.store.dir))
    with suppress(OSError):
        if found := sorted(base.glob(f"*-{identity.id}")):
            return found[0]
    return base / f"{run.resolve().name}-{identity.id}"


def find_stores(comm: MPI.Comm, place: Path, identity: Identity, read: bool) -> FoundStores:
    """Return the stores that the ranks find, each in its own `place`; with `read` also which attempt is whole.

    Collective.
    """
    visible = comm.allgather(visible_files(place))
    attempts = sorted({file.attempt for files in visible for file in files}, key=int, reverse=True)
    last = max(map(int, attempts), default=0)
    trouble: list[str] = []
    for name in attempts if read else ():
        files = [[file for file in files if file.attempt == name] for files in visible]
        try:
            return FoundStores(last, _read_attempt(comm, place / name, identity, files), tuple(trouble))
        except UserError as error:
            trouble.append(str(error))
    return FoundStores(last, None, tuple(trouble))


def visible_files(place: Path) -> list[VisibleFile]:
    """Return the store files of all attempts that this rank sees in `place`."""
    try:
        found = [(path, path.stat()) for attempt in attempt_folders(place) for path in attempt.glob("server-*.h5")]
    except OSError:
        return []
    return [VisibleFile(path.parent.name, path.name, status.st_mtime_ns, status.st_ino) for path, status in found]


def attempt_folders(place: Path) -> list[Path]:
    """Return the store folders of all attempts in `place`, the oldest first."""
    return sorted((path for path in place.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name))


def next_attempt(place: Path, last: int = 0) -> Path:
    """Return the store folder for a job that starts now; `last`: the last attempt number that any rank has seen."""
    numbers = [int(path.name) for path in attempt_folders(place)]
    return place / f"{max([last, *numbers]) + 1:04d}"


def remove_earlier_attempts(attempt: Path, identity: Identity, owner: Owner) -> None:
    """Remove the stores of earlier attempts that lie beside `attempt` and belong to the same run.

    Raises LostRun where another job has the run.
    """
    owner.check()
    for path in attempt_folders(attempt.parent):
        if int(path.name) < int(attempt.name) and not _of_other_run(_read_description(path), identity):
            shutil.rmtree(path, ignore_errors=True)


def _of_other_run(description: StoreDescription | str, identity: Identity) -> bool:
    """Return whether stores are marked as those of another run; unmarked ones belong to the run of their folder."""
    return not isinstance(description, str) and description.get("run", identity.id) not in identity.known


def assign_readers(visible: Sequence[Sequence[VisibleFile]]) -> dict[str, int]:
    """Return the rank that reads each store file: of those that see its newest version, one that reads few. Pure.

    `visible`: the files that each rank sees.
    """
    seers: dict[VisibleFile, list[int]] = defaultdict(list)
    newest: dict[str, VisibleFile] = {}
    for rank, files in enumerate(visible):
        for file in files:
            seers[file].append(rank)
            newest[file.name] = max(newest.get(file.name, file), file)
    load: Counter[int] = Counter()
    readers = {}
    for name in sorted(newest):
        readers[name] = min(seers[newest[name]], key=lambda rank: (load[rank], rank))
        load[readers[name]] += 1
    return readers


def _read_attempt(comm: MPI.Comm, path: Path, identity: Identity, visible: Sequence[Sequence[VisibleFile]]) -> Attempt:
    """Have each rank read its store files from end to end; all return the same attempt, or raise the same error.

    Collective.
    """
    readers = assign_readers(visible)
    mine: dict[str, StoreContent | str] = {}
    for name in (name for name, rank in readers.items() if rank == comm.rank):
        try:
            mine[name] = store_file.read_store(path / name, values=False)
        except UserError as error:
            mine[name] = str(error)
    answers = comm.allgather((_read_description(path), mine))
    descriptions = [description for description, _ in answers]
    description = next((found for found in descriptions if not isinstance(found, str)), descriptions[0])
    if isinstance(description, str):
        raise UserError(description)
    if any(_of_other_run(other, identity) for other in descriptions):
        raise UserError(f"{path}: is of another run; move it away, or give another store.dir")
    files = {name: content for _, found in answers for name, content in found.items()}
    shared = all(set(sight) == set(visible[0]) for sight in visible)
    return Attempt(path, description, check_files(path, description, files), readers, shared)


def _read_description(path: Path) -> StoreDescription | str:
    """Return the description of the stores of the attempt `path`, or the text of an error."""
    try:
        found = json.loads((path / DESCRIPTION).read_text())
        check_format(path, found.get("format") if isinstance(found, dict) else None)
    except (OSError, ValueError) as error:
        return f"{path}: {DESCRIPTION}: {error}"
    except UserError as error:
        return str(error)
    return found


def check_files(
    path: Path, description: StoreDescription, files: Mapping[str, StoreContent | str]
) -> dict[str, StoreContent]:
    """Return the store files of the attempt `path` if all are there and whole; raise a UserError otherwise. Pure."""
    whole: dict[str, StoreContent] = {}
    for name, content in files.items():
        if isinstance(content, str):
            raise UserError(content)
        if content.position is None or any(piece is None for piece in content.pieces):
            raise UserError(f"{path / name}: not every shard has been written")
        if content.oldest < description["began"] - SKEW_NANOSECONDS:
            raise UserError(f"{path / name}: is of another attempt, before this one began")
        whole[name] = content
    found = sum(piece.size for content in whole.values() for piece in content.written)
    if found != description["parameters"]:
        raise UserError(f"{path}: {found} of {description['parameters']} parameters are here")
    return whole


def read_everywhere(
    comm: MPI.Comm, path: Path, readers: Mapping[str, int], size: int, spans: Iterable[tuple[int, int]]
) -> Gathered:
    """Return this rank's `spans` of the vectors in an attempt's stores; each file is read by one rank.

    Collective. `readers`: file -> the rank that reads it; `size`: parameters of the model.
    """
    received = (_broadcast_file(comm, path / name, readers[name], size) for name in sorted(readers))
    return gathered(chain.from_iterable(received), spans)


def _broadcast_file(comm: MPI.Comm, path: Path, reader: int, size: int) -> Iterator[Piece]:
    """Yield every shard of the store file that `reader` reads, on all ranks; raise its error on all ranks."""
    pieces: Iterator[Piece | UserError] = iter(())
    if comm.rank == reader:
        pieces = _pieces_or_error(path, size)
    while (piece := comm.bcast(next(pieces, None), reader)) is not None:
        if isinstance(piece, UserError):
            raise piece
        yield piece


def _pieces_or_error(path: Path, size: int) -> Iterator[Piece | UserError]:
    """Yield the shards of the store file `path`, or the error that reading it raises."""
    try:
        yield from ((piece.start, piece.values) for piece in store_file.store_pieces(path, [(0, size)]))
    except UserError as error:
        yield error
