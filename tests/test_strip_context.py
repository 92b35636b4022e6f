"""A model in strips computes what it computes in one piece: M contexts in one process, exchanging in memory."""

from itertools import pairwise

import numpy as np
import pytest
from strips import columns, exchange, gather, run, scatter

from adam_mpi.base import machine
from adam_mpi.base.errors import UserError
from adam_mpi.model.engine import conv_choice, jit, program
from adam_mpi.model.engine.convolution import shape_of
from adam_mpi.model.engine.engine_context import EngineStripContext
from adam_mpi.model.exchange import BACK, FORWARD, Exchange
from adam_mpi.model.layers import Activation, AvgPool, Conv, Dense, Dropout, LocalResponseNorm, MaxPool, infer
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import initial, total
from adam_mpi.model.partition import partition
from adam_mpi.model.reference_strip_context import StripContext

RELU, TANH = Activation("relu"), Activation("tanh")
STACKS = {
    "no conv": ((2, 5, 7), [Dense(9), RELU, Dense(5)]),
    "dropout and no conv": ((1, 4, 5), [Dropout(0.3), Dense(11), TANH, Dropout(0.5), Dense(5)]),
    "one conv": ((2, 9, 12), [Conv(3, 3), RELU, Dense(5)]),
    "odd width": ((1, 9, 13), [Conv(4, 3, 1, 1), RELU, MaxPool(2), Conv(3, 3, 1, 1), TANH, Dense(6), RELU, Dense(5)]),
    "stride 2": ((2, 11, 17), [Conv(4, 3, 2, 1), RELU, Conv(3, 3, 1, 1), RELU, Dense(5)]),
    "stride 3, kernel 1": ((2, 10, 16), [Conv(4, 1, 3), TANH, Dense(7), RELU, Dense(5)]),
    "pad 3": ((1, 8, 14), [Conv(3, 5, 1, 3), RELU, MaxPool(2), Conv(2, 4, 1, 3), Dense(5)]),
    "overlapping pools": (
        (2, 13, 19),
        [Conv(3, 3, 1, 1), RELU, MaxPool(3, 2), Conv(4, 3, 1, 1), MaxPool(3, 2), Dense(5)],
    ),
    "average": ((2, 9, 15), [Conv(3, 2), RELU, AvgPool(2), Conv(2, 2), TANH, AvgPool(3, 1), Dense(5)]),
    "normalize and dropout": (
        (2, 9, 14),
        [Conv(6, 3), RELU, LocalResponseNorm(3), Dropout(0.4), MaxPool(2), Dense(8), Dense(5)],
    ),
    "pool first": ((2, 10, 18), [Dropout(0.2), MaxPool(2), Conv(3, 2), RELU, MaxPool(1, 1), Dense(5)]),
    "five convs": (
        (1, 16, 23),
        [layer for _ in range(5) for layer in (Conv(3, 3, 1, 1), RELU)] + [MaxPool(2), Dense(5)],
    ),
    "the paper's": (
        (1, 28, 28),
        [Conv(10, 5), RELU, MaxPool(2), Conv(20, 5), RELU, MaxPool(2), Dense(40), RELU, Dense(5)],
    ),
}
# Wide enough for Winograd's transforms in two dimensions and in one; uneven cuts leave odd columns.
TRANSFORMED = {
    "squares": (
        (16, 4, 14),
        [Conv(16, 3, 1, 1), RELU, Conv(18, 3, 1, 1), RELU, MaxPool(2), Conv(16, 3, 1, 2), Dense(5)],
    ),
    "squares without padding": ((16, 6, 13), [Conv(16, 3), RELU, Conv(16, 3, 1, 1), TANH, Conv(16, 3), Dense(5)]),
    "winograd1d": (
        (2, 6, 25),
        [Conv(9, 5, 1, 2), RELU, Conv(8, 5, 1, 3), RELU, MaxPool(2), Conv(8, 5, 1, 2), Dense(5)],
    ),
}
SLOW = ("the paper's", "five convs")
every_cut = pytest.mark.parametrize("strips", [2, 3, 4])
every_stack = pytest.mark.parametrize("stack", STACKS)


def cut_of(stack, strips):
    shape, layers = (STACKS | TRANSFORMED)[stack]
    try:
        return partition(infer(layers, shape, 5), strips)
    except UserError as error:
        pytest.skip(str(error))


def prepare(stack, strips, images=6):
    cut = cut_of(stack, strips)
    random = np.random.default_rng(4)
    weights = initial(cut.shapes, 3) + 0.05 * random.standard_normal(total(cut.shapes))
    pixels = random.integers(0, 256, (images, *cut.shapes[0].input), dtype=np.uint8)
    return cut, weights, (pixels, random.integers(0, 5, images), random.permutation(1000)[:images])


@every_stack
@every_cut
def test_loss_and_gradient_are_those_of_one_piece(stack, strips):
    cut, weights, (pixels, labels, ids) = prepare(stack, strips)
    gradient = np.zeros_like(weights)
    whole = Network(cut.shapes, 8, 11, np.float64).context()
    loss, correct = whole.train(weights, gradient, pixels, labels, ids, 2)
    contexts = [StripContext(strip, 8, 11, np.float64) for strip in cut.strips]
    parts = scatter(cut, weights)
    gradients = [np.full_like(part, np.nan) for part in parts]
    given = zip(contexts, parts, gradients, columns(cut, pixels), strict=True)
    started = [context.begin(part, own, seen, labels, ids, 2) for context, part, own, seen in given]
    for result in run(contexts, started):
        assert result == (pytest.approx(loss, rel=1e-12), correct)
    np.testing.assert_allclose(gather(cut, gradients), gradient, rtol=1e-9, atol=1e-12)
    check_outputs(contexts, whole, len(labels), 1e-12)


def check_outputs(contexts, whole, count, most):
    """Every strip knows the outputs of the whole, which metrics are computed from."""
    expected = whole.outputs_of(count)
    assert expected.shape == (count, 5)
    for context in contexts:
        np.testing.assert_allclose(context.outputs_of(count), expected, atol=most)


def check_generated(stack, strips, lanes, make, images=6):
    """A full block and a part of one, on one context each: losses, gradients and evaluation as of one piece."""
    cut, weights, batch = prepare(stack, strips, images)
    programs = [program.build(strip.stack, images, lanes, 16) for strip in cut.strips]
    contexts = [
        EngineStripContext(strip, images, 11, built, make(built.text, built.lanes))
        for strip, built in zip(cut.strips, programs, strict=True)
    ]
    whole = Network(cut.shapes, images, 11, np.float64).context()
    parts = scatter(cut, weights.astype(np.float32))
    gradients = [np.full_like(part, np.nan) for part in parts]
    for count in (images, 1, images - 1):
        pixels, labels, ids = (values[:count] for values in batch)
        gradient = np.zeros_like(weights)
        loss, correct = whole.train(weights.astype(np.float32).astype(float), gradient, pixels, labels, ids, 2)
        given = list(zip(contexts, parts, gradients, columns(cut, pixels), strict=True))
        started = [context.begin(part, own, seen, labels, ids, 2) for context, part, own, seen in given]
        assert [context.blocks for context in contexts] == [-(-count // built.lanes) for built in programs]
        for result in run(contexts, started):
            assert result == (pytest.approx(loss, rel=1e-5), correct)
        np.testing.assert_allclose(gather(cut, gradients), gradient, atol=1e-5 * max(1, np.abs(gradient).max()))
        expected = whole.evaluate(weights.astype(np.float32).astype(float), pixels, labels)
        started = [context.begin(part, None, seen, labels, ids, 2) for context, part, _, seen in given]
        for result in run(contexts, started):
            assert result == (pytest.approx(expected[0], rel=1e-5), expected[1])
        check_outputs(contexts, whole, count, 1e-5)
    return programs


# Uncompiled, these take a second each: all stacks once, and further cuts with --full.
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("strips", [2, *(pytest.param(count, marks=pytest.mark.full) for count in (3, 4))])
@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack not in SLOW])
def test_the_generated_program_is_cut_at_its_exchanges(stack, strips):
    check_generated(stack, strips, 4, jit.uncompiled)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("stack", ["odd width", "stride 2", "normalize and dropout"])
def test_a_few_images_are_blocks_of_their_own(stack):
    assert all(built.lanes == 1 for built in check_generated(stack, 2, 8, jit.uncompiled, images=3))


@pytest.mark.slow
@pytest.mark.parametrize("strips", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("stack", TRANSFORMED)
def test_transformed_convolutions_of_strips_agree(stack, strips):
    for built in check_generated(stack, strips, 4, jit.uncompiled):
        wanted = "winograd1d" if stack == "winograd1d" else "winograd2d"
        assert {choice["algorithm"] for choice in built.choices.values()} == {wanted}


BORDERS = [("odd width", 2), pytest.param("squares without padding", 2, marks=pytest.mark.slow)]
FURTHER = [("overlapping pools", 3), ("five convs", 4), ("squares", 2)]


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(
    ("stack", "strips"), [*BORDERS, *(pytest.param(*one, marks=pytest.mark.full) for one in FURTHER)]
)
def test_columns_that_neighbors_wait_for_come_first_where_that_pays(stack, strips, monkeypatch):
    monkeypatch.setattr(conv_choice, "MESSAGE_SECONDS", -1.0)
    for built in check_generated(stack, strips, 4, jit.uncompiled):
        ports = [part.port for part, after in pairwise(built.parts) if after.meanwhile and not after.training]
        assert ports and all(port.direction == FORWARD for port in ports)


@pytest.mark.parametrize("stack", STACKS | TRANSFORMED)
@every_cut
@pytest.mark.parametrize("algorithm", conv_choice.BORDER_STEPS)
def test_border_and_interior_are_all_columns(stack, strips, algorithm, monkeypatch):
    monkeypatch.setattr(conv_choice, "MESSAGE_SECONDS", -1.0)
    for strip in cut_of(stack, strips).strips:
        for index, shape in enumerate(strip.stack[:-1]):
            if isinstance(shape.layer, Conv) and isinstance(exchanged := strip.stack[index + 1].layer, Exchange):
                spans = conv_choice.border_spans(strip.stack[index:], shape_of(shape), 1, algorithm, 1)
                seen = sorted(column for a, b in spans for column in range(a, b))
                assert seen in ([], list(range(shape_of(shape).columns)))
                begin = exchanged.owned[strip.number][0]
                for other in set(range(strips)) - {strip.number} if spans else ():
                    a, b = exchanged.piece(strip.number, other)
                    assert a == b or b - begin <= spans[-1][0] or a - begin >= spans[-1][1]


# Compiling takes seconds per strip, more on a busy machine.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "stack", ["overlapping pools", *(pytest.param(stack, marks=pytest.mark.full) for stack in TRANSFORMED)]
)
def test_compiled_strips_agree(stack):
    check_generated(stack, 2, machine.lanes(), jit.run, images=20)


@every_stack
def test_evaluation_is_that_of_one_piece(stack):
    cut, weights, (pixels, labels, ids) = prepare(stack, 2)
    expected = Network(cut.shapes, 8, 11, np.float64).context().evaluate(weights, pixels, labels)
    contexts = [StripContext(strip, 8, 11, np.float64) for strip in cut.strips]
    given = zip(contexts, scatter(cut, weights), columns(cut, pixels), strict=True)
    started = [context.begin(part, None, seen, labels, ids, 2) for context, part, seen in given]
    for result in run(contexts, started):
        assert result == (pytest.approx(expected[0], rel=1e-12), expected[1])


@every_stack
@every_cut
def test_every_exchange_back_is_the_adjoint_of_the_one_forward(stack, strips):
    cut = cut_of(stack, strips)
    contexts = [StripContext(strip, 3, 0, np.float64) for strip in cut.strips]
    random = np.random.default_rng(1)
    for number, exchanged in enumerate(cut.exchanges.values()):
        sides = [context.exchange_buffers[number] for context in contexts]
        places = [c.places[[shape.layer for shape in c.stack].index(exchanged)] for c in contexts]
        if not exchanged.summed:
            continue
        for place in places:
            place.inputs[:], place.errors[:] = random.random(place.inputs.shape), random.random(place.errors.shape)
        owned = [place.inputs.copy() for place in places]
        errors = [place.errors.copy() for place in places]
        exchange(sides, FORWARD)
        forward = sum(np.vdot(place.outputs, error) for place, error in zip(places, errors, strict=True))
        for place, error in zip(places, errors, strict=True):
            place.errors[:] = error
        exchange(sides, BACK)
        back = sum(np.vdot(value, place.input_errors) for value, place in zip(owned, places, strict=True))
        assert forward == pytest.approx(back, rel=1e-12)
