"""Whether a job has learned anything: losses that are not finite, accuracies of guessing, dead layers. Pure."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from adam_mpi.cluster.statistics import LayerStatistics

NOISE = 3.0
"""Standard deviations by which an accuracy must be above the one of guessing."""
FIRST_BATCHES = 10
"""Batches of a phase before its losses are judged."""


def diverged(figures: Mapping[str, float], batch: int, done: bool) -> bool:
    """Return whether most losses of a phase are not finite: then nothing is learned any more.

    `figures`: those of the phase so far; `batch`: images per batch; `done`: whether the phase is over.
    """
    enough = figures["images"] >= FIRST_BATCHES * batch or done
    return enough and 2 * figures["images_not_finite"] > figures["images"]


def guessed(accuracy: float, labels: np.ndarray) -> float | None:
    """Return the share of the largest class where `accuracy` is not above it by more than chance, else None."""
    share = float(np.bincount(labels).max()) / len(labels)
    spread = (share * (1 - share) / len(labels)) ** 0.5
    return share if share < 1 and accuracy <= share + NOISE * spread else None


def dead(layers: Mapping[str, LayerStatistics]) -> list[str]:
    """Return the layers all of whose units are dead, unless there was no gradient at all."""
    last = list(layers.values())[-1] if layers else LayerStatistics()
    if not last.get("gradient_norm"):
        return []
    return [name for name, row in layers.items() if row.get("dead") == 1]


def warnings(
    results: Mapping[str, Any], labels: Mapping[str, np.ndarray], layers: Mapping[str, LayerStatistics]
) -> list[str]:
    """Return why a job that has ended is no success, one sentence per reason.

    `labels`: those of the parts that were evaluated, the one that counts first; `layers`: as the workers saw them last.
    """
    found = []
    for part, known in list(labels.items())[:1]:
        accuracy = results[f"{part}_accuracy"]
        if len(known) and (share := guessed(accuracy, known)) is not None:
            found.append(
                f"nothing was learned: {part} accuracy {accuracy:.2%}, and always the largest class is {share:.2%}; "
                "try a lower optimizer.learning_rate, or less momentum"
            )
    found.extend(f"all units of {name} are dead: no image makes one of them answer" for name in dead(layers))
    return found
