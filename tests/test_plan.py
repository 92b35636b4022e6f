"""The plan: the roles, the memory and the traffic of a job, for any number of ranks and without MPI."""

import re
from pathlib import Path

import pytest

from adam_mpi import config
from adam_mpi.base import machine
from adam_mpi.base.errors import UserError
from adam_mpi.base.log import format_bytes
from adam_mpi.planning.report import plan_text

ROOT = Path(__file__).resolve().parent.parent


def planned(ranks, hosts=None, *overrides):
    return plan_text(config.load(None, overrides), ranks, hosts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 64, 1000])
def test_it_says_all_for_any_number_of_ranks(ranks):
    text = planned(ranks)
    head = re.match(r"(\d+) ranks: (\d+) data, (\d+) worker in (\d+) replicas of 1, (\d+) server\n", text)
    total, data, workers, replicas, servers = map(int, head.groups())
    assert total == ranks and workers == replicas >= 1 and data >= 1 and servers >= 1
    assert len(re.findall(r"^  rank \d+, .* on localhost$", text, re.M)) == min(ranks, 40)
    assert "lost servers survived" in text and "memory per rank:" in text
    assert re.search(r"^a push: [\d.]+ \w?B;  a pull: [\d.]+ \w?B$", text, re.M)


def test_layers_and_parameters_add_up():
    text = planned(4)
    rows = dict(re.findall(r"^(\w+) +(?:\S+x\S+ +|\d+ +)?([\d,]+) +[\d,]+$", text, re.M))
    numbers = {name: int(count.replace(",", "")) for name, count in rows.items()}
    assert numbers.pop("total") == sum(numbers.values()) == 298_090
    assert numbers["conv1"] == 10 * (5 * 5 + 1) and numbers["dense1"] == 400 * (20 * 4 * 4 + 1)
    held = re.findall(r"server rank \d+: \d+ shards, ([\d,]+) parameters", text)
    assert sum(int(count.replace(",", "")) for count in held) == 298_090


def test_the_working_set_is_set_against_the_caches(monkeypatch):
    monkeypatch.setattr(machine, "caches", lambda: {"L1": 32 << 10, "L2": 512 << 10, "L3": 32 << 20})
    text = planned(2)
    assert text.endswith("caches here: L1 32 KB, L2 512 KB, L3 32 MB")
    assert "weights 1.14 MB, gradient 1.14 MB, buffers" in text
    found = re.search(r"buffers (\S+) MB \((\S+) MB if none shared memory\)", text)
    assert found and 0 < float(found[1]) < float(found[2])
    monkeypatch.setattr(machine, "caches", dict)
    assert planned(2, None, "kernels.engine=reference").endswith("caches here: unknown")


def test_caches_have_sizes():
    assert all(level in ("L1", "L2", "L3", "L4") and size > 0 for level, size in machine.caches().items())


def test_roles_are_spread_over_hosts():
    text = planned(12, "3x4", "layout.servers=3", "layout.data=3")
    for role in ("data", "server"):
        assert len(set(re.findall(rf"rank \d+, {role} on (host\d)", text))) == 3


@pytest.mark.parametrize("hosts", ["4", "x4", "2x", "axb", "2x3", "-1x9"])
def test_hosts_that_make_no_sense_are_named(hosts):
    with pytest.raises(UserError, match=rf"^--hosts {hosts}: expected HOSTSxRANKS with room for 8 ranks"):
        planned(8, hosts)


def test_no_ranks_is_named():
    with pytest.raises(UserError, match="^-n 0: at least one rank"):
        planned(0)


def test_amounts():
    said = [format_bytes(size) for size in (0, 999, 1023, 1536 << 10, 3 << 30)]
    assert said == ["0 B", "999 B", "0.999 KB", "1.5 MB", "3 GB"]


def test_strips_are_shown_with_what_they_own_and_send(monkeypatch):
    monkeypatch.setattr(machine, "caches", lambda: {"L2": 2 << 20})
    text = planned(8, None, "layout.partitions=2")
    assert "replicas of 2" in text and "  conv2      0-3 (0+2)  4-7 (2+0)\n" in text
    rows = re.findall(r"^ +\d +\d+-\d+ +[\d,]+ +[\d.]+ +[\d.]+ KB +[\d.]+ MB  (.*)$", text, re.M)
    assert rows == ["more than the cache of 2 MB"] * 2


def test_it_says_where_borders_come_first():
    large = '{kind="conv", channels=64, kernel=5, pad=2}, {kind="max_pool", size=2}'
    small = '{kind="conv", channels=32, kernel=3, pad=1}, {kind="dense", units=10}'
    wanted = ("layout.partitions=2", "train.batch=64", f"model.layers=[{large}, {small}]")
    assert "the others while those are on their way: before conv2\n" in planned(8, None, *wanted)
    assert "border columns first" not in planned(8, None, *wanted, "kernels.engine=reference")


def test_auto_partitions_are_as_few_as_fit_the_cache(monkeypatch):
    for size, strips in ((64 << 20, 1), (4 << 20, 2), (1, 4)):
        monkeypatch.setattr(machine, "caches", lambda size=size: {"L3": size})
        assert f"replicas of {strips}," in planned(8, None, "layout.partitions=auto")
    monkeypatch.setattr(machine, "caches", dict)
    with pytest.raises(UserError, match="does not report its cache sizes; give a number"):
        planned(8, None, "layout.partitions=auto")


LARGE = (
    'model.layers=[{kind="dense", units=4096}, "relu", {kind="dense", units=10}]',
    "kernels.engine=reference",
    "server.mailbox_bytes=4000000",
    "server.copies=1",
    "optimizer.momentum=0.9",
)


def needed(*overrides):
    """Bytes of a worker, and of a server, that the plan says."""
    text = planned(8, None, *LARGE, *overrides)
    found = re.findall(r"^  (?:worker|server) +([\d.]+) (\wB)", text, re.M)
    return [float(number) * 1024 ** ("KB", "MB", "GB").index(unit) * 1024 for number, unit in found]


def test_a_limit_of_memory_is_held_with_as_many_strips_as_the_error_says():
    servers = "layout.servers=3"
    alone, few = (needed(servers, f"layout.partitions={strips}")[0] for strips in (1, 4))
    assert 2 * few < alone
    limit = f"layout.memory={int(1.02 * few)}"
    with pytest.raises(UserError) as refused:
        needed(servers, limit)
    refusal = (
        r"layout.memory = \S+ MB: a worker takes \S+ MB with layout.partitions = 1, and dense1 alone has 12.3 MB of "
    )
    found = re.fullmatch(refusal + r"weights; set layout.partitions = (\d+) or more", str(refused.value))
    assert found, refused.value
    least = int(found[1])
    assert needed(servers, limit, f"layout.partitions={least}")[0] <= 1.02 * few
    with pytest.raises(UserError, match=f"with layout.partitions = {least - 1}, "):
        needed(servers, limit, f"layout.partitions={least - 1}")


def test_a_limit_that_no_number_of_strips_holds_says_so():
    with pytest.raises(UserError, match="no number of strips helps: allow more, or lower worker.in_flight"):
        needed("layout.memory=1000000")


def test_a_limit_of_memory_is_held_with_as_many_servers_as_the_error_says():
    cut = "layout.partitions=4"
    worker, two = needed(cut, "layout.servers=2")
    _, one = needed(cut, "layout.servers=1")
    assert worker < two < one
    limit = f"layout.memory={int(1.1 * two)}"
    with pytest.raises(UserError, match=r"a server takes \S+ MB with layout.servers = 1; set layout.servers = 2 or "):
        needed(cut, limit, "layout.servers=1")
    assert needed(cut, limit, "layout.servers=2")[1] == two


def test_the_average_and_the_state_before_a_step_are_in_the_plan():
    """A snapshot is one copy more, with the average; in synchronous training so is the state before the last step."""
    count = 784 * 4096 + 4096 + 4096 * 10 + 10
    average, in_step = "optimizer.ema=0.1", "consistency.staleness=0"
    settings = [], [average], [in_step], [average, in_step]
    shared = "layout.servers=1", "optimizer.momentum_where=server"
    plain, averaged, stepped, both = (needed(*shared, *more)[1] for more in settings)
    assert averaged - plain == pytest.approx(8 * count, rel=0.1)
    assert stepped - plain == pytest.approx(8 * count, rel=0.1)
    assert both - averaged == pytest.approx(12 * count, rel=0.1)


def test_each_state_vector_of_the_rule_and_a_clipped_gradient_are_in_the_plan():
    """Vectors are in a snapshot too, the gradient of a clock that waits for its norm is not."""
    count = 784 * 4096 + 4096 + 4096 * 10 + 10
    on_servers = ["optimizer.momentum_where=server"]
    rules = ["optimizer.momentum=0.0"], on_servers, ["optimizer.momentum=0.0", "optimizer.kind=adam"]
    none, one, two = (needed("layout.servers=1", *rule)[1] for rule in rules)
    assert one - none == pytest.approx(8 * count, rel=0.1)
    assert two - one == pytest.approx(8 * count, rel=0.1)
    in_step = "layout.servers=1", "consistency.staleness=0"
    assert needed(*in_step, "optimizer.clip_norm=1")[1] - needed(*in_step)[1] == pytest.approx(4 * count, rel=0.1)


def test_the_velocity_of_each_thread_is_in_the_plan_of_a_worker():
    count = 784 * 4096 + 4096 + 4096 * 10 + 10
    delta = ["worker.threads=1", "push.protocol=delta"]
    ours, theirs = (needed(*delta, f"optimizer.momentum_where={where}") for where in ("replica", "server"))
    assert ours[0] - theirs[0] == pytest.approx(4 * count, rel=0.1)
    assert ours[1] < theirs[1]


def test_a_limit_that_mailboxes_alone_go_beyond_says_so():
    few = ("layout.servers=1", "consistency.staleness=0", "worker.in_flight=1")
    crowded = ("layout.partitions=4", "server.mailbox_bytes=64000000", *few)
    worker, server = needed(*crowded)
    assert worker < server
    with pytest.raises(UserError, match=r"with layout.servers = 1; lower server.mailbox_bytes: mailboxes take \S+ MB"):
        needed(*crowded, f"layout.memory={int(1.02 * worker)}")


def test_the_network_of_36_billion_connections():
    text = plan_text(config.load(ROOT / "docs" / "36-billion.toml"), 16, "16x1", "3x256x256:21841")
    connections = int(re.search(r"^total +[\d,]+ +([\d,]+)$", text, re.M)[1].replace(",", ""))
    assert 35.5e9 < connections < 36.5e9
    assert len(re.findall(r"^ +\d+ +\d+-\d+ +1,200,\d{3},\d{3} +13.4\d* +[\d.]+ MB +9.0\d* GB", text, re.M)) == 16


@pytest.mark.parametrize("images", ["3x4", "0x8x8:2", "3x8x8", "axbxc:d"])
def test_images_that_make_no_sense_are_named(images):
    with pytest.raises(UserError, match=f"^--images {images}: expected CHANNELSxROWSxCOLUMNS:CLASSES"):
        plan_text(config.load(), 2, None, images)


def test_spares_are_named_with_the_slots_they_need():
    assert "spares" not in plan_text(config.load(None), 8, None)
    assert "spares that stand by: 2 processes more" in plan_text(config.load(None, ["recover.spares=2"]), 8, None)
