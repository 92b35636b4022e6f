"""Emit attention: products in tiles of 4 x 4, softmax row by row, scores of a few queries in scratch memory.

Tiles of keys that no query of a panel sees are left out.
"""

from typing import Any

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.kernel import Kernel, Operand
from adam_mpi.model.engine.sample_product import Matrix, emit_product, matrix, scratch_matrix

FORWARD = 8
BACKWARD = 16
"""Queries whose scores are kept at once: a panel. On the way back, errors of scores are kept too."""


def _of_head(operand: Operand, width: int, first: str = "0") -> Matrix:
    """Return the `width` columns of `operand` that head `head` has, from row `first` on."""
    columns = operand.value.shape[1]
    return matrix(operand, f"head * {width} + ({first}) * {columns}", columns)


def emit_forward(kernel: Kernel, sizes: Any) -> None:
    """Emit attention: inputs are queries, keys and values; outputs are averages, and logarithms of sums."""
    queries, keys, values = kernel.inputs
    name = kernel.scratch("scores", min(FORWARD, sizes.queries) * sizes.keys * kernel.lanes)
    scores = scratch_matrix(kernel, name, sizes.keys)
    with kernel.loop("head", sizes.heads):
        for run in tiles.each(kernel.source, "top", tiles.runs(sizes.queries, FORWARD)):
            _emit_limit(kernel, sizes, run.width)
            emit_product(
                kernel,
                shape=(run.width, sizes.keys),
                depth=sizes.depth,
                first=_of_head(queries, sizes.depth, "top"),
                second=_of_head(keys, sizes.depth).transposed,
                result=scores,
                column_limit="limit",
            )
            with kernel.loop("row", run.width):
                _emit_softmax(kernel, sizes, scores)
            emit_product(
                kernel,
                shape=(run.width, sizes.width),
                depth="limit",
                first=scores,
                second=_of_head(values, sizes.width),
                result=_of_head(kernel.outputs[0], sizes.width, "top"),
            )


def _emit_limit(kernel: Kernel, sizes: Any, width: int) -> None:
    """Emit `limit`, before which all keys lie that a panel of `width` queries sees."""
    kernel(f"limit = {f'min({sizes.keys}, top + {width})' if sizes.causal else sizes.keys}")


def _emit_seen(kernel: Kernel, sizes: Any) -> None:
    """Emit `seen`, before which all keys lie that the query `top + row` sees."""
    kernel(f"seen = {'top + row + 1' if sizes.causal else sizes.keys}")


def _emit_zeros(kernel: Kernel, sizes: Any, scores: Matrix) -> None:
    """Emit zeros for the keys that a row does not see, up to the limit."""
    if sizes.causal:
        with kernel.loop("k", "limit", "seen"):
            kernel(f"store(memory, {scores.at('row', 'k')}, zero())")


def _emit_softmax(kernel: Kernel, sizes: Any, scores: Matrix) -> None:
    """Emit the softmax of `row` of the panel in place of its products, and the logarithm of its sum."""
    _emit_seen(kernel, sizes)
    place = scores.at("row", "k")
    kernel(f"best = load(memory, {scores.at('row', '0')})")
    with kernel.loop("k", "seen", 1):
        kernel(f"best = maximum(load(memory, {place}), best)")
    kernel("sums = zero()")
    with kernel.loop("k", "seen"):
        kernel(f"raised = exponential(mul(sub(load(memory, {place}), best), splat({sizes.scale!r})))")
        kernel(f"store(memory, {place}, raised)")
        kernel("sums = add(sums, raised)")
    kernel("share = div(splat(1.0), sums)")
    with kernel.loop("k", "seen"):
        kernel(f"store(memory, {place}, mul(load(memory, {place}), share))")
    _emit_zeros(kernel, sizes, scores)
    logarithm = f"fma(best, splat({sizes.scale!r}), logarithm(sums))"
    kernel(kernel.outputs[1].store(f"head * {sizes.queries} + top + row", logarithm))


def emit_backward(kernel: Kernel, sizes: Any) -> None:
    """Emit the errors of queries, keys and values.

    Inputs: queries, keys, values, both outputs of the way forward, and errors of the first one.
    """
    floats = min(BACKWARD, sizes.queries) * sizes.keys * kernel.lanes
    probabilities = scratch_matrix(kernel, kernel.scratch("probabilities", floats), sizes.keys)
    to_scores = scratch_matrix(kernel, kernel.scratch("to_scores", floats), sizes.keys)
    kernel.clear(1)
    kernel.clear(2)
    with kernel.loop("head", sizes.heads):
        for run in tiles.each(kernel.source, "top", tiles.runs(sizes.queries, BACKWARD)):
            _emit_limit(kernel, sizes, run.width)
            _emit_products_of_panel(kernel, sizes, run.width, probabilities, to_scores)
            with kernel.loop("row", run.width):
                _emit_row_back(kernel, sizes, probabilities, to_scores)
            _emit_errors_of_panel(kernel, sizes, run.width, probabilities, to_scores)


def _emit_products_of_panel(kernel: Kernel, sizes: Any, rows: int, scores: Matrix, to_scores: Matrix) -> None:
    """Emit the products of queries with keys, and of errors with values."""
    queries, keys, values, _, _, errors = kernel.inputs
    for one, other, width, result in (
        (queries, keys, sizes.depth, scores),
        (errors, values, sizes.width, to_scores),
    ):
        emit_product(
            kernel,
            shape=(rows, sizes.keys),
            depth=width,
            first=_of_head(one, width, "top"),
            second=_of_head(other, width).transposed,
            result=result,
            column_limit="limit",
        )


def _emit_row_back(kernel: Kernel, sizes: Any, probabilities: Matrix, to_scores: Matrix) -> None:
    """Emit, for `row` of the panel, probabilities and errors of scores in place of products."""
    _, _, _, made, logarithms, errors = kernel.inputs
    kernel("own = zero()")
    with kernel.loop("k", sizes.width):
        kernel(f"at = head * {sizes.width} + (top + row) * {made.value.shape[1]} + k")
        kernel(f"own = fma({made.load('at')}, {errors.load('at')}, own)")
    kernel(f"logarithm_of_row = {logarithms.load(f'head * {sizes.queries} + top + row')}")
    _emit_seen(kernel, sizes)
    with kernel.loop("k", "seen"):
        place = probabilities.at("row", "k")
        scaled = f"mul(load(memory, {place}), splat({sizes.scale!r}))"
        kernel(f"seen_part = exponential(sub({scaled}, logarithm_of_row))")
        kernel(f"store(memory, {place}, seen_part)")
        place = to_scores.at("row", "k")
        kernel(f"store(memory, {place}, mul(mul(seen_part, splat({sizes.scale!r})), sub(load(memory, {place}), own)))")
    _emit_zeros(kernel, sizes, probabilities)
    _emit_zeros(kernel, sizes, to_scores)


def _emit_errors_of_panel(kernel: Kernel, sizes: Any, rows: int, probabilities: Matrix, to_scores: Matrix) -> None:
    """Emit the errors of the panel's queries, and what it adds to those of keys and values."""
    queries, keys, _, _, _, errors = kernel.inputs
    emit_product(
        kernel,
        shape=(rows, sizes.depth),
        depth="limit",
        first=to_scores,
        second=_of_head(keys, sizes.depth),
        result=_of_head(kernel.outputs[0], sizes.depth, "top"),
    )
    for number, (scores, factor, width) in enumerate(
        ((to_scores, queries, sizes.depth), (probabilities, errors, sizes.width)), start=1
    ):
        emit_product(
            kernel,
            shape=(sizes.keys, width),
            depth=rows,
            first=scores.transposed,
            second=_of_head(factor, width, "top"),
            result=_of_head(kernel.outputs[number], width),
            add=True,
            row_limit="limit",
        )
