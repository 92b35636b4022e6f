"""One BLAS call that numpy does not offer: a product added to a matrix in place.

numpy writes a product into fresh memory only; to add it to the weights afterwards takes another pass over both.
"""

import ctypes

import numpy as np
from numba.extending import get_cython_function_address

_sgemm = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(
    get_cython_function_address("scipy.linalg.cython_blas", "sgemm")
)
_PLAIN, _TURNED = (ctypes.create_string_buffer(letter) for letter in (b"N", b"T"))


def add_product(left: np.ndarray, right: np.ndarray, scale: float, out: np.ndarray) -> None:
    """out += scale * left.T @ right, all float32 with rows in one piece; other threads run meanwhile."""
    assert all(array.dtype == np.float32 and array.strides[1] == 4 for array in (left, right, out)), "float32 rows"
    assert left.shape[0] == right.shape[0] and out.shape == (left.shape[1], right.shape[1]), "shapes that match"
    # BLAS counts by columns: what it sees is the transposed product, right.T times left.
    sizes = np.array([*right.shape[::-1], left.shape[1], *(a.strides[0] // 4 for a in (right, left, out))], np.intc)
    scales = np.array([scale, 1], np.float32)
    columns, terms, rows, right_step, left_step, out_step = (sizes.ctypes.data + 4 * place for place in range(6))
    alpha, beta = scales.ctypes.data, scales.ctypes.data + 4
    _sgemm(
        ctypes.addressof(_PLAIN), ctypes.addressof(_TURNED), columns, rows, terms, alpha, right.ctypes.data, right_step,
        left.ctypes.data, left_step, beta, out.ctypes.data, out_step,
    )  # fmt: skip
