"""The generated engine on graphs: the bits of the engine for stacks, shared kernels, and buffers by block."""

from types import SimpleNamespace

import numpy as np
import pytest

from adam_mpi import nn
from adam_mpi.model import layers, parameters
from adam_mpi.model.engine import graph_program, jit, program
from adam_mpi.model.engine.engine_context import EngineContext
from adam_mpi.model.executors.generated import GeneratedExecutor
from adam_mpi.model.frontends import configured
from adam_mpi.model.input_format import SCALED_BYTES
from adam_mpi.model.passes.training import training_graph

LANES = 4
SHAPE = (2, 8, 8)
CONV = {"kind": "conv", "channels": 5, "kernel": 3, "pad": 1}
POOL = {"kind": "max_pool", "size": 2}
WIDE = {"kind": "conv", "channels": 16, "kernel": 3, "pad": 1}
DENSE = {"kind": "dense", "units": 7}
LAST = {"kind": "dense", "units": 3}
STACKS = {
    "relu before pooling": [CONV, "relu", POOL, CONV, "relu", LAST],
    "pooling before relu": [CONV, POOL, "relu", CONV, POOL, DENSE, "relu", LAST],
    "other activations": [CONV, "tanh", {"kind": "avg_pool", "size": 2}, CONV, "sigmoid", DENSE, "tanh", LAST],
    "windows that overlap": [CONV, {"kind": "max_pool", "size": 3, "stride": 2}, "relu", LAST],
    "Winograd": [WIDE, "relu", WIDE, "relu", POOL, WIDE, LAST],
    "dense alone": [DENSE, "relu", DENSE, "relu", LAST],
}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_as_a_graph_has_the_bits_of_the_engine_for_stacks(name):
    samples = 6
    stack = layers.infer(layers.parse(STACKS[name]), SHAPE, 3)
    built = program.build(stack, samples, lanes=LANES, registers=32)
    context = EngineContext(stack, samples, 0, built, jit.uncompiled(built.text, LANES))
    model = SimpleNamespace(layers=STACKS[name], losses=[], graph="", operators="")
    graph = configured.build(model, SHAPE, 3, SCALED_BYTES)
    executor = GeneratedExecutor(graph, samples, compiled=False, lanes=LANES)
    random = np.random.default_rng(0)
    weights = parameters.initial(stack, 1)
    pixels = random.integers(0, 256, (samples, *SHAPE)).astype(np.uint8)
    labels = random.integers(0, 3, samples)
    ids = np.arange(samples)
    gradients = np.ones((2, weights.size), np.float32)
    loss, correct = context.train(weights, gradients[0], pixels, labels, ids, epoch=0, overwrite=True)
    sums = executor.train(weights, gradients[1], {"input": pixels, "target": labels}, ids, overwrite=True)
    np.testing.assert_array_equal(gradients[0], gradients[1])
    # Uncompiled, the engine for stacks adds losses up in float32.
    assert sums["loss"] == pytest.approx(loss, rel=1e-6) and sums["correct"] == correct
    found = executor.run(weights, {"input": pixels}, graph.outputs)[graph.outputs[0]]
    np.testing.assert_array_equal(found, context.predict(weights, pixels))


def test_layers_of_equal_shape_share_kernels():
    x = nn.relu(nn.conv(nn.input((4, 6, 6)), 4, 3, pad=1))
    for _ in range(5):
        x = nn.relu(nn.add(x, nn.conv(nn.relu(nn.conv(x, 4, 3, pad=1)), 4, 3, pad=1)))
    z = nn.dense(x, 3)
    graph = training_graph(nn.graph(z, nn.softmax_cross_entropy(z, nn.target())))
    text = graph_program.build(graph, 8, lanes=LANES, registers=32).text
    forward = [line for line in text.splitlines() if line.startswith("def conv_") and "_forward(" in line]
    # The first one has no error of its input, some have a relu behind them, others before them.
    assert len(forward) == 3


def test_values_that_one_run_of_calls_by_block_uses_have_room_for_one_block():
    def floats(samples):
        x = nn.input((3, 8, 8))
        for _ in range(4):
            x = nn.tanh(nn.conv(x, 3, 3, pad=1))
        z = nn.global_avg_pool(x)
        graph = nn.graph(z, nn.softmax_cross_entropy(z, nn.target()))
        return graph_program.build(graph, samples, lanes=LANES, registers=32).floats

    assert floats(LANES) == floats(8 * LANES)
