"""Emit attention: products in tiles of 4 x 4, softmax in between, scores of a few queries in scratch memory.

Keys that a causal query does not see get a score so low that they have no part in its softmax; tiles of such keys only
are left out.
"""

from typing import Any

from adam_mpi.model.engine import sample_product, tiles
from adam_mpi.model.engine.kernel import Kernel, Operand
from adam_mpi.model.engine.sample_product import TILE, Factor, emit_product, emit_tile, matrix, scratch_matrix

PANEL = 16
"""Queries whose probabilities, and errors of scores, are kept at once on the way back."""


def _of_head(operand: Operand, width: int, transposed: bool = False) -> Factor:
    """Return the part of `operand` that head `head` has, `width` columns of each row, as a factor."""
    steps = (operand.value.shape[1], 1)
    return matrix(operand, f"head * {width}", *(steps[::-1] if transposed else steps))


def _store(operand: Operand, width: int, row: str, column: str, value: str, add: bool = False) -> str:
    """Return the statement that stores, or adds, a number of head `head`."""
    index = f"head * {width} + ({row}) * {operand.value.shape[1]} + {column}"
    return operand.add(index, value) if add else operand.store(index, value)


def emit_forward(kernel: Kernel, sizes: Any) -> None:
    """Emit attention: inputs are queries, keys and values; outputs are averages, and logarithms of sums."""
    queries, keys, values = kernel.inputs
    scores = kernel.scratch("scores", TILE * sizes.keys * kernel.lanes)
    with kernel.loop("head", sizes.heads):
        for rows in sample_product.each(kernel, "m", sizes.queries):
            limit = _emit_limit(kernel, sizes, f"m + {rows}")
            for a in range(rows):
                kernel(f"best{a} = splat(-1e30)")
            for columns in sample_product.each(kernel, "n", sizes.keys, limit):
                second = _of_head(keys, sizes.depth, transposed=True)
                emit_tile(kernel, (rows, columns), sizes.depth, _of_head(queries, sizes.depth), second, ("m", "n"))
                for a in range(rows):
                    for b in range(columns):
                        value = f"mul(s{a}_{b}, splat({sizes.scale!r}))"
                        _emit_seen(kernel, sizes, ("m", a, b), value, "splat(-1e30)")
                        kernel(f"best{a} = maximum(seen, best{a})")
                        kernel(f"store(memory, {_place(kernel, scores, sizes, str(a), f'n + {b}')}, seen)")
            for a in range(rows):
                _emit_softmax(kernel, sizes, scores, a, limit)
            for columns in sample_product.each(kernel, "n", sizes.width):
                probabilities = scratch_matrix(kernel, scores, sizes.keys, 1)
                emit_tile(
                    kernel, (rows, columns), limit, probabilities, _of_head(values, sizes.width), at=("0", "n")
                )
                for a in range(rows):
                    for b in range(columns):
                        value = f"mul(s{a}_{b}, share{a})"
                        kernel(_store(kernel.outputs[0], sizes.width, f"m + {a}", f"n + {b}", value))


def _emit_limit(kernel: Kernel, sizes: Any, stop: str) -> str:
    """Emit `limit`, before which all keys lie that queries before `stop` see; return its expression."""
    kernel(f"limit = {f'min({sizes.keys}, {stop})' if sizes.causal else sizes.keys}")
    return "limit"


def _emit_seen(kernel: Kernel, sizes: Any, at: tuple[str, int, int], value: str, otherwise: str) -> None:
    """Emit `seen`: `value` if the query sees the key `at` (first query of the tile, row, column), or `otherwise`."""
    kernel(f"seen = {value}")
    if sizes.causal:
        with kernel.inside(f"if n + {at[2]} > {at[0]} + {at[1]}:"):
            kernel(f"seen = {otherwise}")


def _place(kernel: Kernel, scratch: str, sizes: Any, row: str, key: str) -> str:
    return f"{scratch} + (({row}) * {sizes.keys} + {key}) * {kernel.lanes}"


def _emit_softmax(kernel: Kernel, sizes: Any, scores: str, row: int, limit: str) -> None:
    """Emit powers of e in place of the scores of a row, `share`, which makes them probabilities, and the logarithm."""
    kernel("sums = zero()")
    with kernel.loop("k", limit):
        kernel(f"at = {_place(kernel, scores, sizes, str(row), 'k')}")
        kernel(f"raised = exponential(sub(load(memory, at), best{row}))")
        kernel("store(memory, at, raised)")
        kernel("sums = add(sums, raised)")
    kernel(f"share{row} = div(splat(1.0), sums)")
    logarithm = f"add(best{row}, logarithm(sums))"
    kernel(kernel.outputs[1].store(f"head * {sizes.queries} + m + {row}", logarithm))


def emit_backward(kernel: Kernel, sizes: Any) -> None:
    """Emit the errors of queries, keys and values."""
    panel = min(PANEL, sizes.queries)
    probabilities = kernel.scratch("probabilities", panel * sizes.keys * kernel.lanes)
    to_scores = kernel.scratch("to_scores", panel * sizes.keys * kernel.lanes)
    kernel.clear(1)
    kernel.clear(2)
    with kernel.loop("head", sizes.heads):
        for run in tiles.each(kernel.source, "top", tiles.runs(sizes.queries, PANEL)):
            limit = _emit_limit(kernel, sizes, f"top + {run.width}")
            for rows in sample_product.each(kernel, "m", run.width):
                _emit_own(kernel, sizes, rows)
                for columns in sample_product.each(kernel, "n", sizes.keys, limit):
                    _emit_tile_back(kernel, sizes, (rows, columns), probabilities, to_scores)
            _emit_products_back(kernel, sizes, run.width, probabilities, to_scores)


def _emit_own(kernel: Kernel, sizes: Any, rows: int) -> None:
    """Emit, for each row of a tile, the product of output and error, and the logarithm of the sum."""
    _, _, _, made, logarithms, errors = kernel.inputs
    for a in range(rows):
        kernel(f"own{a} = zero()")
        with kernel.loop("k", sizes.width):
            kernel(f"at = head * {sizes.width} + (top + m + {a}) * {made.value.shape[1]} + k")
            kernel(f"own{a} = fma({made.load('at')}, {errors.load('at')}, own{a})")
        kernel(f"logarithm{a} = {logarithms.load(f'head * {sizes.queries} + top + m + {a}')}")


def _emit_tile_back(kernel: Kernel, sizes: Any, tile: tuple[int, int], probabilities: str, to_scores: str) -> None:
    """Emit a tile of probabilities, and of errors of scores."""
    queries, keys, values, _, _, errors = kernel.inputs
    rows, columns = tile
    second = _of_head(keys, sizes.depth, transposed=True)
    emit_tile(kernel, tile, sizes.depth, _of_head(queries, sizes.depth), second, ("top + m", "n"))
    for a in range(rows):
        for b in range(columns):
            value = f"exponential(sub(mul(s{a}_{b}, splat({sizes.scale!r})), logarithm{a}))"
            _emit_seen(kernel, sizes, ("top + m", a, b), value, "zero()")
            kernel(f"store(memory, {_place(kernel, probabilities, sizes, f'm + {a}', f'n + {b}')}, seen)")
    second = _of_head(values, sizes.width, transposed=True)
    emit_tile(kernel, tile, sizes.width, _of_head(errors, sizes.width), second, ("top + m", "n"))
    for a in range(rows):
        for b in range(columns):
            row = f"m + {a}"
            seen = f"load(memory, {_place(kernel, probabilities, sizes, row, f'n + {b}')})"
            value = f"mul(mul({seen}, splat({sizes.scale!r})), sub(s{a}_{b}, own{a}))"
            kernel(f"store(memory, {_place(kernel, to_scores, sizes, row, f'n + {b}')}, {value})")


def _emit_products_back(kernel: Kernel, sizes: Any, rows: int, probabilities: str, to_scores: str) -> None:
    """Emit what a panel of `rows` queries makes of its probabilities and errors of scores."""
    queries, keys, _, _, _, errors = kernel.inputs
    to_queries, to_keys, to_values = kernel.outputs
    emit_product(
        kernel,
        shape=(rows, sizes.depth),
        depth="limit",
        first=scratch_matrix(kernel, to_scores, sizes.keys, 1),
        second=_of_head(keys, sizes.depth),
        store=lambda m, n, value: _store(to_queries, sizes.depth, f"top + {m}", n, value),
    )
    for scratch, factor, result, width in (
        (to_scores, queries, to_keys, sizes.depth),
        (probabilities, errors, to_values, sizes.width),
    ):
        of_panel = matrix(factor, f"head * {width} + top * {factor.value.shape[1]}", factor.value.shape[1], 1)
        emit_product(
            kernel,
            shape=(sizes.keys, width),
            depth=rows,
            first=scratch_matrix(kernel, scratch, 1, sizes.keys),
            second=of_panel,
            store=lambda m, n, value, result=result, width=width: _store(result, width, m, n, value, add=True),
            limit="limit",
        )
