"""A factor push of a large dense layer: bytes against a delta, the server's arithmetic against a plain product."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from _timing import Times, interleaved

from adam_mpi import config
from adam_mpi.config import Config
from adam_mpi.model.parameters import Tensor
from adam_mpi.server.stepper import Stepper
from adam_mpi.sharding import memory_layout
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.message_formats import FACTOR, HEADER
from adam_mpi.sharding.push_protocol import FactorPlan, choose_protocols
from adam_mpi.transport.mailbox import ReceivedMessage
from adam_mpi.transport.published_weights import PublishedWeights

SIDE, IMAGES, SECONDS = 4096, 64, 2.0


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    weight = Tensor("dense1/weight", "dense1", (SIDE, SIDE), 0, SIDE * SIDE)
    tensors = [weight, Tensor("dense1/bias", "dense1", (SIDE,), SIDE * SIDE, SIDE)]
    settings = config.load(None, [f"push.images={IMAGES}", "push.protocol=factor"])
    shelved = memory_layout.plan_layout(tensors, {0: "host"}, [1], settings)
    choice = choose_protocols(shelved, settings, IMAGES, hosts=2)["dense1"]
    yield {
        "name": "delta_bytes_over_factor_bytes",
        "value": round(choice.delta_bytes / choice.factor_bytes, 2),
        "unit": "x",
        "target": 16,
    }
    times = _times(shelved, settings, choice.factors[0])
    yield {
        "name": "server_flops_over_blas",
        "value": round(times["plain"].wall / times["descent"].wall, 3),
        "unit": "x",
        "target": 0.85,
    }
    yield {
        "name": "server_flops_over_blas_momentum",
        "value": round(times["plain"].wall / times["momentum"].wall, 3),
        "unit": "x",
        "target": None,
    }


def _times(shelved: MemoryLayout, settings: Config, plan: FactorPlan) -> dict[str, Times]:
    """A server's step on one push, with the optimizer of a plain job and with momentum, in turns with one product."""
    draw = np.random.default_rng(0)
    activations, errors = draw.random((IMAGES, SIDE), np.float32), draw.random((IMAGES, SIDE), np.float32)
    product = np.zeros((SIDE, SIDE), np.float32)
    contenders = {"plain": lambda: np.dot(errors.T, activations, out=product)}
    for name, momentum in {"descent": 0.0, "momentum": 0.9}.items():
        optimizer = replace(settings.optimizer, momentum=momentum)
        mailbox = np.zeros(plan.words(IMAGES), np.uint32)
        plan.write(mailbox, activations, errors, np.zeros(shelved.parameters, np.float32))
        published = PublishedWeights(shelved, 0, np.zeros(shelved.published_bytes(0), np.uint8))
        stepper = Stepper(replace(settings, optimizer=optimizer), plan.shards, published, mailbox, {"dense1": plan})
        contenders[name] = partial(_serve, stepper, plan)
    return interleaved(contenders, SECONDS)


def _serve(stepper: Stepper, plan: FactorPlan) -> None:
    """From the mailbox into the weights, as a server with one thread does."""
    mail = ReceivedMessage(**dict.fromkeys(HEADER.names, 0), ring=0, start=0)
    mail.kind, mail.values, mail.words, mail.finite = FACTOR, IMAGES, plan.words(IMAGES), 1
    stepper.values.unpack(mail, plan)
    stepper.step(
        [(band, [mail], [1.0]) for band in stepper.bands({shard.index: [mail] for shard in plan.shards})], 1e-6
    )
    stepper.values.release(mail)
