"""Draw the initial values of parameters: by kind, keyed by the parameter's name and the seed. Pure."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PIECE = 1 << 20
"""Values that are drawn at a time."""
INITIALIZATIONS = ("auto", "he", "glorot", "normal", "truncated_normal", "uniform", "constant")


@dataclass(frozen=True)
class Initialization:
    """How initial values are drawn: `kind` is one of INITIALIZATIONS.

    he and glorot: normal, with the deviation of their rule times `gain`; auto: he before relu, glorot elsewhere (four
    times before a sigmoid); normal, truncated_normal and uniform: of deviation or bound `gain`; constant: `gain`.
    """

    kind: str = "auto"
    gain: float = 1.0


ZEROS = Initialization("constant", 0.0)
ONES = Initialization("constant", 1.0)


def name_key(name: str) -> int:
    """Return 64 bits that depend on `name` alone: randomness is keyed by names, not by positions."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the inputs and outputs of a weight of `shape`, (outputs, inputs, *window)."""
    window = math.prod(shape[2:])
    return math.prod(shape[1:2]) * window, shape[0] * window


def drawn(name: str, shape: tuple[int, ...], init: Initialization, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the values of parameter `name` that are not zero, in pieces with their offsets, as float32."""
    if init == ZEROS:
        return
    random = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, name_key(name)], np.uint64)))
    size = math.prod(shape)
    for first in range(0, size, PIECE):
        yield first, _draw(random, min(PIECE, size - first), shape, init)


def _draw(random: np.random.Generator, count: int, shape: tuple[int, ...], init: Initialization) -> np.ndarray:
    if init.kind == "constant":
        return np.full(count, init.gain, np.float32)
    if init.kind == "uniform":
        return (2 * random.random(count, dtype=np.float32) - 1) * np.float32(init.gain)
    values = random.standard_normal(count, dtype=np.float32)
    if init.kind == "truncated_normal":
        while (outside := np.abs(values) > 2).any():
            values[outside] = random.standard_normal(int(outside.sum()), dtype=np.float32)
    return values * np.float32(init.gain * _deviation(shape, init.kind))


def _deviation(shape: tuple[int, ...], kind: str) -> float:
    """Return the standard deviation that rule `kind` has for weights of `shape`, apart from the gain."""
    if kind == "he":
        return math.sqrt(2 / fans(shape)[0])
    if kind in ("auto", "glorot"):
        return math.sqrt(2 / sum(fans(shape)))
    return 1.0
