"""Groups of parameters by name: rates and decays of their own, and parameters that are frozen."""

import numpy as np
import pytest
from local_server import LocalServer

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.config import Group
from adam_mpi.model.parameters import Tensor
from adam_mpi.optimizer.groups import ALL, frozen_edges, group_spans, parts_of
from adam_mpi.sharding import message_formats

TENSORS = (
    Tensor("conv1/weight", "conv1", (40, 5), 0, 200),
    Tensor("conv1/bias", "conv1", (40,), 200, 40),
    Tensor("dense1/weight", "dense1", (6, 50), 240, 300),
    Tensor("dense1/bias", "dense1", (6,), 540, 6),
)
SIZE, BATCH = 546, 8
BIASES = np.r_[200:240, 540:546]
WEIGHTS = np.setdiff1d(np.arange(SIZE), BIASES)


def groups(text):
    return f"optimizer.groups=[{text}]"


def served(*settings):
    common = ["server.shard=128", "optimizer.learning_rate=0.1", "optimizer.schedule=constant", f"train.batch={BATCH}"]
    local = LocalServer(config.load(None, [*common, "push.protocol=delta", *settings]), SIZE, TENSORS)
    local.server.start({"weights": np.ones(SIZE, np.float32)})
    return local


def stepped(*settings, pushes=2):
    """Return the weights after pushes of gradients of 1."""
    local = served(*settings)
    for _ in range(pushes):
        local.push(BATCH, BATCH)
    weights = local.weights
    local.free()
    return weights


def test_a_tensor_belongs_to_the_first_group_that_it_matches():
    first, second = Group("conv1/*", frozen=True), Group("*/bias", decay_factor=0.0)
    spans = group_spans(TENSORS, [first, second])
    assert [(span.start, span.stop, span.group) for span in spans] == [
        (0, 240, first),
        (240, 540, ALL),
        (540, 546, second),
    ]
    assert frozen_edges(spans) == [0, 240]
    assert list(parts_of(spans, 500, 546)) == [(slice(0, 40), ALL), (slice(40, 46), second)]
    assert [(span.start, span.stop, span.group) for span in group_spans(TENSORS, [])] == [(0, SIZE, ALL)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{match="*/gamma", frozen=true}', "matches no parameter; patterns are for names such as conv1/weight"),
        ("{frozen=true}", "has no match"),
        ('{match="*/bias"}', "changes nothing"),
        ('{match="*/bias", rate=0.1}', r"unknown key optimizer.groups\[0\].rate"),
        ('{match="*/bias", decay_factor=-1}', r"optimizer.groups\[0\].decay_factor = -1.0: must be at least 0"),
        ('"*/bias"', "expected a list of tables"),
    ],
)
def test_a_wrong_group_is_refused_in_one_line(text, error):
    with pytest.raises(UserError, match=error) as refused:
        served(groups(text))
    assert "\n" not in str(refused.value)


def test_groups_survive_the_text_of_a_configuration():
    given = config.load(None, [groups('{match="*/bias", decay_factor=0.0}, {match="conv1/*", frozen=true}')])
    assert given.optimizer.groups == [Group("*/bias", decay_factor=0.0), Group("conv1/*", frozen=True)]
    assert config.from_toml(config.to_toml(given), "a copy") == given


@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw"])
def test_a_group_has_the_rate_and_the_decay_of_a_job_with_them(kind):
    rule = f"optimizer.kind={kind}"
    found = stepped(rule, "optimizer.decay=0.3", groups('{match="*/bias", learning_rate_factor=0.1, decay_factor=0}'))
    assert np.array_equal(found[WEIGHTS], stepped(rule, "optimizer.decay=0.3")[WEIGHTS])
    assert np.array_equal(found[BIASES], stepped(rule, "optimizer.learning_rate=0.01")[BIASES])
    assert found[WEIGHTS].max() < found[BIASES].min()


@pytest.mark.parametrize("codec", ["none", "bfloat16", "topk"])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_frozen_parameters_stay_and_only_headers_are_pushed_of_them(kind, codec):
    freeze = groups('{match="conv1/*", frozen=true}, {match="*/bias", frozen=true}')
    local = served(f"optimizer.kind={kind}", freeze, f"push.codec={codec}")
    shards = local.memory_layout.shards
    frozen = [shard for shard in shards if shard.stop <= 240 or shard.start >= 540]
    assert local.memory_layout.frozen == {shard.index for shard in frozen} and len(frozen) < len(shards)
    headers = {}
    accepts = local.server.session.push_queue._accepts
    local.server.session.push_queue._accepts = lambda message: (
        headers.update({message.shard: message}) or accepts(message)
    )
    for _ in range(3):
        local.push(BATCH, BATCH)
    assert all((headers[shard.index].words == 0) == (shard in frozen) for shard in shards)
    assert {headers[shard.index].kind for shard in shards} == {message_formats.DELTA}
    assert (local.weights[:240] == 1).all() and (local.weights[540:] == 1).all() and local.counts["refused"] == 0
    assert (local.weights[240:540] < 1).any()
    versions = {own.version for own in local.server.shard_copies.values()}
    assert versions == {3}, "clocks and recovery count the steps of every shard"
    local.free()


def test_a_push_that_names_no_parameters_is_refused_elsewhere():
    local = served()
    local.pushes.push(local.gradient_buffer(1.0, BATCH))
    local.pushes.step()
    arrived = local.server.session.push_queue.receiver.collect_messages()[0]
    arrived.values = 0
    arrived.words = 0
    assert "0 values" in local.server.session.push_queue._trouble(arrived)
    local.free()
