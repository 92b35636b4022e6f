"""Frames of generated speech: features whose classes overlap by a known amount."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

FEATURES, CLASSES, KINDS = 440, 40, 3
"""Eleven frames of 40 numbers, states of phones, and ways to speak each."""
TRAIN, TEST, HIDDEN, NOISE = 90_000, 5_000, 12, 1.0


@dataclass(frozen=True)
class Speech:
    """Each state is spoken in some ways, each a point of a few hidden dimensions, which the features mix linearly; all
    chance is Gaussian. So the chance of each state, given the features, is known, and with it the least error."""

    centers: np.ndarray
    """[state, way, hidden]"""
    mixing: np.ndarray
    """[hidden, feature], with orthonormal rows."""

    def draw(self, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        labels = random.integers(0, CLASSES, count)
        centers = self.centers[labels, random.integers(0, KINDS, count)]
        features = centers @ self.mixing + NOISE * random.standard_normal((count, FEATURES))
        return features.astype(np.float32), labels.astype(np.int64)

    def best(self, features: np.ndarray) -> np.ndarray:
        """The most likely state of each frame, by Bayes' rule."""
        hidden = features @ self.mixing.T
        # What lies across the hidden dimensions is the same for all states.
        distances = ((hidden[:, None, None] - self.centers) ** 2).sum(axis=-1)
        scores = -distances / (2 * NOISE**2)
        top = scores.max(axis=2, keepdims=True)
        return np.argmax(top[..., 0] + np.log(np.exp(scores - top).sum(axis=2)), axis=1)


def speech(seed: int = 1) -> Speech:
    random = np.random.default_rng(seed)
    centers = 1.6 * random.standard_normal((CLASSES, KINDS, HIDDEN))
    mixing = np.linalg.qr(random.standard_normal((FEATURES, HIDDEN)))[0].T
    return Speech(centers, mixing)


def write(file: Path) -> float:
    """Training and test frames as one npz file; returns the least error of the test part."""
    spoken = speech()
    (train, labels), (test, truth) = spoken.draw(TRAIN, 2), spoken.draw(TEST, 3)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, x_train=train, y_train=labels, x_test=test, y_test=truth)
    return float(np.mean(spoken.best(test) != truth))
