"""The checksum of files: a sum of 32-bit words, each multiplied by an odd number that depends on its position.

It detects mixed versions and single wrong bits, and runs at the speed of memory; crc32 would take longer than the disk.
In numpy: `(words * (2 * arange(n) + 1)).sum() + seed`, in unsigned 64-bit arithmetic.
"""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _add(words, edges, sums):  # type: ignore[no-untyped-def]
    for k in range(sums.size):
        part = words[edges[k] : edges[k + 1]]
        total = sums[k]
        # Unsigned counters: the loop is not vectorized where they may wrap around.
        for i in range(part.size):
            total += np.uint64(part[i]) * np.uint64(np.uint32(2) * np.uint32(i) + np.uint32(1))
        sums[k] = total


def add_checksums(values: np.ndarray, edges: np.ndarray, sums: np.ndarray) -> None:
    """Add to `sums[k]` the checksum of the 32-bit words `edges[k]` to `edges[k + 1]` of `values`."""
    _add(values.reshape(-1).view(np.uint8).view(np.uint32), edges, sums)


def checksum(values: np.ndarray, seed: int = 0) -> int:
    """Return the checksum of `values`, a contiguous array of whole 32-bit words, added to `seed`."""
    sums = np.array([seed], np.uint64)
    add_checksums(values, np.array([0, values.nbytes // 4]), sums)
    return int(sums[0])
