"""A factor push of a large dense layer: bytes against a delta, the server's arithmetic against a plain product."""

import argparse
import time
from collections.abc import Iterator

import numpy as np

from adam_mpi import config
from adam_mpi.model.parameters import Tensor
from adam_mpi.server import apply, shelves
from adam_mpi.server.protocol import choose

SIDE, IMAGES, ROUNDS = 4096, 64, 9


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    weight = Tensor("dense1/weight", "dense1", (SIDE, SIDE), 0, SIDE * SIDE)
    tensors = [weight, Tensor("dense1/bias", "dense1", (SIDE,), SIDE * SIDE, SIDE)]
    settings = config.load(None, [f"push.images={IMAGES}", "push.protocol=factor"])
    shelved = shelves.plan(tensors, {0: "host"}, [1], settings)
    choice = choose(shelved, settings, IMAGES, hosts=2)["dense1"]
    yield {"name": "delta_bytes_over_factor_bytes",
           "value": round(choice.delta_bytes / choice.factor_bytes, 2), "unit": "x", "target": 16}  # fmt: skip
    yield {"name": "server_flops_over_blas", "value": round(_flops(shelved, choice.factors[0]), 3),
           "unit": "x", "target": 0.85}  # fmt: skip


def _flops(shelved, plan) -> float:
    """Multiply and apply shard by shard, as a server does, in turns with one product of the same shape."""
    draw = np.random.default_rng(0)
    activations, errors = draw.random((IMAGES, SIDE), np.float32), draw.random((IMAGES, SIDE), np.float32)
    body = np.zeros(plan.words(IMAGES), np.uint32)
    plan.write(body, activations, errors, np.zeros(shelved.parameters, np.float32))
    weights, product = np.zeros(shelved.parameters, np.float32), np.zeros((SIDE, SIDE), np.float32)
    scratch, state = np.zeros(max(shard.size for shard in plan.shards), np.float32), np.zeros(1, np.float32)
    starts, scales, one = np.zeros(1, np.int64), np.full(1, -1e-6, np.float32), np.float32(1)

    def serve() -> None:
        for shard in plan.shards:
            plan.multiply(body.view(np.float32), IMAGES, shard, scratch[: shard.size])
            apply.additive(weights[shard.start : shard.stop], state, scratch, starts, scales, one, one, one)

    def multiply() -> None:
        np.dot(errors.T, activations, out=product)

    serve(), multiply()
    served, plain = zip(*((timed(serve), timed(multiply)) for _ in range(ROUNDS)), strict=True)
    return float(np.median(plain) / np.median(served))
