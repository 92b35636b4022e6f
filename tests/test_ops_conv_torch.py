"""Convolution, pooling, upsampling, moves of rows and recurrent layers against PyTorch, over generated shapes."""

import graphs
import numpy as np
import pytest

from adam_mpi import nn

torch = pytest.importorskip("torch")
functional = torch.nn.functional

BATCHES = (1, 2, 3, 5, 8, 13, 67)
NAMES = ("first", "second", "third", "fourth")
LARGEST = {1: 17, 2: 9, 3: 5}


class Case:
    """A layer behind a matrix on the last axis, with the mean square as loss, and what PyTorch computes of it."""

    def __init__(self, shape, layer, function, index=None):
        x = nn.input(shape, axes=NAMES[: len(shape)])
        begin = nn.dense(x, shape[-1], name="begin")
        y = layer(begin) if index is None else layer(begin, nn.input(index, "integer", name="index"))
        self.graph = nn.graph(y, nn.mean(nn.elementwise(lambda v: v * v, y)))
        self.function = function

    def module(self, tensors, parameters):
        begin = tensors["input"] @ parameters["begin/weight"].T + parameters["begin/bias"]
        own = {name.partition("/")[2]: p for name, p in parameters.items() if not name.startswith("begin/")}
        index = [tensors["index"]] if "index" in tensors else []
        made = self.function(begin, *index, **own)
        return (made * made).reshape(len(made), -1).mean(1).sum()

    def check(self, samples, seed, rows=3, emitted=False, compiled=False):
        feed = graphs.random_feed(self.graph, samples, seed, rows)
        weights = graphs.random_weights(self.graph, seed)
        graphs.check_torch(self.graph, feed, weights, self.module)
        if emitted or compiled:
            graphs.check_emitted(self.graph, feed, weights, compiled=compiled)


def divisors(count):
    return [number for number in range(1, count + 1) if count % number == 0]


def windows(random, rank, dilated=True):
    """Return sizes of places and fields of random windows that fit into them."""
    while True:
        sizes = random.integers(1, LARGEST[rank] + 1, rank)
        kernel = random.integers(1, 5, rank)
        dilation = random.integers(1, 3, rank) if dilated else np.ones(rank, int)
        reach = (kernel - 1) * dilation + 1
        pad = np.concatenate([random.integers(0, reach), random.integers(0, reach)])
        if not dilated:
            pad = np.minimum(pad, np.tile(kernel // 2, 2))
        if (reach <= sizes + pad[:rank] + pad[rank:]).all():
            break
    fields = {"kernel": kernel, "stride": random.integers(1, 4, rank), "pad": pad, "dilation": dilation}
    return sizes.tolist(), {name: value.tolist() for name, value in fields.items()}


def padded(value, pad, fill=0.0):
    """Pad `value` as a list of all edges before, and then all edges after, says."""
    rank = len(pad) // 2
    edges = [edge for axis in reversed(range(rank)) for edge in (pad[axis], pad[rank + axis])]
    return functional.pad(value, edges, value=fill)


def conv_case(random, rank, depthwise=False):
    sizes, fields = windows(random, rank)
    channels = int(random.integers(1, 9))
    if depthwise:
        groups = channels
    else:
        groups = int(random.choice(divisors(channels)))
    maps = groups if depthwise else groups * int(random.integers(1, 4))
    bias = bool(random.integers(2))
    call = getattr(functional, f"conv{rank}d")

    def function(value, weight, bias=None):
        given = padded(value, fields["pad"])
        return call(given, weight, bias, fields["stride"], 0, fields["dilation"], groups)

    return Case((channels, *sizes), lambda x: nn.conv(x, maps, groups=groups, bias=bias, **fields), function)


def transposed_case(random, rank):
    while True:
        sizes, fields = windows(random, rank)
        pad = np.minimum(fields["pad"][:rank], fields["pad"][rank:])
        more = random.integers(0, fields["stride"])
        reach = (np.array(fields["kernel"]) - 1) * fields["dilation"] + 1
        made = (np.array(sizes) - 1) * fields["stride"] + reach - 2 * pad + more
        # PyTorch wants what is added to be smaller than stride or dilation; we want it smaller than the stride.
        if made.min() > 0:
            break
    groups = int(random.integers(1, 3))
    channels = groups * int(random.integers(1, 4))
    maps = groups * int(random.integers(1, 4))
    call = getattr(functional, f"conv_transpose{rank}d")
    fields |= {"pad": pad.tolist(), "more": more.tolist()}

    def function(value, weight, bias):
        given = (fields["stride"], fields["pad"], fields["more"], groups, fields["dilation"])
        return call(value, weight, bias, *given)

    return Case((channels, *sizes), lambda x: nn.conv_transpose(x, maps, groups=groups, **fields), function)


def pool_case(random, rank, kind):
    sizes, fields = windows(random, rank, dilated=False)
    size, stride, pad = fields["kernel"], fields["stride"], fields["pad"]
    call = getattr(functional, f"{kind}_pool{rank}d")

    def function(value):
        if kind == "max":
            return call(padded(value, pad, -torch.inf), size, stride)
        sums = call(padded(value, pad), size, stride)
        return sums / call(padded(torch.ones_like(value), pad), size, stride)

    layer = getattr(nn, f"{kind}_pool")
    return Case((int(random.integers(1, 6)), *sizes), lambda x: layer(x, size, stride=stride, pad=pad), function)


def upsample_case(random, rank, mode):
    sizes = random.integers(1, LARGEST[rank] + 1, rank).tolist()
    factor = random.integers(1, 4, rank).tolist()
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[rank]

    def function(value):
        made = [size * times for size, times in zip(sizes, factor, strict=True)]
        given = {"mode": linear, "align_corners": False} if mode == "bilinear" else {"mode": mode}
        return functional.interpolate(value, made, **given)

    shape = (int(random.integers(1, 4)), *sizes)
    return Case(
        shape, lambda x: nn.upsample(nn.elementwise(lambda v: v * 1.5, x), factor, mode), lambda v: function(v * 1.5)
    )


def recurrent_case(random, kind):
    length, features, units = random.integers(1, 8, 3).tolist()
    fields = {"depth": int(random.integers(1, 4)), "bidirectional": bool(random.integers(2))}
    last = bool(random.integers(2))

    def function(value, **own):
        module = getattr(torch.nn, kind.upper())(
            features, units, fields["depth"], batch_first=True, bidirectional=fields["bidirectional"]
        ).double()
        names = {"weight": "weight_ih", "recurrent": "weight_hh", "bias": "bias_ih", "recurrent_bias": "bias_hh"}
        given = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        for name, parameter in own.items():
            back = name.endswith("_back")
            stem, _, number = name.removesuffix("_back").rpartition("_")
            stem, layer = (stem, int(number)) if number.isdigit() else (name.removesuffix("_back"), 1)
            given[f"{names[stem]}_l{layer - 1}{'_reverse' if back else ''}"] = parameter
        states, end = torch.func.functional_call(module, given, value)
        if not last:
            return states
        end = end[0] if kind == "lstm" else end
        return torch.cat(list(end[-2:] if fields["bidirectional"] else end[-1:]), dim=1)

    layer = getattr(nn, kind)
    return Case((length, features), lambda x: layer(x, units, last=last, **fields), function)


def gather_case(random, places):
    rows, width = random.integers(1, 6, 2).tolist()

    def function(value, index):
        samples = torch.arange(len(value)).reshape(-1, *[1] * len(places))
        return value[samples, index.clamp(max=rows - 1)] * (index >= 0).unsqueeze(-1)

    return Case((rows, width), nn.gather, function, places), rows


def segment_case(random):
    rows, width, segments = random.integers(1, 6, 3).tolist()

    def function(value, index):
        made = torch.zeros(len(value), segments + 1, width, dtype=value.dtype)
        made = made.index_put((torch.arange(len(value))[:, None], index), value, accumulate=True)
        return made[:, :segments]

    return Case((rows, width), lambda x, i: nn.segment_sum(x, i, segments), function, (rows,)), segments


KINDS = {
    "conv": conv_case,
    "depthwise": lambda random, rank: conv_case(random, rank, depthwise=True),
    "conv_transpose": transposed_case,
    "max_pool": lambda random, rank: pool_case(random, rank, "max"),
    "avg_pool": lambda random, rank: pool_case(random, rank, "avg"),
    "nearest": lambda random, rank: upsample_case(random, rank, "nearest"),
    "bilinear": lambda random, rank: upsample_case(random, rank, "bilinear"),
    "lstm": lambda random, rank: recurrent_case(random, "lstm"),
    "gru": lambda random, rank: recurrent_case(random, "gru"),
}


def run(kind, seed, **options):
    random = np.random.default_rng([seed, *kind.encode()])
    case = KINDS[kind](random, seed % 3 + 1)
    case.check(int(random.choice(BATCHES)), seed, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_generated_shapes(kind):
    for seed in range(9):
        run(kind, seed)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_generated_shapes(kind):
    for seed in range(9, 300):
        run(kind, seed, emitted=seed % 10 == 0)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_generated_shapes_compiled(kind, seed):
    run(kind, seed, compiled=True)


@pytest.mark.parametrize("seed", range(6))
def test_gather_and_segment_sum(seed):
    random = np.random.default_rng(seed)
    case, rows = gather_case(random, [(4,), (2, 3)][seed % 2])
    case.check(5, seed, rows, emitted=seed < 2)
    case, segments = segment_case(random)
    case.check(5, seed, segments, emitted=seed < 2)


def test_numbers_below_zero_stand_for_no_row():
    random = np.random.default_rng(3)
    for case, rows in (gather_case(random, (6,)), segment_case(random)):
        feed = graphs.random_feed(case.graph, 4, classes=rows)
        feed["index"] = np.where(random.random(feed["index"].shape) < 0.4, -1, feed["index"])
        weights = graphs.random_weights(case.graph)
        graphs.check_torch(case.graph, feed, weights, case.module)
        graphs.check_emitted(case.graph, feed, weights)


def test_a_number_that_is_too_large_makes_nan():
    from adam_mpi.model.executors.generated import GeneratedExecutor
    from adam_mpi.model.executors.reference import ReferenceExecutor

    random = np.random.default_rng(4)
    for case, rows in (gather_case(random, (3,)), segment_case(random)):
        feed = graphs.random_feed(case.graph, 2, classes=rows)
        feed["index"][1, 0] = rows
        weights = graphs.random_weights(case.graph).astype(np.float32)
        for executor in (ReferenceExecutor(case.graph), GeneratedExecutor(case.graph, 2, compiled=False, lanes=4)):
            made = executor.run(weights, feed, case.graph.outputs)[case.graph.outputs[0]]
            assert np.isfinite(made[0]).all() and np.isnan(made[1]).any()


@pytest.mark.parametrize("shape, groups", [((6, 7, 5), 6), ((4, 9), 2)])
def test_compiled_convolutions(shape, groups):
    rank = len(shape) - 1
    call = getattr(functional, f"conv{rank}d")
    case = Case(
        shape,
        lambda x: nn.conv(x, shape[0], 3, stride=2, pad=1, groups=groups),
        lambda value, weight, bias: call(value, weight, bias, 2, 1, 1, groups),
    )
    case.check(9, 0, compiled=True)
