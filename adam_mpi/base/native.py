"""Instructions and library calls that numba and numpy lack: fences, prefetches, raw addresses, a BLAS update."""

import ctypes
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import get_cython_function_address, intrinsic


def define(build: Callable, result: types.Type, *arguments: types.Type | None) -> Callable:
    """Return a numba intrinsic with the given types whose LLVM code `build(builder, values...)` emits.

    None as a type stands for an array; `build` then gets the pointer to its data.
    """

    def typed(context: Any, *given: types.Type) -> tuple:
        kinds = [kind or value for kind, value in zip(arguments, given, strict=True)]
        return result(*kinds), generate

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        ready = [
            context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, values, strict=True)
        ]
        made = build(builder, *ready)
        return context.get_dummy_value() if result is types.void else made

    # numba finds the number of arguments in the signature.
    names = ["context", *(f"argument{number}" for number in range(len(arguments)))]
    typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in names])  # type: ignore
    return intrinsic(typed)


def _acquire(builder: Any) -> None:
    builder.fence("acquire")


acquire = define(_acquire, types.void)


FOR_WRITING = ir.Constant(ir.IntType(32), 1)
INTO_ALL_CACHES = ir.Constant(ir.IntType(32), 3)
DATA = ir.Constant(ir.IntType(32), 1)


def _prefetch(builder: Any, data: Any, index: Any) -> None:
    place = builder.bitcast(builder.gep(data, [index]), ir.IntType(8).as_pointer())
    options = FOR_WRITING, INTO_ALL_CACHES, DATA
    kind = ir.FunctionType(ir.VoidType(), [place.type, *(option.type for option in options)])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind), [place, *options])


prefetch = define(_prefetch, types.void, None, types.int64)


def address(values: np.ndarray) -> int:
    """Return the raw memory address of the data of `values`, which is valid as long as the array lives."""
    return values.__array_interface__["data"][0]


@intrinsic
def _pointer(typing: Any, number: Any) -> Any:
    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), make


@njit(nogil=True, cache=True, inline="always")
def floats(number, size):  # type: ignore[no-untyped-def]
    """Return the `size` float32 at the raw memory address `number` as an array."""
    return carray(_pointer(number), size)


_sgemm = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(
    get_cython_function_address("scipy.linalg.cython_blas", "sgemm")
)
_PLAIN = ctypes.create_string_buffer(b"N")
_TRANSPOSED = ctypes.create_string_buffer(b"T")


def add_product(left: np.ndarray, right: np.ndarray, scale: float, out: np.ndarray) -> None:
    """Add `scale * left.T @ right` to `out` by a call of BLAS, all float32; other threads run meanwhile."""
    assert all(array.dtype == np.float32 and array.strides[1] == 4 for array in (left, right, out)), "float32 rows"
    assert left.shape[0] == right.shape[0] and out.shape == (left.shape[1], right.shape[1]), "shapes that match"
    # BLAS stores by columns: what it computes is the transposed product, right.T times left.
    sizes = np.array([*right.shape[::-1], left.shape[1], *(a.strides[0] // 4 for a in (right, left, out))], np.intc)
    scales = np.array([scale, 1], np.float32)
    columns, terms, rows, right_step, left_step, out_step = (sizes.ctypes.data + 4 * place for place in range(6))
    alpha = scales.ctypes.data
    beta = scales.ctypes.data + 4
    _sgemm(
        ctypes.addressof(_PLAIN),
        ctypes.addressof(_TRANSPOSED),
        columns,
        rows,
        terms,
        alpha,
        right.ctypes.data,
        right_step,
        left.ctypes.data,
        left_step,
        beta,
        out.ctypes.data,
        out_step,
    )
