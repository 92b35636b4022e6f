"""A control for the paper's explanation of Table 1: is it the noise of asynchrony that helps?"""

from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from _study import Difference, Found, Points, Scale, Table, accuracy_table, bars, contrast, job, mean

from adam_mpi import config
from adam_mpi.data.sets import open_set
from adam_mpi.model import parameters
from adam_mpi.planning.plan import model, network
from adam_mpi.worker.gradient_buffer import add_scaled

TITLE = "Control: synchronous training with the noise of asynchrony"
KIND = "measured, 2 replicas"
PAPER = (
    "The paper believes that asynchronous training is more accurate because stale gradients add noise. If so, noise of "
    "that size should help synchronous training as much."
)
BASE, EPOCHS = ["data.set=mnist", "push.protocol=delta", "train.batch=64"], 4
VARIANTS = "asynchronous", "synchronous", "synchronous with noise"
STEPS, ROUNDS = 400, 40
"""Of plain training before the noise is measured, and measurements of it."""


def points(scale: Scale) -> Points:
    named: Points = {}
    for seed in range(1, scale.seeds + 1):
        work = _asynchronous, partial(_synchronous, noisy=False), partial(_synchronous, noisy=True)
        named |= {f"{name}, seed {seed}": partial(call, scale, seed) for name, call in zip(VARIANTS, work, strict=True)}
    return named


def _asynchronous(scale: Scale, seed: int) -> dict[str, Any] | None:
    return job(scale, [*BASE, f"run.seed={seed}"], EPOCHS)


def _synchronous(scale: Scale, seed: int, noisy: bool) -> dict[str, Any] | None:
    """The noise is that of the delay which the asynchronous run of this seed had."""
    settings = [*BASE, "consistency.staleness=0", f"run.seed={seed}"]
    if not noisy:
        return job(scale, settings, EPOCHS)
    other = _asynchronous(scale, seed)
    if other is None:
        return None
    fraction = stale_fraction(scale, max(1, round(other["delay"])))
    found = job(scale, [*settings, f"inject.noise={fraction:.4f}"], EPOCHS)
    return None if found is None else found | {"noise": fraction}


def stale_fraction(scale: Scale, delay: int) -> float:
    """How far the gradient at weights so many steps old is from that at the present ones, as a fraction of it: the root
    mean square over a phase of plain training."""
    settings = config.load(None, [*BASE, *scale.settings])
    data = open_set(settings.data)
    shapes = model(settings, data.description)
    context, weights = network(settings, data.description, shapes).context(), parameters.initial(shapes, 1)
    batch, gradient, random = settings.train.batch, np.zeros_like(weights), np.random.default_rng(1)
    rate = np.float32(settings.optimizer.learning_rate / batch)

    def compute(at: np.ndarray, indices: np.ndarray) -> np.ndarray:
        images, labels = data.read("train", indices)
        context.train(at, gradient, images, labels, indices, 1, True)
        return gradient

    past, squares = [weights.copy()], []
    for step in range(STEPS + ROUNDS):
        indices = random.integers(0, data.description.train, batch)
        if step >= STEPS:
            stale = compute(past[0], indices).copy()
        now = compute(weights, indices)
        if step >= STEPS:
            squares.append((np.sum((stale - now) ** 2), np.sum(now**2)))
        add_scaled(weights, now, -rate)
        past = [*past, weights.copy()][-delay - 1 :]
    off, whole = np.sum(squares, axis=0)
    return float(np.sqrt(off / whole))


def paint(axes: Any, found: Found) -> None:
    bars(axes, found)


def _agreement(found: Found) -> str:
    asynchronous, plain, noisy = (mean(found, name) for name in VARIANTS)
    if asynchronous is None or plain is None or noisy is None:
        return "Not all three are there yet."
    if asynchronous <= plain:
        return "Asynchronous training is not the better one here, so there is no advantage that noise could explain."
    if noisy <= plain:
        return "Noise of that size does not help, so it does not explain what asynchronous training gains here."
    return f"Noise of that size makes {(noisy - plain) / (asynchronous - plain):.0%} of what asynchrony gains."


def table(found: Found) -> Table:
    """Return the accuracy of each way to train."""
    return accuracy_table(found)


def differences(found: Found) -> list[Difference]:
    """Return the two comparisons that the question is about."""
    return [
        contrast(found, "synchronous with noise", "synchronous"),
        contrast(found, "asynchronous", "synchronous"),
    ]


def verdict(found: Found) -> str:
    noises = [point["noise"] for point in found.values() if "noise" in point]
    size = f"{fmean(noises):.2f} of the gradient's root mean square" if noises else "not measured yet"
    return (
        f"{_agreement(found)} The noise is that of gradients at weights as old as the mean delay of the "
        "asynchronous run: "
        f"{size}."
    )
