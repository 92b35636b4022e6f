"""Factor pushes: what is sent multiplies to the gradient, and the choice between delta and factor is arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_mpi import config
from adam_mpi.errors import UserError
from adam_mpi.model.parameters import Tensor
from adam_mpi.server import shelves
from adam_mpi.server.factors import matrices, plans
from adam_mpi.server.protocol import choose, largest_push


def dense(inputs, outputs, offset=5):
    weight = Tensor("dense1/weight", "dense1", (outputs, inputs), offset, inputs * outputs)
    return [weight, Tensor("dense1/bias", "dense1", (outputs,), offset + inputs * outputs, outputs)]


def planned(tensors, servers, settings=()):
    settings = config.load(None, [*settings])
    return shelves.plan(tensors, {rank: "h" for rank in range(servers)}, [servers], settings), settings


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 7), st.integers(1, 3), st.integers(64, 500))
def test_factors_multiply_to_the_gradient_of_every_shard(inputs, outputs, images, servers, shard):
    tensors = dense(inputs, outputs, offset=0)
    shelved, _ = planned(tensors, servers, [f"server.shard={shard}"])
    matrix = matrices(tensors)["dense1"]
    draw = np.random.default_rng(inputs * 1000 + outputs)
    activations, errors = draw.random((images, inputs), np.float32), draw.random((images, outputs), np.float32)
    gradient = np.concatenate([(errors.T @ activations).ravel(), errors.sum(0)])
    result = np.full_like(gradient, np.nan)
    for plan in plans(matrix, "dense1", shelved.held).values():
        body = np.zeros(plan.words(images), np.uint32)
        assert plan.write(body, activations, errors, gradient) == body.size
        for held in plan.shards:
            plan.multiply(body.view(np.float32), images, held, result[held.start : held.stop])
    assert np.allclose(result, gradient, rtol=1e-5)


def test_shards_that_cut_through_rows_cannot_take_factors():
    tensors = dense(1000, 3, offset=0)
    shelved, _ = planned(tensors, 1, ["server.shard=64"])
    assert plans(matrices(tensors)["dense1"], "dense1", shelved.held) is None


def test_a_large_layer_between_hosts_sends_factors_and_a_small_one_its_gradient():
    large, settings = planned(dense(4096, 4096, 0), 1, ["push.images=64"])
    choice = choose(large, settings, 64, hosts=2)["dense1"]
    assert choice.protocol == "factor" and choice.delta_bytes > 16 * choice.factor_bytes
    small, settings = planned(dense(20, 10, 0), 1)
    assert choose(small, settings, 64, hosts=2)["dense1"].protocol == "delta"


def test_activations_are_counted_once_per_server():
    one, settings = planned(dense(512, 512, 0), 1, ["server.shard=8192"])
    three, _ = planned(dense(512, 512, 0), 3, ["server.shard=8192"])
    images, header = 10, 128
    bytes_of = [choose(shelved, settings, images, hosts=2)["dense1"].factor_bytes for shelved in (one, three)]
    assert bytes_of[0] == header + 4 * (images * 1024 + 512)
    assert bytes_of[1] == 3 * header + 4 * (images * (3 * 512 + 512) + 512)


def test_the_choice_can_be_forced_and_is_refused_by_name_where_workers_step():
    shelved, settings = planned(dense(20, 10, 0), 1, ["push.protocol=factor"])
    assert choose(shelved, settings, 64, hosts=1)["dense1"].protocol == "factor"
    shelved, settings = planned(dense(20, 10, 0), 1, ["push.protocol=factor", "optimiser.where=worker"])
    with pytest.raises(UserError, match="push.protocol"):
        choose(shelved, settings, 64, hosts=1)


def test_the_largest_push_is_whole_batches():
    assert largest_push(config.load(None, ["push.images=40", "train.batch=32"])) == 64
    assert largest_push(config.load(None, ["push.images=40", "train.batch=32", "consistency.staleness=0"])) == 32


SMALL = '[{kind="pool",size=2},{kind="dense",units=300},"relu",{kind="dropout",rate=0.5},{kind="dense",units=10}]'


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
