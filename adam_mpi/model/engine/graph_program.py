"""Build the program of a graph: one function that computes a batch, forward and backward, without Python."""

import math
from dataclasses import dataclass

import numpy as np

from adam_mpi.model.engine.conv_choice import Choice
from adam_mpi.model.engine.lowering import Lowering, phases
from adam_mpi.model.engine.schedule import BufferPlan, Phase, lay_out
from adam_mpi.model.engine.source import Source, emit_phase
from adam_mpi.model.graph import Graph

PASS_SAMPLES = 64
"""Samples that go through the graph together; a larger batch takes several passes."""
DTYPES = {"float": "float32", "integer": "int64", "byte": "uint8"}


@dataclass(frozen=True)
class GraphProgram:
    """Emitted source of a function `run`, its signature, and the floats of memory it works in."""

    text: str
    signature: str
    floats: int
    unshared_floats: int
    """Floats that its buffers would take if none shared memory with another."""
    blocks: int
    """Blocks of samples that go through the graph together."""
    lanes: int
    """Samples in a block."""
    tables: np.ndarray
    """Levels of bytes, as `run` takes them."""


def summed_spans(size: int, fresh: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans of a vector of `size` between those that are `fresh`."""
    edges = [0, *(edge for span in sorted(fresh) for edge in span), size]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def build(
    graph: Graph, samples: int, lanes: int, registers: int, choices: dict[str, Choice] | None = None
) -> GraphProgram:
    """Return the program of a training graph for batches of up to `samples` samples.

    Raises MissingRule for an operator without an emitted kernel.
    """
    blocks = min(-(-samples // lanes), pass_blocks(graph, lanes))
    lowering = Lowering(graph, lanes, registers, blocks, choices)
    lowering.lower()
    forward, backward = phases(lowering.items)
    plan = lay_out([*forward, *backward], blocks)
    names = [f"input{number}" for number in range(len(graph.inputs))]
    names += [f"output{number}" for number in range(len(graph.outputs))]
    arguments = f"training, overwrite, weights, gradient, memory, keys, tables, sums, count, {', '.join(names)}"
    source = lowering.source
    source("")
    source("")
    source("@entry")
    with source.inside(f"def run({arguments}):"):
        source('"""Add losses and metrics to `sums`; in training, gradients to `gradient`."""')
        source("before = flush_to_zero()")
        with source.inside("if training and overwrite:"):
            for start, stop in summed_spans(graph.size, lowering.fresh):
                source(f"gradient[{start}:{stop}] = 0")
            source("pass")
        source(f"all_blocks = (count + {lanes - 1}) // {lanes}")
        with source.inside(f"for start in range(0, all_blocks, {blocks}):"):
            source(f"blocks = min({blocks}, all_blocks - start)")
            source("fresh = overwrite and start == 0")
            _emit_phases(source, forward, plan, lanes)
            if backward:
                with source.inside("if training:"):
                    _emit_phases(source, backward, plan, lanes)
        source("restore(before)")
    tables = np.concatenate([np.ravel(rows) for rows in lowering.tables] or [np.zeros(1)])
    return GraphProgram(
        text=source.text,
        signature=_signature(graph),
        floats=plan.floats,
        unshared_floats=plan.unshared,
        blocks=blocks,
        lanes=lanes,
        tables=tables.astype(np.float32),
    )


def pass_blocks(graph: Graph, lanes: int) -> int:
    """Return how many blocks go through `graph` together: no pass cuts a group of samples that belong together."""
    least = math.lcm(lanes, *(node.op.together() for node in graph.nodes))
    return least * max(1, PASS_SAMPLES // least) // lanes


def _emit_phases(source: Source, all_phases: tuple[Phase, ...], plan: BufferPlan, lanes: int) -> None:
    for phase in all_phases:
        emit_phase(source, phase, plan, lanes)


def _signature(graph: Graph) -> str:
    """Return the types of the arguments of `run`."""
    floats = "float32[::1]"
    fixed = ["boolean", "boolean", floats, floats, floats, "uint64[::1]", floats, "float64[::1]", "int64"]
    fed = [f"{DTYPES[value.dtype]}[::1]" for value in graph.inputs]
    return f"({', '.join([*fixed, *fed, *[floats] * len(graph.outputs)])})"
