"""Codecs of delta pushes: one small file each, behind one interface.

A codec has `words(values)`, the most 32-bit words it needs for so many values; `encode(values, residual, out)`, which
writes into `out` and returns the words used; and `decode(words, out)`. One with `feedback` adds the residual of earlier
pushes to the values first, and leaves in it what this push does not carry: nothing is lost, only late.
"""

from typing import Protocol

import numpy as np

from adam_mpi.sharding.codecs import bfloat16, float16, none, onebit, topk


class Codec(Protocol):
    feedback: bool

    def words(self, values: int) -> int: ...

    def encode(self, values: np.ndarray, residual: np.ndarray, out: np.ndarray) -> int: ...

    def decode(self, words: np.ndarray, out: np.ndarray) -> None: ...


# The place in this table is the codec's number in a message.
CODECS: dict[str, Codec] = {
    "none": none.Codec(),
    "float16": float16.Codec(),
    "bfloat16": bfloat16.Codec(),
    "onebit": onebit.Codec(),
    "topk": topk.Codec(),
}
NUMBERS = {name: number for number, name in enumerate(CODECS)}
BY_NUMBER = list(CODECS.values())
