"""The generated engine against the reference in float64: hundreds of stacks uncompiled, a few compiled."""

import json
import threading
from dataclasses import dataclass, replace

import numba
import numpy as np
import pytest

from adam_mpi.base import machine
from adam_mpi.base.errors import UserError
from adam_mpi.model import layers
from adam_mpi.model.engine import (
    activations_and_loss,
    conv_choice,
    dense_product,
    jit,
    layer_steps,
    program,
    schedule,
    tuner,
    vector,
    winograd1d,
)
from adam_mpi.model.engine.builder import Builder
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.engine_context import EngineContext
from adam_mpi.model.layers import Activation, AvgPool, Conv, Dense, Dropout, LocalResponseNorm, MaxPool, infer
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import initial, tensors, total, views

FUNCTIONS = [Activation(function) for function in ("relu", "tanh", "sigmoid")]
RELU, TANH, SIGMOID = FUNCTIONS


def some(cases, count, slow=()):
    """Return `cases`, of which only the first `count` run without `--full`, and those of `slow` not with `--fast`."""
    marks = [
        pytest.mark.full if number >= count else pytest.mark.slow if number in slow else None
        for number in range(len(cases))
    ]
    return [case if mark is None else pytest.param(case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


def engine_context(shapes, images, lanes, registers=16, make=jit.uncompiled):
    built = program.build(shapes, images, lanes, registers)
    return EngineContext(shapes, images, 11, built, make(built.text, built.lanes))


def check(shapes, images, count, context, seed=0, rounds=2):
    """Assert that loss, number correct, gradient and inference are those of the reference."""
    random = np.random.default_rng(seed)
    weights = (initial(shapes, seed) + 0.05 * random.standard_normal(total(shapes))).astype(np.float32)
    pixels = random.integers(0, 256, (count, *shapes[0].input), dtype=np.uint8)
    labels = random.integers(0, shapes[-1].output[0], count)
    batch = (pixels, labels, random.permutation(1000)[:count])
    wanted = np.zeros(len(weights))
    given = np.zeros(len(weights), np.float32)
    reference = Network(shapes, images, 11, np.float64).context()
    for _ in range(rounds):
        loss, correct = reference.train(weights.astype(np.float64), wanted, *batch, epoch=1)
        result = context.train(weights, given, *batch, epoch=1)
        assert result[0] == pytest.approx(loss, rel=1e-5) and result[1] == correct
    np.testing.assert_allclose(given, wanted, atol=3e-5 * max(1, np.abs(wanted).max()))
    fresh = np.full_like(given, np.nan)
    context.train(weights, fresh, *batch, epoch=1, overwrite=True)
    np.testing.assert_allclose(fresh, given / rounds, rtol=1e-4, atol=1e-5 * max(1, np.abs(wanted).max()))
    loss, correct = reference.evaluate(weights.astype(np.float64), pixels, labels)
    result = context.evaluate(weights, pixels, labels)
    assert result[0] == pytest.approx(loss, rel=1e-5) and result[1] == correct
    probabilities = reference.predict(weights.astype(np.float64), pixels)
    np.testing.assert_allclose(context.predict(weights, pixels), probabilities, atol=1e-5)


def random_stack(random):
    """Return the shapes of up to three windows and one or two dense layers over a small image, some of it odd."""
    shape = [int(random.integers(1, high)) for high in (4, 9, 9)]
    stack = []
    _, height, width = shape
    for _ in range(random.integers(0, 4)):
        side = min(height, width)
        if random.random() < 0.7:
            kernel = int(random.integers(1, 6))
            pad = int(random.integers(0, kernel))
            if kernel > side + 2 * pad:
                continue
            stride = int(random.integers(1, 5)) if random.random() < 0.5 else 1
            stack.append(Conv(int(random.integers(1, 9)), kernel, stride, pad))
            height, width = ((size + 2 * pad - kernel) // stride + 1 for size in (height, width))
        else:
            size = int(random.integers(1, min(3, side) + 1))
            kind = AvgPool if random.random() < 0.3 else MaxPool
            stack.append(kind(size, int(random.integers(1, 4)) if random.random() < 0.5 else size))
            height, width = ((extent - size) // stack[-1].stride + 1 for extent in (height, width))
        if random.random() < 0.7:
            stack.append(FUNCTIONS[random.integers(3)] if random.random() < 0.4 else RELU)
        if min(height, width) >= 2 and random.random() < 0.3:
            stack.append(MaxPool(2))
            height, width = (size // 2 for size in (height, width))
        if random.random() < 0.2:
            stack.append(LocalResponseNorm(int(random.integers(1, 6)), 1.5, 0.3, float(random.choice([0.75, 0.4]))))
        if random.random() < 0.2:
            stack.append(Dropout(float(random.choice([0.0, 0.3, 0.8]))))
    if random.random() < 0.7:
        stack += [Dense(int(random.integers(1, 20))), FUNCTIONS[random.integers(3)]]
        stack += [Dropout(0.5)] if random.random() < 0.3 else []
    classes = int(random.integers(2, 12))
    return infer([*stack, Dense(classes)], tuple(shape), classes)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("first", some(range(0, 240, 20), 2, slow=(0,)))
def test_emitted_source_agrees_with_the_reference(first):
    for seed in range(first, first + 20):
        random = np.random.default_rng(seed)
        shapes = random_stack(random)
        lanes = int(random.choice([4, 4, 8, 16]))
        registers = int(random.choice([16, 32]))
        images = int(random.integers(1, 68)) if seed % 10 == 0 else int(random.integers(1, 14))
        count = int(random.integers(1, images + 1))
        check(shapes, images, count, engine_context(shapes, images, lanes, registers), seed)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("first", some(range(0, 100, 10), 1))
def test_few_images_agree_with_the_reference(first):
    for seed in range(first, first + 10):
        random = np.random.default_rng(seed)
        shapes = random_stack(random)
        lanes = int(random.choice([4, 8, 16]))
        registers = int(random.choice([16, 32]))
        images = int(random.integers(1, (lanes - 1) // 2 + 1))
        context = engine_context(shapes, images, lanes, registers)
        assert context.program.lanes == 1
        check(shapes, images, images, context, seed)


@pytest.mark.parametrize(("units", "features", "images"), [(33, 64, 16), (130, 26, 12), (7, 97, 9)])
def test_packed_weights_agree_with_the_reference(monkeypatch, units, features, images):
    monkeypatch.setattr(dense_product, "PACKED_WEIGHTS", 1)
    shapes = infer([Dense(features), RELU, Dense(units), TANH, Dense(4)], (1, 2, 3), 4)
    context = engine_context(shapes, images, 4)
    assert "panel + (term" in context.program.text
    check(shapes, images, images, context)


# Wide enough for Winograd's transform: input shape, layers.
TRANSFORMED = [
    ((16, 2, 2), [Conv(16, 3, 1, 1), TANH, Conv(16, 3, 1, 2), RELU]),
    ((17, 6, 4), [Conv(16, 3, 1, 1), RELU, Conv(18, 3), RELU, MaxPool(2)]),
    ((16, 6, 8), [Conv(16, 3, 1, 2), MaxPool(2)]),
    ((16, 8, 8), [Conv(20, 3, 1, 1), RELU, MaxPool(2), Conv(16, 3, 1, 1), RELU]),
]


@pytest.mark.parametrize("case", some(TRANSFORMED, 1))
def test_winograd_agrees_with_the_reference(case):
    shape, stack = case
    shapes = infer([*stack, Dense(3)], shape, 3)
    built = program.build(shapes, 9, 4, 16)
    assert "Winograd" in built.text
    check(shapes, 9, 9, engine_context(shapes, 9, 4), 1)


# Kernels of five for Winograd's transform along rows: input shape, layers.
ALONG_ROWS = [
    ((3, 9, 10), [Conv(9, 5, 1, 2), RELU, Conv(8, 5, 1, 1), TANH]),
    ((1, 12, 12), [Conv(10, 5), RELU, MaxPool(2)]),
    ((2, 11, 13), [Conv(8, 5, 1, 4), RELU, MaxPool(2), Conv(11, 5, 1, 3), MaxPool(3)]),
    ((9, 5, 8), [Conv(16, 5, 1, 2), RELU, Conv(8, 5), RELU]),
]


@pytest.mark.parametrize("case", some(ALONG_ROWS, 2, slow=(0,)))
def test_winograd_along_rows_agrees_with_the_reference(case):
    shape, stack = case
    shapes = infer([*stack, Dense(3)], shape, 3)
    context = engine_context(shapes, 6, 4)
    assert all(
        context.program.choices[s.name]["algorithm"] == "winograd1d" for s in shapes if s.name.startswith("conv")
    )
    check(shapes, 6, 6, context, 1)


def test_matrices_of_winograd1d_are_those_of_a_correlation():
    random = np.random.default_rng(0)
    for kernel in (3, 5):
        outputs, kernels, inputs = map(np.array, winograd1d.matrices(kernel))
        values = random.standard_normal(kernel + 3)
        weights = random.standard_normal(kernel)
        wanted = [values[start : start + kernel] @ weights for start in range(4)]
        np.testing.assert_allclose(outputs @ ((kernels @ weights) * (inputs @ values)), wanted)


# Name: input shape, images, layers. The first four have a kernel of every kind.
COMPILED = {
    "all kinds": (
        (2, 9, 8),
        20,
        [
            Conv(3, 3, 1, 1),
            RELU,
            MaxPool(2),
            LocalResponseNorm(3),
            TANH,
            MaxPool(2, 1),
            AvgPool(2, 1),
            Dropout(0.3),
            SIGMOID,
            Dense(9),
            RELU,
        ],
    ),
    "winograd2d": ((16, 4, 4), 9, [Conv(16, 1), Conv(17, 3, 1, 1), RELU, MaxPool(2)]),
    "few images": ((2, 7, 6), 1, [Conv(3, 3, 2, 2), RELU, Conv(4, 2), RELU, MaxPool(2), Dense(9), RELU, Dropout(0.2)]),
    "winograd1d": ((2, 10, 11), 21, [Conv(9, 5, 1, 2), RELU, Conv(8, 5, 1, 3), RELU, MaxPool(2)]),
    "winograd twice": (
        (3, 8, 8),
        67,
        [Conv(16, 3, 1, 1), RELU, Conv(17, 3, 1, 1), RELU, MaxPool(2), Conv(16, 3, 1, 1), RELU],
    ),
    "everything fused": (
        (2, 11, 10),
        67,
        [Conv(5, 3, 1, 1), RELU, MaxPool(2), Conv(7, 2), MaxPool(2), RELU, Dense(11), RELU],
    ),
    "strides and overlap": ((3, 13, 12), 67, [Conv(6, 5, 2, 4), TANH, MaxPool(3, 2), Conv(4, 3, 3, 2), Dropout(0.4)]),
    "average and normalize": ((3, 7, 8), 67, [Conv(6, 2), RELU, LocalResponseNorm(), AvgPool(3, 2), TANH]),
    "activations": ((1, 6, 6), 67, [Dense(9), RELU, Dropout(0.3), SIGMOID, TANH, Dense(8), RELU, TANH]),
    "one pixel": ((1, 1, 1), 67, [Conv(1, 1), RELU, Conv(3, 5, 2, 4), RELU]),
}
QUICK = [(stack, machine.lanes()) for stack in ("all kinds", "winograd2d", "few images", "winograd1d")]


def compiled_stack(name):
    shape, images, layers = COMPILED[name]
    return infer([*layers, Dense(5)], shape, 5), images


def all_compiled():
    others = [(stack, lanes) for lanes in (16, 8, 4) for stack in COMPILED]
    return some([*QUICK, *(case for case in others if case not in QUICK)], len(QUICK))


# Compiling takes seconds per stack, more on a busy machine.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", all_compiled())
def test_compiled_kernels_agree_with_the_reference(case):
    stack, lanes = case
    shapes, images = compiled_stack(stack)
    context = engine_context(shapes, images, lanes, make=jit.run)
    for seed, count in enumerate({images, 1, (images + 1) // 2, max(1, images - 3)}):
        check(shapes, images, count, context, seed)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(500, 512))
def test_compiled_kernels_of_random_stacks_agree_with_the_reference(seed):
    random = np.random.default_rng(seed)
    shapes = random_stack(random)
    images = int(random.integers(1, 40))
    context = engine_context(shapes, images, int(random.choice([4, 8, 16])), make=jit.run)
    check(shapes, images, images, context, seed)


# Every operation but dropout, whose masks are our own.
AS_IN_PYTORCH = [
    ((2, 9, 8), [Conv(5, 3, 1, 1), RELU, MaxPool(2), Conv(7, 3, 2, 2), RELU, MaxPool(2, 1), Dense(11), RELU]),
    (
        (2, 9, 8),
        [Conv(8, 5, 1, 2), RELU, MaxPool(2), LocalResponseNorm(3, 1.5, 0.3), Conv(9, 2), TANH, AvgPool(2, 1), SIGMOID],
    ),
    ((16, 4, 6), [Conv(16, 3, 1, 1), SIGMOID, Conv(17, 3, 1, 1), RELU, MaxPool(2)]),
]


def in_pytorch(torch, shapes, values, x):
    """Return the scores of the layers `shapes`, as PyTorch computes them."""
    functions = torch.nn.functional
    given = iter(values)
    for shape in shapes:
        layer = shape.layer
        if isinstance(layer, Conv):
            x = functions.conv2d(x, next(given), next(given), layer.stride, layer.pad)
        elif isinstance(layer, Dense):
            x = functions.linear(x.flatten(1), next(given), next(given))
        elif isinstance(layer, LocalResponseNorm):
            x = functions.local_response_norm(x, layer.size, layer.scale, layer.power, layer.offset)
        elif isinstance(layer, MaxPool):
            pool = functions.avg_pool2d if isinstance(layer, AvgPool) else functions.max_pool2d
            x = pool(x, layer.size, layer.stride)
        else:
            x = getattr(torch, layer.function)(x)
    return x


@pytest.mark.parametrize("case", AS_IN_PYTORCH)
@pytest.mark.parametrize(("images", "lanes"), [(6, 4), (1, 8)])
def test_gradients_are_those_of_pytorch(images, lanes, case):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: compared with the reference only")
    shapes = infer([*case[1], Dense(5)], case[0], 5)
    weights = initial(shapes, 3)
    pixels, labels, ids = block(images, shapes)
    gradient = np.zeros_like(weights)
    loss, _ = engine_context(shapes, images, lanes).train(weights, gradient, pixels, labels, ids, epoch=0)
    values = [torch.tensor(view, requires_grad=True) for view in views(weights, tensors(shapes)).values()]
    scores = in_pytorch(torch, shapes, values, torch.from_numpy(pixels / np.float32(255)))
    wanted = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels), reduction="sum")
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    flat = np.concatenate([value.grad.numpy().ravel() for value in values])
    np.testing.assert_allclose(gradient, flat, atol=1e-5 * np.abs(flat).max())


def test_a_diverged_network_shows():
    shapes = compiled_stack("everything fused")[0]
    weights = initial(shapes, 0)
    weights[0] = np.nan
    context = engine_context(shapes, 4, 4)
    loss, _ = context.train(weights, np.zeros_like(weights), *block(4, shapes), 0)
    assert np.isnan(loss)


def block(count, shapes, seed=0):
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, *shapes[0].input), dtype=np.uint8)
    return pixels, random.integers(0, shapes[-1].output[0], count), random.permutation(1000)[:count]


@pytest.mark.slow
def test_two_threads_give_what_one_gives():
    shapes, images = compiled_stack("all kinds")
    network = Network(shapes, images, 11, engine="generated")
    weights = initial(shapes, 3)
    blocks = [block(16, shapes, seed) for seed in (1, 2)]

    def gradient_of(context, data):
        gradient = np.zeros_like(weights)
        return context.train(weights, gradient, *data, 1), gradient

    alone = [gradient_of(network.context(), data) for data in blocks]
    together: dict[int, list] = {}
    start = threading.Barrier(2)

    def work(index):
        context = network.context()
        start.wait()
        together[index] = [gradient_of(context, blocks[index]) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in (0, 1):
        assert len(together[index]) == 50
        for result, gradient in together[index]:
            assert result == alone[index][0]
            np.testing.assert_array_equal(gradient, alone[index][1])


def test_float64_takes_the_reference():
    shapes = infer([Dense(2)], (1, 2, 2), 2)
    assert Network(shapes, 4, 0, np.float64, "generated").program is None


def test_buffers_that_live_together_do_not_meet():
    shapes = compiled_stack("everything fused")[0]
    builder = Builder(shapes, images=64, lanes=8, registers=16, copied=program.COPIED)
    index = 0
    while index < len(shapes):
        index += layer_steps.add(builder, index)
    phases = [phase for part in builder.parts() for phase in part.lasting(builder.blocks)]
    plan = schedule.lay_out(phases, builder.blocks)
    lifetimes = schedule.lifetimes(phases)
    for one in lifetimes:
        assert plan.places[one.buffer] + schedule.size(one.buffer, builder.blocks) <= plan.floats
        for other in lifetimes:
            if one != other and one.first <= other.last and other.first <= one.last:
                spans = sorted((plan.places[x.buffer], schedule.size(x.buffer, builder.blocks)) for x in (one, other))
                assert spans[0][0] + spans[0][1] <= spans[1][0]
    sizes = sum(schedule.size(lifetime.buffer, builder.blocks) for lifetime in lifetimes)
    assert plan.floats < sizes == plan.unshared


@dataclass(frozen=True)
class Unknown:
    """A layer that keeps the shape of its input, and that no engine knows."""


def test_a_layer_without_kernels_is_named():
    shapes = list(infer([Conv(3, 3), TANH, TANH, Dense(2)], (1, 8, 8), 2))
    shapes[2] = replace(shapes[2], name="unknown1", layer=Unknown())
    with pytest.raises(UserError, match="layer unknown1: .* no kernels for Unknown.*layer_steps.STEPS"):
        program.build(shapes, 16, 8, 16)


def test_an_activation_without_a_formula_is_named(monkeypatch):
    shapes = infer([Dense(3), TANH, Dense(2)], (1, 2, 2), 2)
    for rule in ("FORWARD", "BACKWARD"):
        with monkeypatch.context() as patch:
            patch.delitem(getattr(activations_and_loss, rule), "tanh")
            with pytest.raises(UserError, match=f"'tanh'.*elementwise.{rule}"):
                program.build(shapes, 16, 8, 16)


def test_every_kind_of_layer_has_a_rule():
    assert set(layers.KINDS.values()) <= set(layer_steps.STEPS)
    assert set(layers.FUNCTIONS) == set(activations_and_loss.FORWARD) == set(activations_and_loss.BACKWARD)


def test_denormals_are_flushed_while_the_kernels_run():
    if not machine.x86():
        pytest.skip("only x86 has the control word")

    @numba.njit
    def scale(values, factor):
        before = vector.flush_to_zero()
        for index in range(values.size):
            values[index] *= factor
        vector.restore(before)

    tiny = np.full(64, 1e-30, np.float32)
    factor = np.float32(1e-10)
    flushed = tiny.copy()
    scale(flushed, factor)
    assert not flushed.any()
    # The thread is left as it was: there a denormal is a number.
    assert (tiny * factor).all()


@pytest.mark.slow
def test_sources_are_shown_on_demand(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAM_MPI_SHOW_KERNELS", str(tmp_path / "shown"))
    jit.run.cache_clear()
    Network(*compiled_stack("few images"), 0, engine="generated").context()
    (shown,) = (tmp_path / "shown").iterdir()
    assert "def dense1_forward" in shown.read_text()


def square(channels, maps, size=8, kernel=3, pad=1):
    """Return a convolution of stride 1 over square planes."""
    return Shape(channels, height=size, width=size, maps=maps, kernel=kernel, stride=1, pad=pad)


def test_choices_are_reported_and_can_be_given_again():
    shapes = compiled_stack("winograd twice")[0]
    first = program.build(shapes, 8, 8, 16)
    assert [choice["algorithm"] for choice in first.choices.values()] == ["direct", "winograd2d", "winograd2d"]
    given = {name: conv_choice.choices(square(3, 16), 1, 16)[0] for name in ("conv1",)}
    given |= json.loads(json.dumps({"conv2": conv_choice.choices(square(16, 17), 2, 16)[1]}))
    second = program.build(shapes, 8, 8, 16, given)
    assert [choice["algorithm"] for choice in second.choices.values()] == ["direct", "direct", "winograd2d"]
    assert program.build(shapes, 8, 8, 16, json.loads(json.dumps(second.choices))).text == second.text


def test_the_tuner_measures_once(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAM_MPI_CACHE", str(tmp_path))
    shapes = infer([Conv(4, 2), RELU, Dense(2)], (1, 4, 4), 2)
    measured = []

    def measure(spec, candidates):
        measured.append(spec.shape)
        return candidates[-1]

    monkeypatch.setattr(tuner, "measure", measure)
    assert tuner.tune(shapes) == tuner.tune(shapes)
    assert measured == [square(1, 4, size=4, kernel=2, pad=0)]
    assert Network(shapes, 4, 0, engine="generated", choices=tuner.tune(shapes)).choices == tuner.tune(shapes)


@pytest.mark.parametrize("stack", ["all kinds", "winograd twice", "winograd1d", "strides and overlap"])
def test_fixed_choices_are_those_of_a_program_that_is_given_none(stack):
    shapes, images = compiled_stack(stack)
    assert tuner.fixed(shapes) == Network(shapes, images, 0, engine="generated").choices


def test_weights_may_be_of_any_kind_of_array():
    shapes = infer([Dense(3)], (1, 2, 2), 3)
    context = engine_context(shapes, 4, 4)
    weights = initial(shapes, 0)
    pixels, labels, _ = block(4, shapes)
    frozen = np.repeat(weights.astype(np.float64), 2)[::2]
    frozen.flags.writeable = False
    assert context.evaluate(frozen, pixels, labels) == context.evaluate(weights, pixels, labels)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ADAM_MPI_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set ADAM_MPI_CACHE"):
        jit.folder()
