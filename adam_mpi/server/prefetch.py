"""One instruction that numba does not offer: `prefetch(array, index)` fetches a line of memory that is written to soon.

What a CPU fetches ahead by itself ends with a page, and memory that ranks share comes in pages of 4 KB. One line of the
next page, asked for in time, has its address translated and the rest of it fetched as before. An index beyond the end
of the array does no harm, now and then: to find out that there is nothing takes time.
"""

from typing import Any

from llvmlite import ir
from numba import types

from adam_mpi.model.engine.vector import define

FOR_WRITING, INTO_ALL_CACHES, DATA = (ir.Constant(ir.IntType(32), number) for number in (1, 3, 1))


def _prefetch(builder: Any, data: Any, index: Any) -> None:
    place = builder.bitcast(builder.gep(data, [index]), ir.IntType(8).as_pointer())
    options = FOR_WRITING, INTO_ALL_CACHES, DATA
    kind = ir.FunctionType(ir.VoidType(), [place.type, *(option.type for option in options)])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind), [place, *options])


prefetch = define(_prefetch, types.void, None, types.int64)
