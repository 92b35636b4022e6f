"""Diagnostics of a worker: the first NaN, norms and dead units of layers, what it waits for, and its statistics."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from adam_mpi.cluster.role_statistics import NotFiniteStatistics
from adam_mpi.model.exchange import Exchange
from adam_mpi.model.graph_context import GraphContext
from adam_mpi.model.graph_layers import GraphLayers
from adam_mpi.model.input_format import SCALED_BYTES, InputFormat
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.parameters import Tensor, rectified, tensors, views
from adam_mpi.model.reference_context import Context
from adam_mpi.sharding.batches import Batch

if TYPE_CHECKING:
    from adam_mpi.worker.worker import Worker

MOST_IMAGES = 64
"""The most images of a batch that are named."""


@dataclass(frozen=True)
class Trouble:
    """The first number of a worker that was not finite."""

    what: str
    """A description, such as "the output of conv2"."""
    layer: str
    step: int
    """The number of batches that its thread, or of pushes that its rank, had begun by then."""
    epoch: int
    batches: list[int]
    images: list[int]

    def stats(self) -> dict[str, Any]:
        """Return the fields of the first NaN that was found, for a message."""
        return asdict(self)


def describe(trouble: NotFiniteStatistics) -> str:
    """Return a sentence about `trouble`, the fields of a Trouble."""
    batches = ", ".join(map(str, trouble["batches"]))
    return f"{trouble['what']} is not finite: step {trouble['step']}, epoch {trouble['epoch']}, batch {batches}"


class NaNDetector:
    """Find the layer that made the first NaN of one trainer thread."""

    def __init__(self, shapes: Sequence[LayerShape], form: InputFormat = SCALED_BYTES) -> None:
        self.shapes = shapes
        self.form = form
        self.steps = 0
        self.trouble: Trouble | None = None

    def look(self, loss: float, weights: np.ndarray, batch: Batch) -> None:
        """Look for what is not finite if `loss`, that of `batch` on `weights`, is not; a finite one costs nothing."""
        self.steps += 1
        if np.isfinite(loss) or self.trouble is not None:
            return
        found = suspects(self.shapes, weights.copy(), batch.pixels, self.form)
        what, layer = next(found, ("the loss", ""))
        images = batch.ids[:MOST_IMAGES].tolist()
        self.trouble = Trouble(
            what=what, layer=layer, step=self.steps, epoch=batch.epoch, batches=[batch.number], images=images
        )


def suspects(
    shapes: Sequence[LayerShape], weights: np.ndarray, pixels: np.ndarray, form: InputFormat = SCALED_BYTES
) -> Iterator[tuple[str, str]]:
    """Yield (what, layer) of all that is not finite in a forward pass of `pixels`, in the order of the layers."""
    if not np.isfinite(pixels).all():
        yield "the input", "input"
    named = views(weights, tensors(shapes))
    owned: dict[str, list[str]] = {}
    for tensor in tensors(shapes):
        owned.setdefault(tensor.layer, []).append(tensor.name)
    # A strip alone does not know what its neighbors would have sent.
    whole = not any(isinstance(shape.layer, Exchange) for shape in shapes)
    outputs = activations(shapes, weights, pixels, form) if whole else {}
    for shape in shapes:
        for name in owned.get(shape.name, ()):
            if not np.isfinite(named[name]).all():
                yield name, shape.name
        if shape.name in outputs and not np.isfinite(outputs[shape.name]).all():
            yield f"the output of {shape.name}", shape.name


SHARE = 0.005
"""The fraction of a worker's time that a Probe may take."""


class Probe:
    """Look at pushes from time to time, less often where the model is large."""

    def __init__(self, shapes: Sequence[LayerShape], interval: float) -> None:
        """Look at most every `interval` seconds."""
        self.tensors = tensors(shapes)
        self.interval = interval
        self.next = 0.0
        """When to look next."""
        self.rectified = rectified(shapes)
        self.layers: dict[str, dict[str, float]] = {}

    def look(self, values: np.ndarray, images: int, weights: np.ndarray) -> None:
        """Update `layers` if it is time; `values` are sums of gradients over `images` images."""
        start = time.monotonic()
        if start < self.next or not images:
            return
        self.layers = figures(self.tensors, self.rectified, values, images, weights)
        self.next = start + max(self.interval, (time.monotonic() - start) / SHARE)


def figures(
    tensors: Sequence[Tensor], rectified: set[str], values: np.ndarray, images: int, weights: np.ndarray
) -> dict[str, dict[str, float]]:
    """Return, by layer, the norms of its weights and of the mean gradient, and the fraction of dead units. Pure."""
    squares: dict[str, dict[str, float]] = {}
    for tensor in tensors:
        part = slice(tensor.offset, tensor.offset + tensor.size)
        layer = squares.setdefault(tensor.layer, {"weight_norm": 0.0, "gradient_norm": 0.0})
        # Diverged weights overflow.
        with np.errstate(over="ignore", invalid="ignore"):
            layer["weight_norm"] += float(weights[part] @ weights[part])
            layer["gradient_norm"] += float(values[part] @ values[part]) / images**2
        # No error comes through relu to a unit that is active for none of the images: its bias has no gradient at all.
        if tensor.name.endswith("/bias") and tensor.layer in rectified:
            layer["dead"] = round(float(np.mean(values[part] == 0)), 4)
    return {
        name: {key: value if key == "dead" else float(f"{value**0.5:.5g}") for key, value in layer.items()}
        for name, layer in squares.items()
    }


def activations(
    shapes: Sequence[LayerShape], weights: np.ndarray, pixels: np.ndarray, form: InputFormat = SCALED_BYTES
) -> dict[str, np.ndarray]:
    """Return, by layer, its output (images, channels, rows, columns); without dropout, the last before softmax."""
    if isinstance(shapes, GraphLayers):
        return GraphContext(shapes, len(pixels), seed=0).outputs(weights, pixels, [shape.name for shape in shapes])
    context = Context(shapes, len(pixels), seed=0, dtype=np.float32, form=form)
    return {shape.name: output for shape, output in zip(shapes, context.walk(weights, pixels), strict=True)}


class Waits:
    """Count the time of idle threads; it is sampled in every step of the worker.

    The time since the last sample counts for what is missing now.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        """What the threads waited for -> for how long."""
        self.whom: dict[str, list[int]] = {}
        """What the threads waited for -> the members of the job that could end the last such wait."""
        self.last = time.perf_counter()

    def count(self, worker: "Worker") -> None:
        """Count the time since the last call for what the idle threads of `worker` lack now."""
        now = time.perf_counter()
        idle = worker.replica.idle_share
        if idle:
            missing, ranks = waiting_reason(worker)
            self.whom[missing] = [worker.world.layout.places[rank].member for rank in ranks]
            self.seconds[missing] += (now - self.last) * idle
        self.last = now

    def stats(self) -> dict[str, Any]:
        """Return the seconds that trainer threads waited and for which members, by what they waited for."""
        return {"waits": dict(self.seconds), "whom": self.whom}


def waiting_reason(worker: "Worker") -> tuple[str, list[int]]:
    """Return what a thread of `worker` without a task waits for, and the ranks that could end the wait."""
    replica = worker.replica
    data = worker.current.data
    pulls = worker.current.pulls
    if replica.waits_for_strips:
        return "strips", [rank for rank in worker.world.layout.strips(worker.world.rank) if rank != worker.world.rank]
    unapplied = [sender.server for sender in worker.pushes.rings.senders if sender.sent or sender.waiting]
    if data.drained:
        return ("pushes", unapplied) if unapplied else ("others", [])
    if replica.computes_share:
        return "threads", []
    if worker.current.fresh and data.arrived:
        # Every gradient buffer is on its way to the servers.
        return "pushes", unapplied
    if worker.current.fresh:
        return "data", data.asked
    if pulls.least is not None and pulls.reading == "heads":
        return "clock", []
    return "weights", pulls.servers


def worker_statistics(worker: "Worker") -> dict[str, Any]:
    """Return the statistics of `worker`, as the coordinator receives them."""
    pushes = worker.pushes
    pulled = worker.pulled
    trouble = _first_trouble(worker)
    return {
        "role": "worker",
        "rank": worker.world.place.member,
        "cpu": time.process_time(),
        "images": worker.held.images,
        "busy": worker.replica.busy,
        "starved": worker.waits.seconds["data"],
        "clock_wait": pulled["waited"],
        "queue": len(worker.current.data.arrived),
        "unacknowledged": len(pushes.unacknowledged),
        "pushes": {
            "sent": pushes.sent,
            "acknowledged": pushes.completed,
            "bytes": pushes.bytes,
            "last": pushes.last[0],
        },
        "carried": worker.pushes.carried,
        "left_behind": worker.left_behind,
        "pulls": {"count": pulled["count"], "bytes": pulled["bytes"]},
        "traffic": dict(pushes.traffic) | dict(worker.pull_traffic_before + worker.current.pulls.traffic),
        "layers": worker.probe.layers if worker.probe else {},
        "trouble": None if trouble is None else trouble.stats(),
        **worker.waits.stats(),
    }


def _first_trouble(worker: "Worker") -> Trouble | None:
    """Return the first number that was not finite, in a forward pass if one shows it, else in a gradient."""
    return worker.replica.trouble or worker.pushes.trouble
