"""Partition rules: outputs in a span depend on nothing outside the spans that are needed for them."""

import numpy as np
import pytest

from adam_mpi.model.graph import Value
from adam_mpi.model.ops.operator import REGISTRY, Run

MAP = ("channel", "row", "column")
CASES = [
    ("layer_norm", {}, [((3, 4, 5), MAP)]),
    ("group_norm", {"groups": 2}, [((4, 3, 2), MAP)]),
    ("batch_norm", {"images": 2}, [((4, 3, 2), MAP)]),
    ("lrn", {}, [((4, 3, 2), MAP)]),
    ("softmax", {"axis": 1}, [((4, 3, 2), MAP)]),
    ("matmul", {}, [((2, 3, 4), ("depth", "row", "unit")), ((2, 4, 5), ("depth", "unit", "column"))]),
    (
        "matmul",
        {"transpose_first": True, "transpose_second": True},
        [((4, 3), ("unit", "row")), ((5, 4), ("column", "unit"))],
    ),
    ("attention", {"heads": 2}, [((4, 6), ("place", "unit")), ((5, 6), ("key", "unit")), ((5, 4), ("key", "number"))]),
    ("conv", {"channels": 2, "kernel": 3, "stride": 2, "pad": 1, "bias": False}, [((2, 7, 9), MAP)]),
    ("conv_transpose", {"channels": 2, "kernel": 3, "stride": 2, "pad": 1, "more": 1}, [((2, 5, 6), MAP)]),
    ("conv_transpose", {"channels": 2, "kernel": 2, "dilation": 2}, [((2, 5, 6), MAP)]),
    ("max_pool", {"size": 3, "stride": 2, "pad": 1}, [((2, 7, 9), MAP)]),
    ("avg_pool", {"size": 2}, [((2, 7, 9), MAP)]),
    ("global_avg_pool", {}, [((3, 2, 4), MAP)]),
    ("split", {"parts": 2, "axis": 1}, [((3, 6, 4), MAP)]),
    ("attention", {"causal": True}, [((4, 2), ("place", "unit"))] * 3),
]


def arrays_of(op, values, random):
    """Return random samples for `values`, and parameters of `op` that are positive."""
    given = [random.standard_normal((3, *value.shape)) for value in values]
    return given, [np.abs(random.standard_normal(p.shape)) + 0.1 for p in op.parameters(values)]


@pytest.mark.parametrize("kind, fields, inputs", CASES)
def test_outputs_depend_on_what_is_needed_alone(kind, fields, inputs):
    op = REGISTRY[kind](**fields)
    random = np.random.default_rng(0)
    values = [Value(f"x{number}", shape, axes=axes) for number, (shape, axes) in enumerate(inputs)]
    given, parameters = arrays_of(op, values, random)
    read = [*values, *(p.value for p in op.parameters(values))]
    before = op.reference(Run(True), *given, *parameters)[0]
    made = op.outputs(read)[0]
    cut = 0
    for place, axis in enumerate(made.axes):
        span = (1, min(3, made.shape[place]))
        needs = op.needs(axis, span, read)
        assert len(needs) == len(read)
        changed = [
            outside_changed(array, value, axis, need) for array, value, need in zip(given, values, needs, strict=False)
        ]
        cut += sum(not np.array_equal(array, other) for array, other in zip(given, changed, strict=True))
        after = op.reference(Run(True), *changed, *parameters)[0]
        part = (slice(None),) * (place + 1) + (slice(*span),)
        np.testing.assert_allclose(after[part], before[part], rtol=1e-12)
    assert cut or kind == "group_norm" or fields.get("causal")


def outside_changed(array, value, axis, need):
    """Return `array` with other numbers outside the span `need` along `axis`."""
    if need is None or axis not in value.axes:
        return array
    place = value.axes.index(axis) + 1
    changed = array + 1.0
    inside = (slice(None),) * place + (slice(*need),)
    changed[inside] = array[inside]
    return changed
