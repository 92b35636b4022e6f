"""Factor pushes: factors multiply to the gradient, and the choice between delta and factor is by arithmetic."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_server import LocalServer

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.model.parameters import Tensor
from adam_mpi.planning.report import plan_text as planned_text
from adam_mpi.server import stepper
from adam_mpi.sharding import memory_layout
from adam_mpi.sharding.message_formats import MOST_PARTS
from adam_mpi.sharding.push_protocol import FactorPlan, choose_protocols, largest_push, matrices, plans
from adam_mpi.worker.gradient_buffer import Factors
from adam_mpi.worker.push_messages import FactorMessage


def dense(inputs, outputs, offset=5):
    weight = Tensor("dense1/weight", "dense1", (outputs, inputs), offset, inputs * outputs)
    return [weight, Tensor("dense1/bias", "dense1", (outputs,), offset + inputs * outputs, outputs)]


def planned(tensors, servers, settings=()):
    settings = config.load(None, [*settings])
    return memory_layout.plan_layout(tensors, {rank: "h" for rank in range(servers)}, [servers], settings), settings


def drawn(inputs, outputs, images):
    """Return activations, errors, and the gradient they multiply to, biases behind the weights."""
    draw = np.random.default_rng(inputs * 1000 + outputs)
    activations, errors = (draw.standard_normal((images, n)).astype(np.float32) for n in (inputs, outputs))
    return activations, errors, np.concatenate([(errors.T @ activations).ravel(), errors.sum(0)])


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 7),
    st.integers(1, 3),
    st.integers(64, 500),
    st.integers(1, 4),
    st.booleans(),
)
def test_factors_multiply_to_the_gradient_of_every_shard(inputs, outputs, images, servers, shard, together, half):
    tensors = dense(inputs, outputs, offset=0)
    layout, _ = planned(tensors, servers, [f"server.shard={shard}"])
    activations, errors, gradient = drawn(inputs, outputs, images)
    product, weights = np.full_like(gradient, np.nan), np.ones_like(gradient)
    for plan in plans(matrices(tensors)["dense1"], "dense1", layout.served, half).values():
        words = plan.words(images)
        body = np.full(words + 3, 0xDEADBEEF, np.uint32)
        assert plan.write(body, activations, errors, gradient) == words and np.all(body[words:] == 0xDEADBEEF)
        # A push is cut as if one server had all rows, so that all servers see the same parts.
        whole = FactorPlan(plan.matrix, tuple(layout.shards), half)
        assert plan.images(whole.words(images)) == whole.images(whole.words(images)) >= images
        assert plan.words(images) <= whole.words(images)
        floats = plan.unpack(body[:words], images, np.full(2 * words, np.nan, np.float32))
        for first in range(0, len(plan.shards), together):
            band = plan.shards[first : first + together]
            where = np.concatenate([np.arange(held.start, held.stop) for held in band])
            out, held = np.full(where.size, np.nan, np.float32), weights[where]
            plan.multiply(floats, images, band, out)
            plan.add_product(floats, images, band, -0.5, held)
            product[where], weights[where] = out, held
    precision = 1e-2 if half else 1e-4
    assert np.allclose(product, gradient, atol=precision)
    assert np.allclose(weights, 1 - 0.5 * gradient, atol=precision)


def test_halves_keep_their_precision_and_the_largest_half_instead_of_an_infinity():
    tensors = dense(3, 2, offset=0)
    layout, _ = planned(tensors, 1)
    plan = plans(matrices(tensors)["dense1"], "dense1", layout.served, half=True)[0]
    activations, errors = np.array([[1e6, -1e6, 1 / 3]], np.float32), np.array([[1e-3, 1e-6]], np.float32)
    body = np.zeros(plan.words(1), np.uint32)
    plan.write(body, activations, errors, np.array([0] * 6 + [1e9, 1 / 3], np.float32))
    floats = plan.unpack(body, 1, np.zeros(16, np.float32))
    assert floats[:2].tolist() == [65504, -65504] and floats[2:4] == pytest.approx([1 / 3, 1e-3], rel=2**-11)
    assert floats[4] == pytest.approx(1e-6, abs=2**-25) and floats[5:] == pytest.approx([1e9, 1 / 3])


def factor_server(*settings):
    """Return a server and a pusher of factors of a layer of 30 inputs, in shards of 34 rows; 3 images fit a message."""
    tensors = dense(30, 200, offset=0)
    given = ["push.protocol=factor", "server.shard=1024", "optimizer.learning_rate=0.5", "optimizer.schedule=constant"]
    built = LocalServer(config.load(None, [*given, *settings]), 31 * 200, tensors)
    assert built.generation.choices["dense1"].protocol == built.world.config.push.protocol
    return built


def push(built, images):
    """Push factors of `images` images; return their gradient."""
    activations, errors, gradient = drawn(30, built.memory_layout.tensors[1].size, images)
    contribution = built.gradient_buffer(gradient, images)
    contribution.factors["dense1"] = factors = Factors(max(images, 1), 30, errors.shape[1])
    factors.add(activations, errors)
    built.pushes.push(contribution)
    return gradient


SYNCHRONOUS = "consistency.staleness=0"
HALF = "push.factor_codec=float16"


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["server.threads=3"],
        ["optimizer.momentum=0.9"],
        ["optimizer.momentum=0.9", "server.threads=3", SYNCHRONOUS],
        ["optimizer.kind=adagrad", SYNCHRONOUS],
        ["optimizer.decay=0.1", HALF],
        [SYNCHRONOUS],
        [SYNCHRONOUS, "optimizer.momentum=0.9", HALF],
        ["optimizer.ema=0.5"],
        ["optimizer.decay=0.1", "train.batch=4"],
        ["optimizer.momentum=0.9", "optimizer.decay=0.1", "train.batch=4"],
        ["optimizer.kind=nesterov", "optimizer.momentum=0.9", "optimizer.decay=0.1", "train.batch=16"],
    ],
    ids=" ".join,
)
def test_a_server_steps_on_factors_as_on_their_gradient(settings, monkeypatch):
    for name in ("BAND", "CACHED_BAND"):
        monkeypatch.setattr(stepper, name, 2100)
    built = factor_server(*settings)
    plain = factor_server(*settings, "push.protocol=delta")
    # No image, and more than fit a message; if asynchronous, more than fit a ring: the server takes several steps.
    for images in (3, 0, 20 if SYNCHRONOUS in settings else 40, 2):
        gradient = push(built, images)
        built.apply_pushes()
        plain.push(gradient, images)
    for region in built.memory_layout.regions:
        got, wanted = (
            np.concatenate([*one.server.session.published.regions[region].values()]) for one in (built, plain)
        )
        assert np.abs(wanted).max() > 0.1
        assert np.allclose(got, wanted, atol=2e-3 if HALF in settings else 1e-5)
    assert built.counts["applied"] == 4 and built.counts["refused"] == built.counts["duplicates"] == 0
    for one in (built, plain):
        one.free()


@pytest.mark.parametrize("settings", [[], ["optimizer.momentum=0.9"]], ids=" ".join)
def test_a_push_that_is_sent_again_skips_the_shards_that_have_it(settings):
    """The shards on both sides of one that has it are not neighbors."""
    built = factor_server(*settings)
    plain = factor_server(*settings, "push.protocol=delta")
    layer = [shard.index for shard in built.server.session.shards if shard.layer == "dense1"]
    assert len(layer) >= 3
    built.server.session.push_queue.highest_numbers[layer[1], 0] = 2 * MOST_PARTS - 1
    gradient = push(built, 3)
    built.apply_pushes()
    plain.push(gradient, 3)
    before = factor_server(*settings)
    for index in built.server.session.place:
        wanted = before if index == layer[1] else plain
        assert np.allclose(*(one.server.session.published.weights[index] for one in (built, wanted)), atol=1e-5), index
    for one in (built, plain, before):
        one.free()


def test_a_synchronous_push_of_more_parts_than_a_ring_has_slots_is_no_factor_push():
    layout, settings = planned(dense(30, 200, 0), 1, ["server.shard=1024", "push.protocol=factor"])
    assert choose_protocols(layout, settings, 3 * 8 + 1, hosts=1)["dense1"].protocol == "factor"
    _, settings = planned(dense(30, 200, 0), 1, ["push.protocol=factor", SYNCHRONOUS])
    for images, protocol in ((3 * 8, "factor"), (3 * 8 + 1, "delta")):
        assert choose_protocols(layout, settings, images, hosts=1)["dense1"].protocol == protocol


def test_an_asynchronous_push_that_adagrad_squares_is_one_message():
    adagrad = ["push.protocol=factor", "server.shard=1024", "optimizer.kind=adagrad"]
    layout, settings = planned(dense(30, 200, 0), 1, adagrad)
    for images, protocol in ((3, "factor"), (4, "delta")):
        assert choose_protocols(layout, settings, images, hosts=1)["dense1"].protocol == protocol


def test_several_pushes_folded_are_one_step_on_their_sum():
    for settings in ([], ["optimizer.momentum=0.9"]):
        built = factor_server(*settings)
        plain = factor_server(*settings, "push.protocol=delta")
        total = push(built, 3) + push(built, 2)
        built.pushes.step()
        built.apply_pushes()
        plain.push(total, 5)
        assert built.server.counts["folded"] == 2 * built.server.counts["steps"]
        assert np.allclose(built.weights, plain.weights, atol=1e-4)
        built.free(), plain.free()


@pytest.mark.parametrize(
    "wrong", [{"codec": 1}, {"shard": 1}, {"values": 4}, {"values": -1}, {"values": 1 << 40}], ids=str
)
def test_factors_that_do_not_fit_are_refused(wrong, caplog, monkeypatch):
    built = factor_server()
    write = FactorMessage.write

    def forged(message, body):
        header = write(message, body)
        for name, value in wrong.items():
            header[name] = value
        return header

    monkeypatch.setattr(FactorMessage, "write", forged)
    push(built, 3)
    built.apply_pushes()
    assert built.counts["refused"] == 1 and not built.weights.any() and "rank 0" in caplog.text
    built.free()


def test_a_nan_among_factors_is_refused_also_in_halves(caplog):
    built = factor_server("push.factor_codec=float16")
    contribution = built.gradient_buffer(0.0, 2)
    contribution.factors["dense1"] = Factors(2, 30, 200)
    contribution.factors["dense1"].add(np.full((2, 30), np.inf, np.float32), np.ones((2, 200), np.float32))
    built.pushes.push(contribution)
    built.apply_pushes()
    assert built.counts["refused"] == 1 and not built.weights.any() and "NaN or infinity" in caplog.text
    built.free()


def test_halves_are_counted_and_shown_in_the_plan():
    tensors = dense(512, 512, 0)
    (whole, settings), (half, short) = (planned(tensors, 1, [f"push.factor_codec={c}"]) for c in ("none", "float16"))
    sizes = [choose_protocols(s, c, 10, hosts=2)["dense1"].factor_bytes for s, c in ((whole, settings), (half, short))]
    assert sizes[0] - sizes[1] == 2 * 10 * 1024
    rows = [re.search(r"^dense1 +[\d.]+ \w+ +([\d.]+) ", planned_text(c, 4, None), re.M) for c in (settings, short)]
    assert 0.5 <= float(rows[1][1]) / float(rows[0][1]) < 0.6


def test_shards_that_cut_through_rows_cannot_take_factors():
    tensors = dense(1000, 3, offset=0)
    layout, _ = planned(tensors, 1, ["server.shard=64"])
    assert plans(matrices(tensors)["dense1"], "dense1", layout.served) is None


def test_a_large_layer_between_hosts_sends_factors_and_a_small_one_its_gradient():
    large, settings = planned(dense(4096, 4096, 0), 1, ["push.images=64"])
    choice = choose_protocols(large, settings, 64, hosts=2)["dense1"]
    assert choice.protocol == "factor" and choice.delta_bytes > 16 * choice.factor_bytes
    small, settings = planned(dense(20, 10, 0), 1)
    assert choose_protocols(small, settings, 64, hosts=2)["dense1"].protocol == "delta"


def test_activations_are_counted_once_per_server():
    one, settings = planned(dense(512, 512, 0), 1, ["server.shard=8192"])
    three, _ = planned(dense(512, 512, 0), 3, ["server.shard=8192"])
    images, header = 10, 128
    bytes_of = [choose_protocols(layout, settings, images, hosts=2)["dense1"].factor_bytes for layout in (one, three)]
    assert bytes_of[0] == header + 4 * (images * 1024 + 512)
    assert bytes_of[1] == 3 * header + 4 * (images * (3 * 512 + 512) + 512)


def test_the_choice_can_be_forced_and_is_refused_by_name_where_workers_step():
    layout, settings = planned(dense(20, 10, 0), 1, ["push.protocol=factor"])
    assert choose_protocols(layout, settings, 64, hosts=1)["dense1"].protocol == "factor"
    layout, settings = planned(dense(20, 10, 0), 1, ["push.protocol=factor", "optimizer.where=worker"])
    with pytest.raises(UserError, match="push.protocol"):
        choose_protocols(layout, settings, 64, hosts=1)


def test_the_largest_push_is_whole_batches():
    assert largest_push(config.load(None, ["push.images=40", "train.batch=32"])) == 64
    assert largest_push(config.load(None, ["push.images=40", "train.batch=32", "consistency.staleness=0"])) == 32


SMALL = '[{kind="max_pool",size=2},{kind="dense",units=300},"relu",{kind="dropout",rate=0.5},{kind="dense",units=10}]'


@pytest.mark.timeout(200)
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_factors_and_deltas_give_the_same_weights(launch):
    import h5py

    # The last batch and the threads' shares of all leave blocks of the engine unfilled.
    settings = ["data.images=300", "data.validation=0.0", "train.epochs=1", "train.batch=24"]
    settings += ["consistency.staleness=0", "worker.threads=2", "server.shard=4000", "layout.servers=2"]
    settings += [f"model.layers={SMALL}"]
    weights = []
    for protocol in ("delta", "factor"):
        sets = [word for key in [*settings, f"push.protocol={protocol}"] for word in ("--set", key)]
        job = launch(4, "train", *sets)
        assert job.returncode == 0, job.said()
        with h5py.File(job.run / "weights.h5") as file:
            weights.append(np.concatenate([file[f"dense{n}/weight"][...].ravel() for n in (1, 2)]))
        weights.append(job.summary["pushes"]["bytes"])
    assert np.allclose(weights[0], weights[2], rtol=1e-4, atol=1e-6)
    assert weights[1] > 1.5 * weights[3]
