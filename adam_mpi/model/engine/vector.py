"""Define a vector type for numba, made of LLVM instructions, and the kit of functions that emitted kernels use.

A kit is a table from names in emitted source to functions on vectors of `lanes` float32: loads and stores, arithmetic,
and functions on bundles of vectors. `numpy_vectors.kit` has the same for numpy, so that the emitted source also runs
uncompiled.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import models, register_model

from adam_mpi.base import machine
from adam_mpi.base.native import define
from adam_mpi.model.engine import vector_bundle, vector_functions

INDEX = ir.IntType(32)
FLOAT = ir.FloatType()

# Only the entry is called from Python, and only it has to be kept: all it calls is linked into it.
kernel = partial(njit, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, no_rewrites=True)
entry = partial(njit, nogil=True, cache=True, no_cfunc_wrapper=True)


class Vector(types.Type):
    """The numba type of `lanes` float32 in one register."""

    def __init__(self, lanes: int) -> None:
        super().__init__(name=f"vector{lanes}")
        self.lanes = lanes
        self.ir = ir.VectorType(FLOAT, lanes)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.ir)


@cache
def kit(lanes: int) -> dict[str, Any]:
    """Return the functions on vectors of `lanes` float32, by the names that emitted source uses."""
    vector = Vector(lanes)
    basic = _memory(vector) | _arithmetic(vector) | _choices(vector)
    basic |= vector_bundle.kit(vector, define, _builders(vector))
    derived = {name: kernel(function) for name, function in vector_functions.functions_over(basic).items()}
    return basic | derived | {"kernel": kernel, "entry": entry, "flush_to_zero": flush_to_zero, "restore": restore}


def row_kit(lanes: int) -> dict[str, Any]:
    """Return the kit under names that begin with `row_`, for kernels with one image per block: see `row_vectors`."""
    return {f"row_{name}": function for name, function in kit(lanes).items()}


def _builders(vector: Vector) -> dict[str, Callable]:
    """Return what memory and arithmetic on single vectors and on bundles are built from, by name."""
    pointer = vector.ir.as_pointer()

    def place(builder: Any, data: Any, index: Any) -> Any:
        return builder.bitcast(builder.gep(data, [index]), pointer)

    def load(builder: Any, data: Any, index: Any) -> Any:
        return builder.load(place(builder, data, index), align=4)

    def store(builder: Any, data: Any, index: Any, value: Any) -> None:
        builder.store(value, place(builder, data, index), align=4)

    def broadcast(builder: Any, data: Any, index: Any) -> Any:
        return _spread(builder, builder.load(builder.gep(data, [index])), vector.lanes)

    def splat(builder: Any, value: Any) -> Any:
        return _spread(builder, value, vector.lanes)

    def fma(builder: Any, *values: Any) -> Any:
        kind = ir.FunctionType(vector.ir, [vector.ir] * 3)
        return builder.call(_llvm(builder, f"llvm.fmuladd.v{vector.lanes}f32", kind), values)

    def maximum(builder: Any, a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def prefetch(builder: Any, data: Any, index: Any, write: bool) -> None:
        kind = ir.FunctionType(ir.VoidType(), [data.type, INDEX, INDEX, INDEX])
        function = _llvm(builder, "llvm.prefetch.p0", kind)
        builder.call(function, [builder.gep(data, [index]), INDEX(int(write)), INDEX(3), INDEX(1)])

    built = {f.__name__: f for f in (place, load, store, broadcast, splat, fma, maximum, prefetch)}
    return built | _shuffles(vector.lanes)


def _shuffles(lanes: int) -> dict[str, Callable]:
    """Return `total`, which adds up the lanes, and `low` and `high`, which transpose: lanes `distance` apart swap."""

    def pick(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INDEX, len(places)), places))

    def total(builder: Any, value: Any) -> Any:
        width = lanes
        while width > 1:
            width //= 2
            lower = pick(builder, value, value, list(range(width)))
            upper = pick(builder, value, value, list(range(width, 2 * width)))
            value = builder.fadd(lower, upper)
        return builder.extract_element(value, INDEX(0))

    def low(builder: Any, a: Any, b: Any, distance: int) -> Any:
        return pick(builder, a, b, [i + lanes - distance if i & distance else i for i in range(lanes)])

    def high(builder: Any, a: Any, b: Any, distance: int) -> Any:
        return pick(builder, a, b, [i + lanes if i & distance else i + distance for i in range(lanes)])

    return {"total": total, "low": low, "high": high}


def _memory(vector: Vector) -> dict[str, Callable]:
    """Return loads and stores at any index of a float32 array; `_part` touches the first `count` lanes only."""
    pointer = vector.ir.as_pointer()
    mask = ir.VectorType(ir.IntType(1), vector.lanes)
    builders = _builders(vector)
    place = builders["place"]

    def first(builder: Any, count: Any) -> Any:
        steps = ir.Constant(ir.VectorType(ir.IntType(64), vector.lanes), list(range(vector.lanes)))
        return builder.icmp_signed("<", steps, _spread(builder, count, vector.lanes))

    def load_part(builder: Any, data: Any, index: Any, count: Any) -> Any:
        kind = ir.FunctionType(vector.ir, [pointer, INDEX, mask, vector.ir])
        function = _llvm(builder, f"llvm.masked.load.v{vector.lanes}f32.p0", kind)
        nothing = ir.Constant(vector.ir, [0.0] * vector.lanes)
        return builder.call(function, [place(builder, data, index), INDEX(4), first(builder, count), nothing])

    def store_part(builder: Any, data: Any, index: Any, value: Any, count: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [vector.ir, pointer, INDEX, mask])
        function = _llvm(builder, f"llvm.masked.store.v{vector.lanes}f32.p0", kind)
        builder.call(function, [value, place(builder, data, index), INDEX(4), first(builder, count)])

    index = types.intp
    return {
        "load": define(builders["load"], vector, None, index),
        "load_part": define(load_part, vector, None, index, index),
        "store": define(builders["store"], types.void, None, index, vector),
        "store_part": define(store_part, types.void, None, index, vector, index),
        "broadcast": define(builders["broadcast"], vector, None, index),
    }


def _arithmetic(vector: Vector) -> dict[str, Callable]:
    """Return arithmetic on vectors."""
    whole = ir.VectorType(INDEX, vector.lanes)

    def unary(name: str) -> Callable:
        kind = ir.FunctionType(vector.ir, [vector.ir])
        return lambda builder, value: builder.call(_llvm(builder, f"llvm.{name}.v{vector.lanes}f32", kind), [value])

    def power(builder: Any, exponent: Any) -> Any:
        """Return 2 ** exponent of a whole number, by writing it into the exponent bits."""
        bits = builder.add(builder.fptosi(exponent, whole), ir.Constant(whole, [127] * vector.lanes))
        return builder.bitcast(builder.shl(bits, ir.Constant(whole, [23] * vector.lanes)), vector.ir)

    def exponent(builder: Any, value: Any) -> Any:
        """Return the whole number e of value = mantissa * 2 ** e, for positive values."""
        shifted = builder.lshr(builder.bitcast(value, whole), ir.Constant(whole, [23] * vector.lanes))
        return builder.sitofp(builder.sub(shifted, ir.Constant(whole, [127] * vector.lanes)), vector.ir)

    def mantissa(builder: Any, value: Any) -> Any:
        """Return the mantissa, from 1 up to 2."""
        kept = builder.and_(builder.bitcast(value, whole), ir.Constant(whole, [0x007FFFFF] * vector.lanes))
        return builder.bitcast(builder.or_(kept, ir.Constant(whole, [0x3F800000] * vector.lanes)), vector.ir)

    def binary(operation: str) -> Callable:
        return define(lambda builder, a, b: getattr(builder, operation)(a, b), vector, vector, vector)

    return {
        "add": binary("fadd"),
        "sub": binary("fsub"),
        "mul": binary("fmul"),
        "div": binary("fdiv"),
        "fma": define(_builders(vector)["fma"], vector, vector, vector, vector),
        "root": define(unary("sqrt"), vector, vector),
        "whole": define(unary("rint"), vector, vector),
        "power": define(power, vector, vector),
        "exponent": define(exponent, vector, vector),
        "mantissa": define(mantissa, vector, vector),
        "zero": define(lambda builder: ir.Constant(vector.ir, [0.0] * vector.lanes), vector),
        "total": define(_builders(vector)["total"], types.float32, vector),
        "splat": define(_builders(vector)["splat"], vector, types.float32),
    }


def _choices(vector: Vector) -> dict[str, Callable]:
    """Return choices lane by lane: `greater` and `equal(a, b, yes, no)`; `maximum(a, b)` is b where either is NaN."""

    def choice(sign: str) -> Callable:
        return lambda builder, a, b, yes, no: builder.select(builder.fcmp_ordered(sign, a, b), yes, no)

    return {
        "greater": define(choice(">"), *[vector] * 5),
        "equal": define(choice("=="), *[vector] * 5),
        "maximum": define(_builders(vector)["maximum"], vector, vector, vector),
    }


def _spread(builder: Any, value: Any, lanes: int) -> Any:
    """Return a vector with `value` in every lane."""
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    single = builder.insert_element(nothing, value, INDEX(0))
    return builder.shuffle_vector(single, nothing, ir.Constant(ir.VectorType(INDEX, lanes), [0] * lanes))


def _llvm(builder: Any, name: str, kind: ir.FunctionType) -> Any:
    """Return the LLVM intrinsic `name`."""
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _control(builder: Any, instruction: str, place: Any) -> None:
    """Read or write the control word of the floating-point unit, on x86 only."""
    if machine.x86():
        byte_pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer])
        builder.call(_llvm(builder, f"llvm.x86.sse.{instruction}", kind), [builder.bitcast(place, byte_pointer)])


def _read_control(builder: Any) -> Any:
    place = cgutils.alloca_once_value(builder, INDEX(0))
    _control(builder, "stmxcsr", place)
    return builder.load(place)


def _write_control(builder: Any, word: Any) -> None:
    _control(builder, "ldmxcsr", cgutils.alloca_once_value(builder, word))


read_control = define(_read_control, types.int32)
write_control = define(_write_control, types.void, types.int32)

# Denormals read as zero, and flushed to zero.
FLUSH = 0x8040


@kernel
def flush_to_zero() -> int:
    """Make denormals zero in this thread, as they are many times slower; return the word that `restore` takes."""
    before = read_control()
    write_control(before | FLUSH)
    return before


@kernel
def restore(before: int) -> None:
    """Restore the control word that `flush_to_zero` returned."""
    write_control(before)
