"""Copy values into the memory of a server on the same node, by the quicker of two ways.

A server that shares a cache with us finds the values there. Where it does not, each cache line has to return from its
cache before it can be written again, which takes far longer than to write past all caches. Nothing says which case it
is, and a rank may be moved to another core, so both ways are timed now and then.
"""

from math import inf
from time import perf_counter
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from adam_mpi.base.native import define
from adam_mpi.transport import mailbox

LINE = 16  # words of a cache line
BLOCK = 1024  # words
VECTOR = ir.VectorType(ir.IntType(32), LINE)
LEAST = 1 << 14
"""Words of a copy from which on the way matters."""
TRIES = 4
"""Copies that are timed, of every `TURN`."""
# A prime: if always the first shards of a push were timed, the caches would be in another state than in its middle.
TURN = 251
MUCH = 2.0
"""How many times as long the usual way has to take: a server takes longer to read what is in no cache."""


def _write_past(builder: Any, target: Any, source: Any, index: Any) -> None:
    """Emit a non-temporal store of one cache line."""
    pointer = VECTOR.as_pointer()
    value = builder.load(builder.bitcast(builder.gep(source, [index]), pointer), align=4)
    store = builder.store(value, builder.bitcast(builder.gep(target, [index]), pointer), align=4 * LINE)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


write_past = define(_write_past, types.void, None, None, types.int64)
# Such writes arrive in any order: none may be under way when the position of the message is written.
fence = define(lambda builder: builder.fence("seq_cst"), types.void)


@njit(nogil=True, cache=True)
def copy_past(body: np.ndarray, values: np.ndarray) -> bool:
    """Copy as `mailbox.copy_words` does, but whole cache lines of the body past the caches."""
    lead = min(values.size, -(body.ctypes.data // 4) % LINE)
    end = lead + (values.size - lead) // LINE * LINE
    finite = mailbox.copy_words(body[:lead], values[:lead]) and mailbox.copy_words(body[end:], values[end:])
    for first in range(lead, end, BLOCK):
        stop = min(first + BLOCK, end)
        for i in range(first, stop, LINE):
            write_past(body, values, i)
        # While it is in the nearest cache.
        finite = mailbox.finite(values[first:stop]) and finite
    fence()
    return finite


WAYS = (mailbox.copy_words, copy_past)


class SharedMemcpy:
    """Copies by the way that was quicker when both were timed last."""

    def __init__(self) -> None:
        self.count = 0
        self.way = 0
        self.least = [inf, inf]
        """Least seconds per word of each way, while both are timed."""

    def copy(self, body: np.ndarray, values: np.ndarray) -> bool:
        """Copy the words `values` into `body`; return whether none of them is a NaN or an infinity."""
        if values.size < LEAST:
            return mailbox.copy_words(body, values)
        turn = self.count % TURN
        self.count += 1
        if turn >= TRIES:
            return WAYS[self.way](body, values)
        way = turn % len(WAYS)
        began = perf_counter()
        finite = WAYS[way](body, values)
        self.least[way] = min(self.least[way], (perf_counter() - began) / values.size)
        if turn == TRIES - 1:
            self.way = int(self.least[0] > MUCH * self.least[1])
            self.least = [inf, inf]
        return finite
