"""What a run resumes from: its newest snapshot that is whole, or without clocks its store, where that is newer.

Whole means read from end to end and in agreement with its checksums; anything else is named and passed over.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from adam_mpi.base.errors import UserError
from adam_mpi.base.files import write_json
from adam_mpi.checkpoint import divergences, snapshot, store_file, stores
from adam_mpi.checkpoint.divergences import Divergences
from adam_mpi.checkpoint.hdf5_file import FORMAT
from adam_mpi.checkpoint.run_directory import Identity, read_metrics
from adam_mpi.checkpoint.stores import Attempt, FoundStores, StoreDescription
from adam_mpi.config import Config
from adam_mpi.optimizer.rules import rule_of
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.shards import Gathered, Piece, Spans, gathered
from adam_mpi.sharding.training_state import Position

NO_STORES = FoundStores()


@dataclass(frozen=True)
class Resume:
    """A state to resume from: `epochs` are complete, `position` has the finished batches of the next one."""

    kind: str
    """snapshot or store."""
    path: Path
    epochs: int
    position: Position
    best: tuple[float | None, int]
    """The best value of the monitored figure so far, and its epoch."""
    parameters: int
    replicas: int
    order: dict[str, Any]
    """The settings that the order of the images depended on."""
    note: str
    """A line about it for people."""
    parts: tuple[str, ...] = ()
    """The names of the vectors that it has."""
    residuals: tuple[tuple[str, ...], ...] = ()
    """Of a snapshot: replica -> the files with what its pushers' codecs had left out."""
    lost_pushes: int = 0
    """Acknowledged pushes that are not, or not everywhere, in a store."""
    complete_images: int | None = None
    """Of a store: images that every shard has, down to the oldest one."""
    readers: dict[str, int] | None = None
    """Of a store that not all ranks see: file -> the rank that reads it."""
    plateau: dict[str, Any] = field(default_factory=dict)
    """Of a snapshot: the state of the schedule plateau."""
    shared: Gathered | None = None
    """What the readers have broadcast, as far as this rank holds it."""

    @property
    def midway(self) -> bool:
        """Return whether the state that a job resumes from is inside an epoch."""
        return self.position.epoch > self.epochs

    @property
    def images(self) -> int:
        """Return how many images the state that a job resumes from has been trained on."""
        return self.position.images


def order_settings(config: Config) -> dict[str, Any]:
    """Return the settings that a position inside an epoch depends on: the same images in the same batches."""
    keys = {"data": ("set", "validation", "images", "skew"), "train": ("batch",), "run": ("seed",)}
    return {f"{section}.{key}": getattr(getattr(config, section), key) for section in keys for key in keys[section]}


def next_attempt(place: Path, seen: FoundStores = NO_STORES) -> Path:
    """Return the folder, in the `place` of all attempts, for the stores of a job that starts now."""
    return stores.next_attempt(place, seen.last)


def describe_store(folder: Path, config: Config, replicas: int, parameters: int, identity: Identity) -> None:
    """Write `store.json` into the `folder` of an attempt: what a reader of its stores must know besides."""
    folder.mkdir(parents=True, exist_ok=True)
    description: StoreDescription = {
        "format": FORMAT,
        "run": identity.id,
        "parameters": parameters,
        "replicas": replicas,
        "interval": config.store.interval,
        "order": order_settings(config),
        "began": time.time_ns(),
    }
    write_json(folder / stores.DESCRIPTION, dict(description))


def find_resume_point(config: Config, run: Path, seen: FoundStores = NO_STORES) -> tuple[Resume | None, list[str]]:
    """Return what `run` resumes from, or None; and what was passed over, a line each. `seen`: its stores."""
    diverged = divergences.read(run)
    found, trouble = _newest_whole_snapshot(run, diverged)
    if not config.asynchronous:
        return found, trouble
    if seen.attempt is not None and seen.attempt.description["began"] < diverged.last * 1e9:
        return found, [*trouble, f"store {seen.attempt.path}: training diverged after it was begun", *seen.trouble]
    stored = None if seen.attempt is None else _from_store(seen.attempt, run, config)
    # A snapshot has every image up to its own in every shard; of a store the oldest shard says how much that is.
    complete = None if stored is None else stored.complete_images
    newer = complete is not None and (found is None or complete > found.images)
    return stored if newer else found, [*trouble, *seen.trouble]


def _newest_whole_snapshot(run: Path, diverged: Divergences) -> tuple[Resume | None, list[str]]:
    """Return the newest snapshot that a job can resume from, or None, and what was passed over."""
    trouble: list[str] = []
    for path in snapshot.list_snapshots(run / "snapshots")[::-1]:
        try:
            if diverged.spoils(snapshot.manifest(path)["time"]):
                raise UserError(f"{path}: training diverged before it was taken")
            return from_snapshot(path), trouble
        except UserError as error:
            trouble.append(str(error))
    return None, trouble


def from_snapshot(path: Path) -> Resume:
    """Return a resume point, the state in the snapshot `path`; raise UserError if it is not whole."""
    manifest = snapshot.manifest(path)
    position = snapshot.check_snapshot(path)
    if manifest["batches"] == 0:
        position.epoch = manifest["epochs"]
    files = tuple(manifest["residuals"])
    strips = manifest["strips"]
    return Resume(
        kind="snapshot",
        path=path,
        epochs=manifest["epochs"],
        position=position,
        best=(manifest["best"], manifest["best_epoch"]),
        parameters=manifest["parameters"],
        replicas=manifest["replicas"],
        order=manifest["order"],
        note=f"snapshot {path.name}, nothing lost up to it",
        parts=snapshot.stored_parts(path, manifest["files"]),
        plateau=manifest.get("plateau", {}),
        residuals=tuple(files[first : first + strips] for first in range(0, len(files), strips)),
    )


def _from_store(attempt: Attempt, run: Path, config: Config) -> Resume:
    """Return a resume point, the state in the stores of `attempt`."""
    contents = attempt.files.values()
    position = merge_positions([Position.unpack(found.position) for found in contents if found.position is not None])
    counts = [piece.images for content in contents for piece in content.written]
    return Resume(
        kind="store",
        path=attempt.path,
        epochs=max(position.epoch - 1, 0),
        position=position,
        best=_best_monitored(run),
        parameters=attempt.description["parameters"],
        replicas=attempt.description["replicas"],
        order=attempt.description["order"],
        note=_describe_loss(attempt, counts, config),
        parts=next(iter(contents)).parts,
        lost_pushes=max(content.lost[0] for content in contents),
        complete_images=min([position.images, *counts]),
        readers=None if attempt.shared else attempt.readers,
    )


def _describe_loss(attempt: Attempt, counts: Sequence[int], config: Config) -> str:
    """Return a line about what a store to resume from lacks; `counts`: the images of each shard."""
    contents = attempt.files.values()
    pushes = max(content.lost[0] for content in contents)
    images = max(content.lost[1] for content in contents)
    age = max((content.age for content in contents if content.age is not None), default=None)
    note = (
        f"store {attempt.path}: shards of {min(counts)} to {max(counts)} images; up to {pushes} acknowledged pushes of "
        f"{images} images are lost"
    )
    if pushes and age is not None:
        note += f", none older than {age:.1f} s when the job ended"
    if CODECS[config.push.codec].feedback:
        note += f", and what {config.push.codec} had left out until then"
    return note


def merge_positions(positions: list[Position]) -> Position:
    """Return the position to resume from: batches of the oldest epoch that all servers have applied. Pure."""
    oldest = min(positions, key=lambda position: (position.epoch, position.images))
    result = Position(oldest.batches.size, oldest.epoch, oldest.images, oldest.clock)
    result.lasted = oldest.lasted
    of_epoch = [position.batches for position in positions if position.epoch == oldest.epoch]
    result.batches[:] = np.logical_and.reduce(of_epoch)
    return result


def _best_monitored(run: Path) -> tuple[float | None, int]:
    """Return the best monitored value and its epoch from the last summary of the `run` that is resumed."""
    try:
        summary = json.loads((run / "summary.json").read_text())
        return summary[f"best_{summary['monitor']['name']}"], summary["best_epoch"]
    except (OSError, ValueError, KeyError):
        return None, 0


def describe_lost_work(resume: Resume, run: Path, config: Config) -> str:
    """Return a text about acknowledged work of the last job that `resume` lacks and that is computed again.

    It goes by what the coordinator wrote last: up to `observe.interval` seconds of work are not counted.
    """
    images = max(0, _acknowledged_images(run) - resume.images)
    pushes = -(-images // config.push.images) if config.asynchronous else -(-images // config.train.batch)
    unit = "pushes" if config.asynchronous else "clocks"
    return f"; {pushes} acknowledged {unit} ({images} images) are lost and computed again"


def _acknowledged_images(run: Path) -> int:
    """Return the images of acknowledged pushes of the run to resume, as its metrics reported them last."""
    with suppress(OSError, IndexError, KeyError):
        return read_metrics(run)[-1]["images_trained"]
    return 0


def share_store(resume: Resume, comm: MPI.Comm, place: Path, spans: Sequence[tuple[int, int]]) -> Resume:
    """Return `resume` with what lies on disks of single nodes: their ranks read and broadcast it (collective).

    `place`: this rank's folder of stores; `spans`: what it holds of the flat vector.
    """
    if resume.readers is None:
        return resume
    path = place / resume.path.name
    return replace(resume, shared=stores.read_everywhere(comm, path, resume.readers, resume.parameters, spans))


def read_state(resume: Resume, size: int, spans: Sequence[tuple[int, int]]) -> Gathered:
    """Return the resumed weights, optimizer state and average in `spans` of a model of `size` parameters.

    What was shared is not read again.
    """
    return resume.shared if resume.shared is not None else gathered(_checked_pieces(resume, size, spans), spans)


def _checked_pieces(resume: Resume, size: int, spans: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """Yield the shards of the resumed state that meet `spans`; raise UserError where one does not fit."""
    for start, values in _pieces_of_state(resume, spans):
        if start + len(values["weights"]) > size:
            raise UserError(f"{resume.path}: shard {start} does not fit this model of {size} parameters")
        yield start, values


def _pieces_of_state(resume: Resume, spans: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """Yield the shards of the resumed state that meet `spans`."""
    if resume.kind == "snapshot":
        yield from snapshot.snapshot_pieces(resume.path, snapshot.manifest(resume.path)["files"], spans)
        return
    for path in sorted(resume.path.glob("server-*.h5")):
        yield from ((piece.start, piece.values) for piece in store_file.store_pieces(path, spans))


def read_residual(resume: Resume, replica: int, replicas: int, spans: Sequence[tuple[int, int]]) -> Spans:
    """Return the resumed residual of `replica` in `spans`: its own and, with fewer replicas now, others' too."""
    total = Spans(spans)
    for files in resume.residuals[replica::replicas]:
        for found in gathered(snapshot.snapshot_pieces(resume.path, files, spans), spans).values():
            assert isinstance(found, Spans), "a residual has vectors only"
            total.add(found)
    return total


def check_resume(resume: Resume, config: Config, replicas: int, parameters: int) -> str:
    """Return what to print about resuming with this `config`; raise a UserError where it cannot be done."""
    if resume.parameters != parameters:
        held = f"{resume.path}: holds {resume.parameters} parameters, this model has {parameters}"
        raise UserError(f"{held}; resume with the run's config")
    if resume.midway:
        for key, value in order_settings(config).items():
            if resume.order[key] != value:
                was = resume.order[key]
                raise UserError(f"{key} = {value!r}: the run is inside an epoch begun with {was!r}; resume with that")
    notes = []
    rule = rule_of(config.optimizer)
    if lacking := [name for name in rule.states if name not in resume.parts]:
        notes.append(
            f"optimizer: {rule.name} begins without {', '.join(lacking)}, which the {resume.kind} does not have"
        )
    if resume.residuals and not CODECS[config.push.codec].feedback:
        notes.append(f"push.codec = {config.push.codec}: what the run's codec had left out until now is lost")
    if config.data.skew == "none" or resume.replicas == replicas:
        return "; ".join(notes)
    shares = f"data.skew = {config.data.skew}: the shares were drawn for {resume.replicas} replicas, now {replicas}"
    if resume.midway:
        raise UserError(f"{shares}; resume with {resume.replicas}, or from an epoch's end")
    return "; ".join([*notes, f"{shares}; they are drawn again"])
