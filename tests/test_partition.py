"""The partition plan: every column and unit has one owner, and every strip gets what it needs, for any shape."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_mpi.base.errors import UserError
from adam_mpi.config import LAYERS
from adam_mpi.model import layers, parameters
from adam_mpi.model.layers import Activation, AvgPool, Conv, Dense, Dropout, LocalResponseNorm, MaxPool, infer
from adam_mpi.model.partition import fitting, partition

RELU = Activation("relu")
PAPER = infer(layers.parse(LAYERS), (1, 28, 28), 10)


@st.composite
def stacks(draw):
    """Shapes of a random stack: up to five windows and pointwise layers between them, then dense layers."""
    entries = []
    columns = draw(st.integers(6, 40))
    width = columns
    for _ in range(draw(st.integers(0, 5))):
        kind, stride = draw(st.sampled_from([Conv, MaxPool, AvgPool])), draw(st.integers(1, 3))
        size = draw(st.integers(1, min(5, width)))
        if kind is Conv:
            pad = draw(st.integers(0, min(3, size - 1)))
            entries.append(Conv(draw(st.integers(1, 4)), size, stride, pad))
            width = (width + 2 * pad - size) // stride + 1
        else:
            entries.append(kind(size, stride))
            width = (width - size) // stride + 1
        entries += draw(st.lists(st.sampled_from([RELU, Dropout(0.5), LocalResponseNorm(3)]), max_size=2))
    units = draw(st.lists(st.integers(1, 30), max_size=2))
    entries += [layer for count in units for layer in (Dense(count), RELU)] + [Dense(draw(st.integers(2, 12)))]
    return infer(entries, (draw(st.integers(1, 3)), columns, columns), entries[-1].units)


@st.composite
def cuts(draw):
    """Draw a partition of the requested number of strips, or of as many as the error says are possible."""
    shapes, strips = draw(stacks()), draw(st.integers(1, 6))
    try:
        return partition(shapes, strips)
    except UserError as error:
        found = re.fullmatch(rf"layout.partitions = {strips}: (\w+) .*; set at most (\d+)", str(error))
        assert found and found[1] in {shape.name for shape in shapes} and int(found[2]) < strips
        return partition(shapes, int(found[2]))


def window(shape, column):
    """Input columns that one output column sees, one by one."""
    layer, width = shape.layer, shape.input[2]
    if isinstance(layer, Conv):
        seen = range(column * layer.stride - layer.pad, column * layer.stride - layer.pad + layer.kernel)
    elif isinstance(layer, MaxPool):
        seen = range(column * layer.stride, column * layer.stride + layer.size)
    else:
        seen = range(width) if isinstance(layer, Dense) else [column]
    return {place for place in seen if 0 <= place < width}


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_every_place_has_one_owner_and_strips_are_even(cut):
    windows = any(isinstance(shape.layer, Conv | MaxPool) for shape in cut.shapes)
    for index, shape in enumerate(cut.shapes):
        flat = any(isinstance(before.layer, Dense) for before in cut.shapes[: index + 1])
        spans, places = cut.owned[index], shape.output[0 if flat else 2]
        if not (flat or windows):
            assert set(spans) == {(0, places)}
            continue
        assert spans[0][0] == 0 and spans[-1][1] == places and all(a[1] == b[0] for a, b in pairwise(spans))
        assert all(a < b for a, b in spans)
        if isinstance(shape.layer, Dense):
            assert len({b - a for a, b in spans}) <= 2 and max(b - a for a, b in spans) <= -(-places // len(cut))


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_strips_need_what_their_windows_see(cut):
    if len(cut) == 1:
        assert cut.strips[0].shapes == cut.shapes and not cut.exchanges
        return
    for index, shape in enumerate(cut.shapes):
        if any(isinstance(before.layer, Dense) for before in cut.shapes[:index]):
            continue
        for strip in cut.strips:
            a, b = cut.owned[index][strip.number]
            columns = range(a, b) if not isinstance(shape.layer, Dense) else range(1)
            seen = set().union(*(window(shape, column) for column in columns))
            first, last = min(seen), max(seen) + 1
            assert strip.shapes[index].input[2] == last - first
            exchange = cut.exchanges.get(index)
            assert exchange is None or exchange.needed[strip.number] == (first, last)
            if index == 0:
                assert strip.columns == (first, last)
            elif exchange is None:
                assert cut.owned[index - 1][strip.number] == (first, last)


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_pieces_make_up_what_is_needed(cut):
    for index, exchange in cut.exchanges.items():
        for target, (first, last) in enumerate(exchange.needed):
            pieces = [exchange.piece(source, target) for source in range(len(cut))]
            assert sorted(place for a, b in pieces for place in range(a, b)) == list(range(first, last))
            if index < len(cut.shapes) and not isinstance(cut.shapes[index].layer, Dense):
                assert all(abs(source - target) <= 1 for source, (a, b) in enumerate(pieces) if a < b)
    sent, received = zip(*(cut.traffic(strip) for strip in range(len(cut))), strict=True)
    assert sum(sent) == sum(received)


@settings(max_examples=200, deadline=None)
@given(cuts())
def test_local_layers_compute_what_is_owned(cut):
    for strip in cut.strips if len(cut) > 1 else ():
        for shape, spans in zip(strip.shapes, cut.owned, strict=True):
            a, b = spans[strip.number]
            assert shape.extent is not None and shape.extent.first == a
            if isinstance(shape.layer, Conv):
                left, right = shape.margins
                assert 0 <= left <= shape.layer.pad and right <= shape.layer.pad
                assert (shape.input[2] + left + right - shape.layer.kernel) // shape.layer.stride + 1 == b - a
            assert shape.output[0 if isinstance(shape.layer, Dense) else 2] in (b - a, shape.output[2])
    assert sum(strip.flops for strip in cut.strips) == partition(cut.shapes, 1).strips[0].flops


@settings(max_examples=200, deadline=None)
@given(cuts())
def test_every_parameter_is_held_and_pushed_once(cut):
    total, spans = parameters.total(cut.shapes), parameters.spans(cut.shapes)
    dense = {shape.name for shape in cut.shapes if isinstance(shape.layer, Dense)}
    held = [0] * total
    for strip in cut.strips:
        assert parameters.total(strip.shapes) == strip.parameters == sum(piece.size for piece in strip.pieces)
        for piece in strip.pieces:
            for place in range(piece.start, piece.start + piece.size):
                held[place] += 1
                assert strip.local(place) == piece.local + place - piece.start
    for layer, (start, stop) in spans.items():
        assert set(held[start:stop]) == {1 if layer in dense else len(cut)}
    # Between two edges there is one owner, who holds all of it in one piece.
    for start, stop in pairwise([0, *cut.edges, total]):
        if start < stop and len(cut) > 1:
            owner = cut.strips[cut.owner(start)]
            assert {cut.owner(place) for place in range(start, stop)} == {owner.number}
            assert owner.local(stop - 1) - owner.local(start) == stop - 1 - start


def test_uneven_columns_go_to_the_strips_with_the_least_work():
    shapes = infer([Conv(8, 3, 1, 1), RELU, Conv(8, 3, 1, 1), RELU, Dense(4)], (8, 9, 9), 4)
    owned = partition(shapes, 2).owned
    assert {owned[0], owned[2]} == {((0, 5), (5, 9)), ((0, 4), (4, 9))}


@pytest.mark.parametrize(
    ("entries", "strips", "said"),
    [
        (PAPER, 5, "max_pool2 has 4 columns; set at most 4"),
        (infer([Dense(3)], (1, 8, 8), 3), 4, "dense1 has 3 units; set at most 3"),
        (
            infer([Conv(2, 5, 1, 2), RELU, Conv(2, 5, 1, 2), Dense(9)], (1, 8, 8), 9),
            6,
            "conv2 needs a border wider than its input's narrowest strip of 1 columns; set at most 4",
        ),
    ],
)
def test_too_many_strips_name_the_layer_and_the_most_that_work(entries, strips, said):
    with pytest.raises(UserError, match=f"^layout.partitions = {strips}: {said}$"):
        partition(entries, strips)


def test_auto_takes_the_fewest_strips_that_fit():
    sizes = [max(strip.bytes(32) for strip in partition(PAPER, strips).strips) for strips in (1, 2, 3, 4)]
    assert sizes == sorted(sizes, reverse=True)
    for strips, size in enumerate(sizes, 1):
        assert len(fitting(PAPER, 32, size, 8)) == strips
        assert len(fitting(PAPER, 32, size, strips)) == strips
    assert len(fitting(PAPER, 32, 1, 8)) == 4 and len(fitting(PAPER, 32, 1, 2)) == 2
