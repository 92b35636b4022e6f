"""The kits of functions on vectors: what numba compiles does what numpy does, whatever the number of lanes."""

import re

import numba
import numpy as np
import pytest

from adam_mpi.model.engine import numpy_vectors, vector

# As emitted source has it: functions of bundles are made first, then used.
SOURCE = """
some_loads, some_broadcasts, two_zeros = loads(0, None, 9), broadcasts(1, 0), zeros(2)
two_positives, two_masks, products = positives(2), masks(1, 7), multiply_adds(2, "broadcast", (0, 1, 2), (1, 0, 5))
more_products, two_stores = multiply_adds(2, "load", (0, 1, 2), (1, 0, 5), (0, 3, 4)), stores(0, 20)
two_add_stores, two_totals, transform = add_stores(0, 20), add_totals(0, 3), sandwich((1, 0, -1), (0, -1, 0))
square_loads, square = loads(*range(0, 2 * lanes, 2)), transpose(lanes)
paired = combine((1, 2, 2, 0), (0, 1, -1, 0), (0.5, 1, 1, 4), (0.5, 1, -1, -4), (0, -1, 0, 0))
some_stores, five_packed = stores(0, None, 20), add_packed(5)
two_scaled, some_prefetches = add_scaled(0, 18), prefetches(False, 5, 10**6)

@compiled
def run(memory, out):
    before = flush_to_zero()
    a, b, at = load(memory, 7), load(memory, 40), 0
    c = mul(b, b)
    values = (
        add(a, b), sub(a, b), mul(a, b), div(a, b), fma(a, b, a), root(c), whole(a), power(whole(a)), zero(),
        splat(2.5), exponent(c), mantissa(c), greater(a, b, a, zero()), equal(a, a, b, zero()), maximum(a, b),
        exponential(a), logarithm(c), load(memory, 3), load_part(memory, 3, 2), broadcast(memory, 5),
    )
    bundles = (
        some_loads(memory, 2) + some_broadcasts(memory, 4) + two_zeros() + two_positives((a, b))
        + two_masks((a, b), memory, 2) + products((a, b), memory, 1, memory, 3)
        + more_products((a, b), memory, 1, memory, 3) + transform((a, b, a, b, b, a, a, a, b))
        + square(square_loads(memory, 1)) + paired((a, b, add(a, b), sub(a, b)))
    )
    for value in values + bundles:
        store(out, at, value)
        at += lanes
    store_part(out, at, a, 3)
    two_stores(out, at + 50, (a, b))
    two_add_stores(out, at + 51, (a, b))
    two_totals(out, at + 100, (a, b))
    some_stores(out, at + 150, (a, b, a))
    five_packed(out, at + 200, (a, b, mul(a, b), a, b))
    two_scaled(out, at + 250, (a, b), memory[9])
    some_prefetches(out, at)
    restore(before)
    return total(a)
"""


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_compiled_and_numpy_kits_agree(lanes):
    for name in set(numpy_vectors.kit(lanes)) - {"kernel", "entry"}:
        assert re.search(rf"\b{name}\(", SOURCE), name
    memory = np.random.default_rng(lanes).standard_normal(100).astype(np.float32)
    results = []
    for kit, compiled in ((vector.kit(lanes), numba.njit), (numpy_vectors.kit(lanes), lambda function: function)):
        space = kit | {"lanes": lanes, "compiled": compiled}
        exec(SOURCE, space)
        out = np.zeros(2000, np.float32)
        results.append((space["run"](memory, out), out))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-5)
    assert np.count_nonzero(results[1][1]) > 30 * lanes
