"""Choose by measurement: time each convolution of a network alone, in the ways it could be computed."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from adam_mpi.base import machine
from adam_mpi.model.engine import conv_choice, jit, source
from adam_mpi.model.engine.conv_choice import Choice
from adam_mpi.model.engine.conv_step import ConvSpec, Fused, fused
from adam_mpi.model.engine.convolution import Shape, shape_of
from adam_mpi.model.engine.engine_context import aligned
from adam_mpi.model.engine.schedule import Buffer, Phase
from adam_mpi.model.engine.source import Source
from adam_mpi.model.layers import Conv, LayerShape

CANDIDATES = 2
ROUNDS = 7


def tune(shapes: Sequence[LayerShape]) -> dict[str, Choice]:
    """Return the fastest choice for each convolution; it is cached, so that it is measured once per machine."""
    return {name: _cached(spec) for name, spec in _specs(shapes).items()}


def fixed(shapes: Sequence[LayerShape]) -> dict[str, Choice]:
    """Return the choice that arithmetic makes for each convolution."""
    specs = _specs(shapes).items()
    return {name: conv_choice.choices(spec.shape, spec.window, spec.registers)[0] for name, spec in specs}


def check(found: object, shapes: Sequence[LayerShape]) -> str:
    """Return what is wrong with choices that were read from a file; "" if nothing is."""
    specs = _specs(shapes)
    if not isinstance(found, dict):
        return "not a table of layers"
    for name, choice in found.items():
        if name not in specs:
            return f"{name!r} is no convolution of this model"
        if wrong := conv_choice.check(choice, specs[name].shape, specs[name].window):
            return f"{name}: {wrong}"
    return ""


def _specs(shapes: Sequence[LayerShape]) -> dict[str, ConvSpec]:
    """Return each convolution alone, by its layer's name."""
    specs = {}
    for index, shape in enumerate(shapes):
        if isinstance(shape.layer, Conv):
            learning = any(before.weight for before in shapes[:index])
            specs[shape.name] = _spec(shape_of(shape), fused(shapes, index), learning)
    return specs


def _spec(shape: Shape, taken: Fused, learning: bool) -> ConvSpec:
    """Return a convolution alone, its weights at the start of the flat vector, with what is fused with it."""
    lanes = machine.lanes()
    window = taken.window
    inputs = Buffer("inputs", shape.channels * shape.height * shape.width * lanes)
    outputs = Buffer("outputs", shape.maps * (shape.rows // window) * (shape.columns // window) * lanes)
    return ConvSpec(
        source=Source(),
        name="conv",
        shape=shape,
        lanes=lanes,
        registers=machine.registers(),
        relu=taken.relu,
        window=window,
        masked=False,
        weight=0,
        bias=shape.maps * shape.channels * shape.kernel**2,
        inputs=inputs,
        outputs=outputs,
        errors=replace(outputs, name="errors"),
        input_errors=replace(inputs, name="input errors") if learning else None,
    )


def _cached(spec: ConvSpec) -> Choice:
    candidates = conv_choice.choices(spec.shape, spec.window, spec.registers, CANDIDATES)
    key = jit.key(repr((spec.shape, spec.relu, spec.window, spec.input_errors is None, candidates)))
    path = jit.folder() / f"choice_{key}.json"
    # Ranks of one node measure once, one of them alone.
    with jit.lock(path.with_suffix(".lock")):
        if not path.exists():
            jit.write(path, json.dumps(measure(spec, candidates)))
        return json.loads(path.read_text())


def measure(spec: ConvSpec, candidates: list[Choice]) -> Choice:
    """Return the candidate whose forward and backward take the least time; candidates are timed in turns."""
    runs = [_runnable(replace(spec, source=Source()), choice) for choice in candidates]
    times = [[run() for run in runs] for _ in range(ROUNDS)]
    medians = np.median(np.array(times), axis=0)
    return candidates[int(np.argmin(medians))]


def _runnable(spec: ConvSpec, choice: Choice) -> source.Timed:
    """Return a function that runs the convolution as `choice` says, and returns the seconds it took."""
    step = conv_choice.step(spec, choice)
    phases = [
        Phase(False, tuple(step.prepare + step.clear)),
        Phase(True, tuple(step.forward)),
        Phase(True, tuple(step.backward)),
        Phase(False, tuple(step.finish)),
    ]
    plan = source.emit_timed(spec.source, [phase for phase in phases if phase.calls])
    run = jit.timed(spec.source.text, spec.lanes)
    memory = aligned(plan.floats)
    memory[:] = np.random.default_rng(0).standard_normal(plan.floats)
    size = spec.shape.maps * spec.shape.channels * spec.shape.kernel**2
    weights = np.zeros(size + spec.shape.maps, np.float32)
    gradient = np.zeros_like(weights)
    # Long enough for the clock: about ten million multiply-adds.
    work = size * spec.shape.rows * spec.shape.columns
    repeat = max(1, math.ceil(1e7 / work))

    def timed() -> float:
        start = time.thread_time()
        run(weights, gradient, memory, repeat)
        return time.thread_time() - start

    return timed
