"""What a run goes on from: its newest snapshot that is whole, or without clocks its store, where that is newer.

Whole is what has been read and agrees with its checksums; anything else is named and passed over.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.base.errors import UserError
from adam_mpi.base.files import write_json
from adam_mpi.checkpoint import snapshot, store_file, stores
from adam_mpi.checkpoint.hdf5_file import FORMAT
from adam_mpi.checkpoint.identity import Identity
from adam_mpi.checkpoint.run_directory import read_metrics
from adam_mpi.checkpoint.stores import Attempt, Seen
from adam_mpi.config import Config
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.spans import Piece, Spans, gathered

NOTHING_SEEN = Seen()


@dataclass(frozen=True)
class Resume:
    """Where to go on: `epochs` are complete, `position` has the batches that are done of the one after."""

    kind: str
    path: Path
    epochs: int
    position: Position
    best: tuple[float, int]
    """The best validation accuracy so far, and its epoch."""
    parameters: int
    replicas: int
    settings: dict[str, Any]
    """What the order of the images depended on."""
    note: str
    residuals: tuple[tuple[str, ...], ...] = ()
    """Files of a snapshot with what its pushers' codec had left out, those of each replica."""
    lost_pushes: int = 0
    """Acknowledged ones that are not, or not everywhere, in a store."""
    least: int | None = None
    """Images that all of a store has, down to its oldest shard."""
    readers: dict[str, int] | None = None
    """The rank that reads each file of a store, where not all ranks see all of them."""
    shared: dict[str, Spans] | None = None
    """What they have read, as far as this rank holds it."""

    @property
    def midway(self) -> bool:
        return self.position.epoch > self.epochs

    @property
    def images(self) -> int:
        return self.position.images


def order_settings(config: Config) -> dict[str, Any]:
    """What a position inside an epoch is only good for: the same images in the same batches."""
    keys = {"data": ("set", "validation", "images", "skew"), "train": ("batch",), "run": ("seed",)}
    return {f"{section}.{key}": getattr(getattr(config, section), key) for section in keys for key in keys[section]}


def next_life(place: Path, seen: Seen = NOTHING_SEEN) -> Path:
    """The folder of the store of a job that starts now, after all that anybody has seen; `place`: of all of them."""
    last = max([seen.last, *(int(path.name) for path in stores.lives(place))])
    return place / f"{last + 1:04d}"


def find(config: Config, run: Path, seen: Seen = NOTHING_SEEN) -> tuple[Resume | None, list[str]]:
    """What to go on from, and what was passed over and why; `seen`: the stores."""
    found, trouble = _first_whole(snapshot.own(run / "snapshots")[::-1], _from_snapshot)
    if not config.asynchronous:
        return found, trouble
    stored = None if seen.life is None else _from_store(seen.life, run, config)
    # A snapshot has every image up to its own in every shard; of a store the oldest shard says how much that is.
    newer = stored is not None and stored.least is not None and (found is None or stored.least > found.images)
    return stored if newer else found, [*trouble, *seen.trouble]


def _first_whole(paths: list[Path], read: Any) -> tuple[Resume | None, list[str]]:
    trouble: list[str] = []
    for path in paths:
        try:
            return read(path), trouble
        except UserError as error:
            trouble.append(str(error))
    return None, trouble


def _from_snapshot(path: Path) -> Resume:
    told, position = snapshot.manifest(path), snapshot.check(path)
    if told["batches"] == 0:
        position.epoch = told["epochs"]
    note = f"snapshot {path.name}, nothing lost up to it"
    best = (told["best"], told["best_epoch"])
    known = told["parameters"], told["replicas"], told["order"]
    files, strips = tuple(told["residuals"]), told["strips"]
    residuals = tuple(files[first : first + strips] for first in range(0, len(files), strips))
    return Resume("snapshot", path, told["epochs"], position, best, *known, note, residuals)


def _from_store(life: Attempt, run: Path, config: Config) -> Resume:
    folder, files = life.path, life.files.values()
    position = merged([Position.unpack(stored.position) for stored in files if stored.position is not None])
    counts = [piece.images for stored in files for piece in stored.written]
    pushes, images = (max(lost) for lost in zip(*(stored.lost for stored in files), strict=True))
    age = max((stored.age for stored in files if stored.age is not None), default=None)
    note = (
        f"store {folder}: shards of {min(counts)} to {max(counts)} images; up to {pushes} acknowledged pushes of "
        f"{images} images are lost"
    )
    if pushes and age is not None:
        note += f", none older than {age:.1f} s when the job ended"
    if CODECS[config.push.codec].feedback:
        note += f", and what {config.push.codec} had left out until then"
    known = life.told["parameters"], life.told["replicas"], life.told["order"]
    epochs, readers = max(position.epoch - 1, 0), None if life.shared else life.readers
    least = min([position.images, *counts])
    return Resume(
        "store", folder, epochs, position, _best(run), *known, note, lost_pushes=pushes, least=least, readers=readers
    )


def cost(resume: Resume, run: Path, config: Config) -> str:
    """What the end of the job before has cost: work that was acknowledged and is not in what the run goes on from.

    By what its head had written last: up to `observe.interval` seconds of it are not counted.
    """
    images = max(0, _acknowledged(run) - resume.images)
    pushes = -(-images // config.push.images) if config.asynchronous else -(-images // config.train.batch)
    unit = "pushes" if config.asynchronous else "clocks"
    return f"; {pushes} acknowledged {unit} ({images} images) are lost and computed again"


def _acknowledged(run: Path) -> int:
    """Images of acknowledged pushes since the training began, as they were told last."""
    with suppress(OSError, IndexError, KeyError):
        return read_metrics(run)[-1]["images_trained"]
    return 0


def describe_store(folder: Path, config: Config, replicas: int, parameters: int, identity: Identity) -> None:
    """What whoever reads the stores of a job must know besides."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"format": FORMAT, "run": identity.id, "parameters": parameters, "replicas": replicas}
    told |= {"interval": config.store.interval, "order": order_settings(config), "began": time.time_ns()}
    write_json(folder / stores.DESCRIPTION, told)


def merged(positions: list[Position]) -> Position:
    """What all servers have: batches of the oldest epoch that every one of them has applied. Pure."""
    oldest = min(positions, key=lambda position: (position.epoch, position.images))
    result = Position(oldest.batches.size, oldest.epoch, oldest.images, oldest.clock)
    of_epoch = [position.batches for position in positions if position.epoch == oldest.epoch]
    result.batches[:] = np.logical_and.reduce(of_epoch)
    return result


def _best(run: Path) -> tuple[float, int]:
    """The store does not know it: what the summary said last."""
    try:
        summary = json.loads((run / "summary.json").read_text())
        return summary["best_accuracy"], summary["best_epoch"]
    except (OSError, ValueError, KeyError):
        return -1.0, 0


def share(resume: Resume, comm: MPI.Comm, place: Path, spans: Sequence[tuple[int, int]]) -> Resume:
    """Collective: have what lies on disks of single nodes read there and passed round.

    `place`: this rank's folder; `spans`: what it holds of the flat vector.
    """
    if resume.readers is None:
        return resume
    path = place / resume.path.name
    return replace(resume, shared=stores.state(comm, path, resume.readers, resume.parameters, spans))


def state(resume: Resume, size: int, spans: Sequence[tuple[int, int]]) -> dict[str, Spans]:
    """Weights, state of the optimizer, and average if there is one, of a model of so many parameters, in these spans:
    those that were shared, or else read now.
    """
    return resume.shared if resume.shared is not None else gathered(_checked(resume, size, spans), spans)


def _checked(resume: Resume, size: int, spans: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    for start, values in _pieces(resume, spans):
        if start + len(values["weights"]) > size:
            raise UserError(f"{resume.path}: shard {start} does not fit this model of {size} parameters")
        yield start, values


def residual(resume: Resume, replica: int, replicas: int, spans: Sequence[tuple[int, int]]) -> Spans:
    """What a replica carries on of these spans: what it had left out itself, and where there are fewer now, a share of
    the others'."""
    total = Spans(spans)
    for files in resume.residuals[replica::replicas]:
        for found in gathered(snapshot.pieces(resume.path, files, spans), spans).values():
            total.add(found)
    return total


def _pieces(resume: Resume, spans: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """The shards that meet the spans."""
    if resume.kind == "snapshot":
        yield from snapshot.pieces(resume.path, snapshot.manifest(resume.path)["files"], spans)
        return
    for path in sorted(resume.path.glob("server-*.h5")):
        yield from ((piece.start, piece.values) for piece in store_file.pieces(path, spans))


def check(resume: Resume, config: Config, replicas: int, parameters: int) -> str:
    """Refuse what cannot go on; returns what should be said about the rest."""
    if resume.parameters != parameters:
        held = f"{resume.path}: holds {resume.parameters} parameters, this model has {parameters}"
        raise UserError(f"{held}; resume with the run's config")
    if resume.midway:
        for key, value in order_settings(config).items():
            if resume.settings[key] != value:
                was = resume.settings[key]
                raise UserError(f"{key} = {value!r}: the run is inside an epoch begun with {was!r}; resume with that")
    notes = []
    if resume.residuals and not CODECS[config.push.codec].feedback:
        notes.append(f"push.codec = {config.push.codec}: what the run's codec had left out until now is lost")
    if config.data.skew == "none" or resume.replicas == replicas:
        return "; ".join(notes)
    shares = f"data.skew = {config.data.skew}: the shares were drawn for {resume.replicas} replicas, now {replicas}"
    if resume.midway:
        raise UserError(f"{shares}; resume with {resume.replicas}, or from an epoch's end")
    return "; ".join([*notes, f"{shares}; they are drawn anew"])
