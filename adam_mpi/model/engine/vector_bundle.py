"""Define bundles of vectors for numba: the sums of a tile as one value, and what a kernel does with all of them.

Each entry of `kit` makes a function for emitted source, from offsets known when that is emitted. One call instead of
dozens: numba's compile time is that of the calls it has to type. `numpy_vectors.bundle_kit` has the same for numpy, and
says in a few lines what each does.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from adam_mpi.model.engine import vector_functions

INDEX = types.intp


def kit(vector: Any, define: Callable, basic: dict[str, Callable]) -> dict[str, Callable]:
    """Return what makes functions on bundles, by name; `basic` builds the operations on single vectors."""
    return _memory(vector, define, basic) | _arithmetic(vector, define, basic) | _transforms(vector, define, basic)


def _at(builder: Any, place: Any, offset: int) -> Any:
    """Return the index `offset` behind `place`."""
    return builder.add(place, ir.Constant(place.type, offset))


def _each(builder: Any, values: Any) -> list[Any]:
    """Return the vectors of a bundle."""
    return [builder.extract_value(values, number) for number in range(values.type.count)]


def _memory(vector: Any, define: Callable, basic: dict[str, Callable]) -> dict[str, Callable]:
    """Return what makes loads and stores of bundles."""
    nothing = ir.Constant(vector.ir, [0.0] * vector.lanes)

    def gathered(operation: str) -> Callable:
        def make(*offsets: int | None) -> Callable:
            def build(builder: Any, data: Any, place: Any) -> Any:
                values: dict[int | None, Any] = {None: nothing}
                for offset in offsets:
                    if offset is not None and offset not in values:
                        values[offset] = basic[operation](builder, data, _at(builder, place, offset))
                return cgutils.pack_array(builder, [values[offset] for offset in offsets])

            return define(build, types.UniTuple(vector, len(offsets)), None, INDEX)

        return make

    def changed(change: Callable) -> Callable:
        """Return what makes functions that store what `change` makes of a vector and its place."""

        def make(*offsets: int | None) -> Callable:
            def build(builder: Any, data: Any, place: Any, values: Any) -> None:
                for offset, value in zip(offsets, _each(builder, values), strict=True):
                    if offset is not None:
                        at = _at(builder, place, offset)
                        basic["store"](builder, data, at, change(builder, data, at, value))

            return define(build, types.void, None, INDEX, types.UniTuple(vector, len(offsets)))

        return make

    def add_scaled(*offsets: int) -> Callable:
        def build(builder: Any, data: Any, place: Any, values: Any, factor: Any) -> None:
            factors = basic["splat"](builder, factor)
            for offset, value in zip(offsets, _each(builder, values), strict=True):
                at = _at(builder, place, offset)
                sums = basic["fma"](builder, factors, value, basic["load"](builder, data, at))
                basic["store"](builder, data, at, sums)

        return define(build, types.void, None, INDEX, types.UniTuple(vector, len(offsets)), types.float32)

    def prefetches(write: bool, *offsets: int) -> Callable:
        def build(builder: Any, data: Any, place: Any) -> None:
            for offset in offsets:
                basic["prefetch"](builder, data, _at(builder, place, offset), write)

        return define(build, types.void, None, INDEX)

    def add_totals(*offsets: int) -> Callable:
        def build(builder: Any, data: Any, place: Any, values: Any) -> None:
            for offset, value in zip(offsets, _each(builder, values), strict=True):
                at = builder.gep(data, [_at(builder, place, offset)])
                builder.store(builder.fadd(builder.load(at), basic["total"](builder, value)), at)

        return define(build, types.void, None, INDEX, types.UniTuple(vector, len(offsets)))

    def add_packed(count: int) -> Callable:
        def build(builder: Any, data: Any, place: Any, values: Any) -> None:
            rows = _each(builder, values) + [nothing] * (-count % vector.lanes)
            for first in range(0, count, vector.lanes):
                at = _at(builder, place, first)
                sums = _totals(builder, rows[first : first + vector.lanes], vector.lanes, basic)
                basic["store"](builder, data, at, builder.fadd(basic["load"](builder, data, at), sums))

        return define(build, types.void, None, INDEX, types.UniTuple(vector, count))

    return {
        "loads": gathered("load"),
        "broadcasts": gathered("broadcast"),
        "stores": changed(lambda builder, data, at, value: value),
        "add_stores": changed(lambda builder, data, at, value: builder.fadd(basic["load"](builder, data, at), value)),
        "add_scaled": add_scaled,
        "prefetches": prefetches,
        "add_totals": add_totals,
        "add_packed": add_packed,
    }


def _totals(builder: Any, values: list[Any], lanes: int, basic: dict[str, Callable]) -> Any:
    """Return a vector whose lane i is the sum of the lanes of values[i]: each turn makes two vectors into one."""
    rows = values
    distance = lanes // 2
    while distance:
        pairs = zip(rows[:distance], rows[distance:], strict=True)
        halves = [[basic[side](builder, *pair, distance) for side in ("low", "high")] for pair in pairs]
        rows = [builder.fadd(*half) for half in halves]
        distance //= 2
    return rows[0]


def _arithmetic(vector: Any, define: Callable, basic: dict[str, Callable]) -> dict[str, Callable]:
    """Return what makes arithmetic on bundles."""
    nothing = ir.Constant(vector.ir, [0.0] * vector.lanes)

    def zeros(count: int) -> Callable:
        made = types.UniTuple(vector, count)
        return define(lambda builder: cgutils.pack_array(builder, [nothing] * count), made)

    def positives(count: int) -> Callable:
        def build(builder: Any, values: Any) -> Any:
            return cgutils.pack_array(
                builder, [basic["maximum"](builder, nothing, value) for value in _each(builder, values)]
            )

        return define(build, *[types.UniTuple(vector, count)] * 2)

    def masks(*offsets: int | None) -> Callable:
        def build(builder: Any, values: Any, data: Any, place: Any) -> Any:
            kept = []
            for offset, value in zip(offsets, _each(builder, values), strict=True):
                if offset is None:
                    kept.append(value)
                    continue
                mask = basic["load"](builder, data, _at(builder, place, offset))
                kept.append(builder.select(builder.fcmp_ordered(">", mask, nothing), value, nothing))
            return cgutils.pack_array(builder, kept)

        return define(build, *[types.UniTuple(vector, len(offsets))] * 2, None, INDEX)

    def multiply_adds(count: int, factor: str, *products: tuple[int, int, int]) -> Callable:
        def build(builder: Any, sums: Any, data: Any, f: Any, memory: Any, v: Any) -> Any:
            results = _each(builder, sums)
            factors: dict[int, Any] = {}
            values: dict[int, Any] = {}
            for number, one, other in products:
                if one not in factors:
                    factors[one] = basic[factor](builder, data, _at(builder, f, one))
                if other not in values:
                    values[other] = basic["load"](builder, memory, _at(builder, v, other))
                results[number] = basic["fma"](builder, factors[one], values[other], results[number])
            return cgutils.pack_array(builder, results)

        return define(build, *[types.UniTuple(vector, count)] * 2, None, INDEX, None, INDEX)

    return {"zeros": zeros, "positives": positives, "masks": masks, "multiply_adds": multiply_adds}


def _transforms(vector: Any, define: Callable, basic: dict[str, Callable]) -> dict[str, Callable]:
    """Return what makes products of bundles with matrices, and transposition."""
    nothing = ir.Constant(vector.ir, [0.0] * vector.lanes)

    def combine(*matrix: Sequence[float]) -> Callable:
        def build(builder: Any, values: Any) -> Any:
            return cgutils.pack_array(
                builder, vector_functions.apply_matrix(matrix, _each(builder, values), terms(builder))
            )

        return define(build, types.UniTuple(vector, len(matrix)), types.UniTuple(vector, len(matrix[0])))

    def terms(builder: Any) -> Callable:
        def term(result: Any, coefficient: float, value: Any) -> Any:
            """Return result + coefficient * value, where a result of None is zero."""
            if abs(coefficient) != 1:
                factor = ir.Constant(vector.ir, [coefficient] * vector.lanes)
                return basic["fma"](builder, factor, value, result) if result else builder.fmul(factor, value)
            operation = builder.fadd if coefficient == 1 else builder.fsub
            return value if result is None and coefficient == 1 else operation(result or nothing, value)

        return term

    def sandwich(*matrix: Sequence[int]) -> Callable:
        def combined(builder: Any, row: Sequence[int], values: Sequence[Any]) -> Any:
            added, taken = ([value for sign, value in zip(row, values, strict=True) if sign == s] for s in (1, -1))
            result = added.pop(0) if added else nothing
            for value in added:
                result = builder.fadd(result, value)
            for value in taken:
                result = builder.fsub(result, value)
            return result

        size = len(matrix)
        inner = len(matrix[0])

        def build(builder: Any, values: Any) -> Any:
            given = _each(builder, values)
            halves = [[combined(builder, row, given[j::inner]) for j in range(inner)] for row in matrix]
            return cgutils.pack_array(builder, [combined(builder, row, half) for half in halves for row in matrix])

        return define(build, types.UniTuple(vector, size**2), types.UniTuple(vector, inner**2))

    def transpose(count: int) -> Callable:
        def build(builder: Any, values: Any) -> Any:
            rows = _each(builder, values)
            distance = count // 2
            while distance:
                for i in [i for i in range(count) if not i & distance]:
                    pair = (rows[i], rows[i + distance])
                    rows[i] = basic["low"](builder, *pair, distance)
                    rows[i + distance] = basic["high"](builder, *pair, distance)
                distance //= 2
            return cgutils.pack_array(builder, rows)

        return define(build, *[types.UniTuple(vector, count)] * 2)

    return {"combine": combine, "sandwich": sandwich, "transpose": transpose}
