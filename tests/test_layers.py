import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi.base.errors import UserError
from adam_mpi.model.layers import Activation, AvgPool, Conv, Dense, Dropout, LocalResponseNorm, MaxPool, infer, parse

MNIST = [
    {"kind": "conv", "channels": 10, "kernel": 5},
    "relu",
    {"kind": "max_pool", "size": 2},
    {"kind": "conv", "channels": 20, "kernel": 5},
    "relu",
    {"kind": "max_pool", "size": 2},
    {"kind": "dense", "units": 400},
    "relu",
    {"kind": "dropout", "rate": 0.5},
    {"kind": "dense", "units": 10},
]


def count_windows(side, size, stride, pad):
    """Slide a window along a padded line and count where it lies wholly inside."""
    count, start = 0, -pad
    while start + size <= side + pad:
        count, start = count + 1, start + stride
    return count


def test_parse_reads_every_kind():
    entries = [
        {"kind": "conv", "channels": 3, "kernel": 5, "stride": 2, "pad": 4},
        {"kind": "conv", "channels": 3, "kernel": 5},
        "relu",
        "tanh",
        "sigmoid",
        {"kind": "max_pool", "size": 3, "stride": 2},
        {"kind": "max_pool", "size": 3},
        {"kind": "dropout", "rate": 0},
        {"kind": "dense", "units": 7},
    ]
    functions = Activation("relu"), Activation("tanh"), Activation("sigmoid")
    rest = MaxPool(3, 2), MaxPool(3, 3), Dropout(0), Dense(7)
    assert parse(entries) == (Conv(3, 5, 2, 4), Conv(3, 5, 1, 0), *functions, *rest)


def test_infer_names_and_counts_the_mnist_model():
    shapes = infer(parse(MNIST), (1, 28, 28), 10)
    names = "conv1 relu1 max_pool1 conv2 relu2 max_pool2 dense1 relu3 dropout1 dense2"
    assert " ".join(shape.name for shape in shapes) == names
    assert [shape.output for shape in shapes[:6:2]] == [(10, 24, 24), (10, 12, 12), (20, 8, 8)]
    assert shapes[6].weight == (400, 320) and shapes[6].bias == (400,) and shapes[6].output == (400, 1, 1)
    assert [shape.parameters for shape in shapes] == [260, 0, 0, 5020, 0, 0, 128400, 0, 0, 4010]
    assert shapes[0].connections == 24 * 24 * 10 * 25 and shapes[1].connections == 0
    assert shapes[3].connections == 8 * 8 * 20 * 250 and shapes[6].connections == 400 * 320


@given(st.data())
def test_output_sizes_agree_with_sliding_a_window(data):
    number = st.integers(1, 12)
    channels, rows, columns, kernel, stride = (data.draw(number) for _ in range(5))
    pad = data.draw(st.integers(0, kernel - 1))
    last = Dense(10)
    for layer, padding in ((Conv(4, kernel, stride, pad), pad), (MaxPool(kernel, stride), 0)):
        sizes = tuple(count_windows(side, kernel, stride, padding) for side in (rows, columns))
        if 0 in sizes:
            with pytest.raises(UserError, match=r"model\.layers\[0\]"):
                infer([layer, last], (channels, rows, columns), 10)
            continue
        first, dense = infer([layer, last], (channels, rows, columns), 10)
        maps = 4 if isinstance(layer, Conv) else channels
        assert first.output == (maps, *sizes) == dense.input
        assert dense.weight == (10, maps * sizes[0] * sizes[1])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("rellu", r"model\.layers\[1\] is 'rellu'; allowed are relu, tanh, sigmoid"),
        (5, r"model\.layers\[1\] is 5"),
        (
            {"channels": 3},
            r"model\.layers\[1\]\.kind is missing; allowed are conv, max_pool, avg_pool, lrn, dense, dropout",
        ),
        ({"kind": "convolution"}, r"\.kind is 'convolution'; allowed are conv"),
        ({"kind": ["conv"]}, r"\.kind is \['conv'\]; allowed are conv"),
        (
            {"kind": "conv", "channels": 3, "kernel": 5, "strid": 1},
            r"\.strid is not known.*channels, kernel, stride, pad",
        ),
        ({"kind": "conv", "channels": 3}, r"model\.layers\[1\]\.kernel is missing"),
        (
            {"kind": "conv", "channels": 3, "kernel": "5"},
            r"model\.layers\[1\]\.kernel is '5'; give a whole number, 1 or",
        ),
        ({"kind": "conv", "channels": 3, "kernel": 5.0}, r"\.kernel is 5\.0"),
        ({"kind": "conv", "channels": True, "kernel": 5}, r"\.channels is True"),
        ({"kind": "conv", "channels": 0, "kernel": 5}, r"\.channels is 0"),
        ({"kind": "conv", "channels": 3, "kernel": 5, "stride": 0}, r"\.stride is 0"),
        ({"kind": "conv", "channels": 3, "kernel": 5, "pad": -1}, r"\.pad is -1; give a whole number, 0 or more"),
        ({"kind": "conv", "channels": 3, "kernel": 5, "pad": 5}, r"\.pad is 5; a kernel of 5 allows at most 4"),
        ({"kind": "max_pool"}, r"\.size is missing"),
        ({"kind": "max_pool", "size": 2, "stride": None}, r"\.stride is None"),
        ({"kind": "dense", "units": -3}, r"\.units is -3"),
        ({"kind": "dropout", "rate": 1}, r"\.rate is 1; give a number from 0"),
        ({"kind": "dropout", "rate": float("nan")}, r"\.rate is nan"),
        ({"kind": "dropout", "rate": False}, r"\.rate is False"),
    ],
)
def test_parse_names_what_is_wrong(entry, said):
    with pytest.raises(UserError, match=said) as caught:
        parse(["relu", entry])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"kind": "conv", "maps": 3, "kernel": 5}, "model.layers[1].maps is now model.layers[1].channels; use the"),
        ({"kind": "pool", "size": 2}, "model.layers[1].kind 'pool' is now 'max_pool'; use the new name"),
        ({"kind": "average", "size": 2}, "model.layers[1].kind 'average' is now 'avg_pool'; use the new name"),
        ({"kind": "dense", "maps": 3}, "model.layers[1].maps is not known; a dense layer has units"),
    ],
)
def test_a_former_name_is_refused_with_the_present_one(entry, said):
    with pytest.raises(UserError) as error:
        parse(["relu", entry])
    assert str(error.value).startswith(said)


def test_parse_wants_a_list():
    with pytest.raises(UserError, match=r"model\.layers is 'relu'; give a list"):
        parse("relu")


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([], r"model\.layers is empty; give at least .*units = 10"),
        ([Dense(9)], r"model\.layers\[0\]\.units is 9; .*set it to 10"),
        ([Dense(10), Activation("relu")], r"model\.layers\[1\] is the last layer and must be dense.*units = 10"),
        ([Dense(5), Conv(3, 1), Dense(10)], r"model\.layers\[1\] \(conv1\) comes after a dense layer"),
        (
            [Dense(5), Activation("relu"), MaxPool(1), Dense(10)],
            r"model\.layers\[2\] \(max_pool1\) comes after a dense",
        ),
        ([Conv(3, 5), Conv(3, 7), Dense(10)], r"model\.layers\[1\]\.kernel \(conv2\) is 7.*6x4; give at most 4"),
        ([Conv(3, 12, 1, 1), Dense(10)], r"\.kernel \(conv1\) is 12.*10x8 with pad 1; give at most 10"),
        (
            [MaxPool(9), Dense(10)],
            r"model\.layers\[0\]\.size \(max_pool1\) is 9, but its input is 10x8; give at most 8",
        ),
    ],
)
def test_infer_names_what_does_not_fit(layers, said):
    with pytest.raises(UserError, match=said) as caught:
        infer(layers, (1, 10, 8), 10)
    assert "\n" not in str(caught.value)


def test_average_and_lrn_are_parsed_with_their_defaults():
    normalize = {"kind": "lrn", "size": 3, "scale": 1}
    parsed = parse([{"kind": "avg_pool", "size": 3}, normalize, {"kind": "dense", "units": 2}])
    assert parsed[:2] == (AvgPool(3, 3), LocalResponseNorm(3, 2.0, 1, 0.75))
    shapes = infer(parsed, (4, 7, 7), 2)
    assert [shape.output for shape in shapes] == [(4, 2, 2), (4, 2, 2), (2, 1, 1)]
    with pytest.raises(UserError, match="offset is 0; give a number, above 0"):
        parse([{"kind": "lrn", "offset": 0}])
