"""Some spans of a flat vector, filled from pieces of any size."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from adam_mpi.model.layers import Activation, Conv, Dense, infer
from adam_mpi.model.parameters import drawn, initial, total
from adam_mpi.sharding.shards import Spans, gathered, joined, meets

SIZE = 60
edges = some.lists(some.integers(0, SIZE), max_size=8).map(lambda given: sorted({0, SIZE, *given}))


@given(edges, edges, some.randoms())
def test_spans_are_what_the_pieces_have_there(cuts, others, random):
    flat = np.arange(SIZE, dtype=np.float32)
    spans = [span for span in zip(cuts, cuts[1:], strict=False) if random.random() < 0.5]
    pieces = [(a, {"weights": flat[a:b], "state": -flat[a:b]}) for a, b in zip(others, others[1:], strict=False)]
    random.shuffle(pieces)
    for number, (_, values) in enumerate(pieces):
        values["batches"] = np.array(float(number))
    found = gathered(iter(pieces), spans)
    for a, b in spans:
        np.testing.assert_array_equal(found["weights"][a:b], flat[a:b])
        np.testing.assert_array_equal(found["state"][a:b], -flat[a:b])
        met = [
            number for number, (start, values) in enumerate(pieces) if start < b and a < start + values["state"].size
        ]
        assert found["batches"][a:b] == max(met)


@given(edges, some.randoms(), some.integers(0, SIZE - 1), some.integers(1, SIZE))
def test_what_meets_spans(cuts, random, start, size):
    spans = [span for span in zip(cuts, cuts[1:], strict=False) if random.random() < 0.5]
    stop = min(start + size, SIZE)
    assert meets(joined(spans), start, stop) == any(a < stop and start < b for a, b in spans)
    assert sum(b - a for a, b in joined(spans)) == sum(b - a for a, b in spans)


def test_first_weights_are_the_same_however_they_are_cut(monkeypatch):
    shapes = infer([Conv(3, 3), Activation("relu"), Dense(7), Dense(4)], (2, 6, 6), 4)
    whole = initial(shapes, 5)
    monkeypatch.setattr("adam_mpi.model.parameters.PIECE", 11)
    assert max(len(values) for _, values in drawn(shapes, 5)) == 11
    np.testing.assert_array_equal(initial(shapes, 5), whole)
    part = Spans([(20, 90)])
    for start, values in drawn(shapes, 5):
        part.put(start, values)
    np.testing.assert_array_equal(part[20:90], whole[20:90])
    assert len(whole) == total(shapes)
