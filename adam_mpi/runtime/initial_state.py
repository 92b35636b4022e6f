"""What the roles of the first generation start from: new weights, or what a job resumes from."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from adam_mpi.checkpoint import model_file
from adam_mpi.checkpoint import resume as resume_points
from adam_mpi.cluster.world import World
from adam_mpi.config import Config
from adam_mpi.model import parameters
from adam_mpi.model.layers import LayerShape
from adam_mpi.runtime.job import Job
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.position import Position
from adam_mpi.sharding.spans import Spans
from adam_mpi.sharding.worker_shards import WorkerShards


def initial_state(job: Job, spans: Sequence[tuple[int, int]]) -> dict[str, Spans]:
    """Return the state of a server that has `spans` of the flat vector: what the job resumes from, or new weights."""
    if job.resume is not None:
        return resume_points.read_state(job.resume, parameters.total(job.shapes), spans)
    if job.config.inject.conserve:
        return {"weights": Spans(spans)}
    return {"weights": initial_weights(job.config, job.shapes, spans)}


def initial_weights(config: Config, shapes: tuple[LayerShape, ...], spans: Sequence[tuple[int, int]]) -> Spans:
    """Return the `spans` of the weights of `model.weights`, or of weights drawn with the seed of the run."""
    weights = Spans(spans)
    if config.model.weights:
        pieces = model_file.pieces(Path(config.model.weights), parameters.tensors(shapes), spans=spans)
    else:
        pieces = parameters.drawn(shapes, config.run.seed)
    for start, values in pieces:
        weights.put(start, values.reshape(-1))
    return weights


def initial_residual(world: World, job: Job, shards: WorkerShards) -> Spans | None:
    """Return what the codec of our replica had left out of the pushes of `shards` at the snapshot; None without one."""
    if job.resume is None or not CODECS[job.config.push.codec].feedback:
        return None
    spans = [(shard.start, shard.stop) for pushed in shards.pushed.values() for shard in pushed]
    return resume_points.read_residual(job.resume, world.place.replica or 0, world.layout.replicas, spans)


def initial_position(job: Job) -> Position:
    """Return where training starts, with room for the batches of an epoch."""
    # Uneven shares make a few batches more than even ones: at most one for each replica.
    room = -(-job.description.train // job.config.train.batch) + job.replicas
    position = Position(room)
    if job.resume is not None:
        known = job.resume.position
        position.epoch = known.epoch
        position.images = known.images
        position.clock = known.clock
        count = min(room, known.batches.size)
        position.batches[:count] = known.batches[:count]
    return position


def attempt_folder(job: Job, generation: int) -> Path:
    """Return the folder of the stores of `generation`, and make it: servers hold other shards in each generation."""
    folder = job.attempt.with_name(f"{int(job.attempt.name) + generation:04d}")
    # A folder that cannot be made is reported when the store is written.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
