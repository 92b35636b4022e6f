"""Codecs of delta pushes: one small file each, behind one interface.

A codec with `feedback` (error feedback) adds the residual of earlier pushes to the values first, and leaves in it what
this push does not carry: nothing is lost, only late.
"""

from typing import Protocol

import numpy as np

from adam_mpi.sharding.codecs import bfloat16, float16, none, onebit, topk


class Codec(Protocol):
    """What every codec has."""

    feedback: bool

    def words(self, values: int) -> int:
        """Return the most 32-bit words that `values` values take when the codec has encoded them."""

    def encode(self, values: np.ndarray, residual: np.ndarray, out: np.ndarray) -> int:
        """Encode `values` of a delta push into `out`; return the words used; keep a `residual` if there is feedback."""

    def decode(self, words: np.ndarray, out: np.ndarray) -> None:
        """Decode the `words` of a delta push into `out`."""


# The position in this table is the codec's number in a message.
CODECS: dict[str, Codec] = {
    "none": none.Codec(),
    "float16": float16.Codec(),
    "bfloat16": bfloat16.Codec(),
    "onebit": onebit.Codec(),
    "topk": topk.Codec(),
}
NUMBERS = {name: number for number, name in enumerate(CODECS)}
BY_NUMBER = list(CODECS.values())
