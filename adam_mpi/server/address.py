"""Arrays by their addresses, for compiled code that goes through any number of them in one call."""

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic


def address(values: np.ndarray) -> int:
    """Whoever keeps it keeps the array too."""
    return values.__array_interface__["data"][0]


@intrinsic
def _pointer(typing: Any, number: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), make


@njit(nogil=True, cache=True, inline="always")
def floats(number, size):  # type: ignore[no-untyped-def]
    """The float32 that begin at an address."""
    return carray(_pointer(number), size)
