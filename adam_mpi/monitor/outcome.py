"""Whether a job has learned anything: losses that are no numbers, accuracies of guessing, dead layers. Pure."""

from collections.abc import Mapping
from typing import Any

import numpy as np

NOISE = 3.0
"""Standard deviations that an accuracy must be above the one of guessing."""
FIRST_BATCHES = 10
"""Before so many batches of a phase nothing is said about its losses."""


def diverged(figures: Mapping[str, float], batch: int, done: bool) -> bool:
    """Whether most losses of a phase are not finite: weights or inputs are, and nothing is learned from there on."""
    enough = figures["images"] >= FIRST_BATCHES * batch or done
    return enough and 2 * figures["images_not_finite"] > figures["images"]


def guessed(accuracy: float, labels: np.ndarray) -> float | None:
    """Return the share of the largest class where an accuracy is not above it by more than chance, else None."""
    share = float(np.bincount(labels).max()) / len(labels)
    spread = (share * (1 - share) / len(labels)) ** 0.5
    return share if share < 1 and accuracy <= share + NOISE * spread else None


def dead(layers: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the layers all of whose units answer to nothing, where there were errors to answer to."""
    *_, last = layers.values() or [{}]
    if not last.get("gradient_norm"):
        return []
    return [name for name, row in layers.items() if row.get("dead") == 1]


def warnings(results: Mapping[str, Any], labels: Mapping[str, np.ndarray], layers: Mapping[str, Any]) -> list[str]:
    """Return what makes the end of a job no success, a sentence each.

    `labels`: of the parts that were evaluated, the one that counts first; `layers`: as the workers saw them last.
    """
    told = []
    for part, known in list(labels.items())[:1]:
        accuracy = results[f"{part}_accuracy"]
        if len(known) and (share := guessed(accuracy, known)) is not None:
            told.append(
                f"nothing was learned: {part} accuracy {accuracy:.2%}, and always the largest class is {share:.2%}; "
                "try a lower optimizer.learning_rate, or less momentum"
            )
    told.extend(f"all units of {name} are dead: no image makes one of them answer" for name in dead(layers))
    return told
