"""Values copied into the memory of a server on the same node, by the quicker of two ways.

A server that shares a cache with us finds them there. Where it does not, each line has to come back from its cache
before it can be written again, which takes longer by far than to write past all caches. Nothing says which it is, and
a rank may be moved: so both ways are tried now and then.
"""

from math import inf
from time import perf_counter
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from adam_mpi.base.native import define
from adam_mpi.transport import mailbox

LINE, BLOCK = 16, 1024  # words
VECTOR = ir.VectorType(ir.IntType(32), LINE)
LEAST = 1 << 14
"""Words for which it matters."""
# A prime: tries that always fell on the first shards of a push would find caches as they never are in its middle.
TRIES, TURN = 4, 251
MUCH = 2.0
"""How many times as long the usual way has to take: a server takes longer to read what is in no cache."""


def _write_past(builder: Any, target: Any, source: Any, index: Any) -> None:
    pointer = VECTOR.as_pointer()
    value = builder.load(builder.bitcast(builder.gep(source, [index]), pointer), align=4)
    store = builder.store(value, builder.bitcast(builder.gep(target, [index]), pointer), align=4 * LINE)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


write_past = define(_write_past, types.void, None, None, types.int64)
# Such writes come in any order: none may be under way when the message is posted.
fence = define(lambda builder: builder.fence("seq_cst"), types.void)


@njit(nogil=True, cache=True)
def copy_past(body: np.ndarray, values: np.ndarray) -> bool:
    """As `mailbox.copy`, but past the caches: whole lines of the body are, the rest is not."""
    lead = min(values.size, -(body.ctypes.data // 4) % LINE)
    end = lead + (values.size - lead) // LINE * LINE
    finite = mailbox.copy(body[:lead], values[:lead]) and mailbox.copy(body[end:], values[end:])
    for first in range(lead, end, BLOCK):
        stop = min(first + BLOCK, end)
        for i in range(first, stop, LINE):
            write_past(body, values, i)
        # While it is in the nearest cache.
        finite = mailbox.finite(values[first:stop]) and finite
    fence()
    return finite


WAYS = mailbox.copy, copy_past


class SharedMemcpy:
    def __init__(self) -> None:
        self.count = self.way = 0
        self.least = [inf, inf]
        """Seconds per word that each way has taken at best, while both are tried."""

    def copy(self, body: np.ndarray, values: np.ndarray) -> bool:
        """Whether there is no NaN or infinity among the words."""
        if values.size < LEAST:
            return mailbox.copy(body, values)
        turn, self.count = self.count % TURN, self.count + 1
        if turn >= TRIES:
            return WAYS[self.way](body, values)
        way, began = turn % len(WAYS), perf_counter()
        finite = WAYS[way](body, values)
        self.least[way] = min(self.least[way], (perf_counter() - began) / values.size)
        if turn == TRIES - 1:
            self.way = int(self.least[0] > MUCH * self.least[1])
            self.least = [inf, inf]
        return finite
