"""Each rule of a server with one replica, push by push: 100 steps against float64, and against PyTorch."""

import numpy as np
import pytest
from local_server import LocalServer
from textbook import step_of

from adam_mpi.config import load
from adam_mpi.optimizer.rules import RULES
from adam_mpi.optimizer.settings import settings_of
from adam_mpi.sharding.shards import gathered

SIZE, BATCH, STEPS = 300, 8, 100
SETTINGS = {
    "descent": ["optimizer.learning_rate=0.1", "optimizer.decay=0.01"],
    "momentum": ["optimizer.learning_rate=0.02", "optimizer.momentum=0.9", "optimizer.decay=0.01"],
    "nesterov": ["optimizer.learning_rate=0.02", "optimizer.momentum=0.9", "optimizer.decay=0.01"],
    "adagrad": ["optimizer.learning_rate=0.05", "optimizer.decay=0.01"],
    "rmsprop": ["optimizer.learning_rate=0.005", "optimizer.beta2=0.99", "optimizer.decay=0.01"],
    "adam": ["optimizer.learning_rate=0.005", "optimizer.decay=0.01"],
    "adamw": ["optimizer.learning_rate=0.005", "optimizer.decay=0.1"],
    "ftrl": ["optimizer.learning_rate=0.1", "optimizer.decay=0.01", "optimizer.l1=0.01"],
}


def config_of(name):
    kind = [] if name in ("descent", "momentum") else [f"optimizer.kind={name}"]
    common = ["optimizer.schedule=constant", f"train.batch={BATCH}", "server.shard=128"]
    return load(None, [*common, *kind, *SETTINGS[name]])


def problem():
    """Return first weights, and a gradient that depends on the weights and on the step: a noisy quadratic."""
    random = np.random.default_rng(0)
    curvature = random.uniform(0.5, 1.5, SIZE)
    noise = 0.3 * random.standard_normal((STEPS, SIZE))
    first = random.uniform(-0.5, 0.5, SIZE).astype(np.float32)
    return first, lambda weights, step: curvature * weights + noise[step]


def served(name):
    """Return the weights after 100 pushes to a server, of one batch each."""
    first, gradient = problem()
    local = LocalServer(config_of(name), SIZE)
    local.server.start({"weights": first})
    for step in range(STEPS):
        local.push(BATCH * gradient(local.weights.astype(float), step), BATCH)
    assert local.server.counts["steps"] == STEPS * len(local.memory_layout.shards)
    weights = local.weights
    local.free()
    return weights


def textbook(name):
    config = config_of(name)
    first, gradient = problem()
    weights = first.astype(float)
    states = np.zeros((len(RULES[name].states), SIZE))
    for step in range(STEPS):
        settings = settings_of(config.optimizer)
        rate = config.optimizer.learning_rate
        weights, states = step_of(name, weights, states, gradient(weights, step), rate, step, settings)
    return weights


def torch_rule(torch, name, parameters):
    """Return PyTorch's optimizer of this name with the settings of `config_of`."""
    given = config_of(name).optimizer
    common = {"lr": given.learning_rate, "weight_decay": given.decay}
    if name in ("descent", "momentum", "nesterov"):
        return torch.optim.SGD(parameters, **common, momentum=given.momentum, nesterov=name == "nesterov")
    common["eps"] = given.epsilon
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, **common)
    if name == "rmsprop":
        return torch.optim.RMSprop(parameters, **common, alpha=given.beta2)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    return kind(parameters, **common, betas=(given.beta1, given.beta2))


def in_torch(torch, name):
    first, gradient = problem()
    weights = torch.tensor(first.astype(float), requires_grad=True)
    optimizer = torch_rule(torch, name, [weights])
    for step in range(STEPS):
        weights.grad = torch.tensor(gradient(weights.detach().numpy(), step))
        optimizer.step()
    return weights.detach().numpy()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_hundred_steps_are_those_of_the_textbook(name):
    wanted = textbook(name)
    assert np.abs(wanted - problem()[0]).max() > 0.1
    assert np.abs(served(name) - wanted).max() < 1e-6


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "ftrl"])
def test_a_hundred_steps_are_those_of_pytorch(name):
    torch = pytest.importorskip("torch")
    assert np.abs(served(name) - in_torch(torch, name)).max() < 1e-6


def test_state_and_count_of_batches_are_taken_over_together_or_not_at_all():
    """Bias corrections of a late batch would be wrong for a state that begins with zeros."""
    first, _ = problem()
    for names, batches in ((("mean_gradient", "mean_square"), 7.0), (("velocity",), 0.0)):
        local = LocalServer(config_of("adam"), SIZE)
        states = {name: np.full(SIZE, 0.5, np.float32) for name in names}
        pieces = [(0, {"weights": first, "batches": np.array(7.0), **states})]
        spans = [(shard.start, shard.stop) for shard in local.memory_layout.shards]
        local.server.start(gathered(iter(pieces), spans))
        copies = local.server.shard_copies.values()
        assert {own.batches for own in copies} == {batches}
        assert {float(own.states.max()) for own in copies} == {0.5 if batches else 0.0}
        local.free()


def test_every_rule_of_the_servers_is_tested():
    assert {*SETTINGS, "additive"} == set(RULES)


def test_the_first_weights_of_ftrl_stay_until_there_is_a_gradient():
    """Its textbook begins with zeros, which no network learns from."""
    first, _ = problem()
    local = LocalServer(config_of("ftrl"), SIZE)
    local.server.start({"weights": first})
    gradient = np.zeros(SIZE)
    gradient[:3] = 1e-3
    local.push(BATCH * gradient, BATCH)
    assert np.allclose(local.weights[3:], first[3:], atol=1e-7)
    assert np.allclose(local.weights[:3], first[:3] - 0.1 * 1e-3 / 1.001, atol=1e-6)
    local.free()
