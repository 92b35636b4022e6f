"""Choices by measurement: each convolution of a network is timed alone, in the ways it could be computed."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from adam_mpi.model.engine import conv_step as convs
from adam_mpi.model.engine import cpu, entry, jit
from adam_mpi.model.engine.context import aligned
from adam_mpi.model.engine.convolution import Shape, shape_of
from adam_mpi.model.engine.memory import Buffer, Phase
from adam_mpi.model.engine.program import conv_step, joined
from adam_mpi.model.engine.source import Source
from adam_mpi.model.layers import Conv, LayerShape

CANDIDATES = 2
ROUNDS = 7


def tune(shapes: Sequence[LayerShape]) -> dict[str, convs.Choice]:
    """The fastest choice for each convolution; kept in the cache, so that it is measured once per machine."""
    return {name: _cached(job) for name, job in _jobs(shapes).items()}


def fixed(shapes: Sequence[LayerShape]) -> dict[str, convs.Choice]:
    """What arithmetic says, for each convolution."""
    jobs = _jobs(shapes).items()
    return {name: convs.choices(job.shape, job.window, job.registers)[0] for name, job in jobs}


def check(found: object, shapes: Sequence[LayerShape]) -> str:
    """What is wrong with choices that were read from a file, if anything."""
    jobs = _jobs(shapes)
    if not isinstance(found, dict):
        return "not a table of layers"
    for name, choice in found.items():
        if name not in jobs:
            return f"{name!r} is no convolution of this model"
        if wrong := convs.check(choice, jobs[name].shape, jobs[name].window):
            return f"{name}: {wrong}"
    return ""


def _jobs(shapes: Sequence[LayerShape]) -> dict[str, convs.Job]:
    """Each convolution alone, by its layer's name."""
    jobs = {}
    for index, shape in enumerate(shapes):
        if isinstance(shape.layer, Conv):
            relu, window, _ = joined(shapes, index)
            learning = any(before.weight for before in shapes[:index])
            jobs[shape.name] = _job(shape_of(shape), relu, window, learning)
    return jobs


def _job(shape: Shape, relu: bool, window: int, learning: bool) -> convs.Job:
    """The convolution alone, its weights at the beginning."""
    lanes = cpu.lanes()
    inputs = Buffer("inputs", shape.channels * shape.height * shape.width * lanes)
    outputs = Buffer("outputs", shape.maps * (shape.rows // window) * (shape.columns // window) * lanes)
    errors, input_errors = replace(outputs, name="errors"), replace(inputs, name="input errors")
    bias = shape.maps * shape.channels * shape.kernel**2
    return convs.Job(
        Source(),
        "conv",
        shape,
        lanes,
        cpu.registers(),
        relu,
        window,
        False,
        0,
        bias,
        inputs,
        outputs,
        errors,
        input_errors if learning else None,
    )


def _cached(job: convs.Job) -> convs.Choice:
    candidates = convs.choices(job.shape, job.window, job.registers, CANDIDATES)
    key = jit.key(repr((job.shape, job.relu, job.window, job.input_errors is None, candidates)))
    path = jit.folder() / f"choice_{key}.json"
    # Ranks of one node measure once, one of them alone.
    with jit.lock(path.with_suffix(".lock")):
        if not path.exists():
            jit.write(path, json.dumps(measure(job, candidates)))
        return json.loads(path.read_text())


def measure(job: convs.Job, candidates: list[convs.Choice]) -> convs.Choice:
    """The candidate whose forward and backward take the least time, timed in turns."""
    runs = [_runnable(replace(job, source=Source()), choice) for choice in candidates]
    times = [[run() for run in runs] for _ in range(ROUNDS)]
    medians = np.median(np.array(times), axis=0)
    return candidates[int(np.argmin(medians))]


def _runnable(job: convs.Job, choice: convs.Choice) -> entry.Timed:
    step = conv_step(job, choice)
    phases = [
        Phase(False, tuple(step.prepare + step.clear)),
        Phase(True, tuple(step.forward)),
        Phase(True, tuple(step.backward)),
        Phase(False, tuple(step.finish)),
    ]
    text, floats = entry.emit_timed(job.source, [phase for phase in phases if phase.calls])
    run = jit.timed(text, job.lanes)
    memory = aligned(floats)
    memory[:] = np.random.default_rng(0).standard_normal(floats)
    weights = np.zeros(job.bias + job.shape.maps, np.float32)
    gradient = np.zeros_like(weights)
    # Long enough for the clock: about ten million multiply-adds.
    work = job.bias * job.shape.rows * job.shape.columns
    repeat = max(1, math.ceil(1e7 / work))

    def timed() -> float:
        start = time.thread_time()
        run(weights, gradient, memory, repeat)
        return time.thread_time() - start

    return timed
