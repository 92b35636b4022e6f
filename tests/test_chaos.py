"""A short, seeded part of scripts/chaos: random kills while training, and kills at named points under the oracle."""

import argparse
from collections import Counter

import chaos
import chaos_results
import marathon
import numpy as np
import oracle
import pytest
from launch import available

pytestmark = pytest.mark.timeout(430)
full = pytest.mark.full


def on_openmpi(test):
    """Runs it on the one MPI that survives a dead rank."""
    none = all(mpi.name != "openmpi" for mpi in available())
    skipped = pytest.mark.skipif(none, reason="needs an Open MPI that survives")
    return skipped(pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)(test))


def test_wide_runs_are_spread_evenly_over_all_that_can_be_combined():
    runs = [chaos.wide(seed) for seed in range(40)]
    combined = Counter((run.codec, run.servers, run.staleness) for run in runs)
    assert len(combined) == 36 and max(combined.values()) == 2
    for key, most in (("codec", 10), ("servers", 14), ("staleness", 14), ("copies", 27), ("pattern", 11)):
        assert max(Counter(getattr(run, key) for run in runs).values()) <= most, chaos.design(runs)
    assert {run.pattern for run in runs} == set(chaos.PATTERNS)
    assert {run.copies for run in runs} == {3, 4, 5}


def test_runs_of_every_kind_begin_with_the_first_that_is_asked_for():
    options = argparse.Namespace(first=201, runs=2, points=2, point=["rename"], wide=3)
    assert [run.seed for run in chaos.wanted(options)] == [201, 202, 200, 201, 200, 201, 202]
    options.first = 1
    assert [run.seed for run in chaos.wanted(options)] == [1, 2, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("seed", range(40))
def test_a_wide_run_leaves_a_whole_copy_unless_it_is_to_end_by_name(seed):
    run = chaos.wide(seed)
    struck, layout = [strike.rank for strike in run.strikes], run.layout
    assert 1 <= len(struck) == len(set(struck)) <= 3
    servers = set(struck) & set(layout.servers)
    assert (run.expected == ("named end",)) == (len(servers) >= run.copies)
    assert set(layout.workers) - set(struck)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([7, 7, 8], ""),
        ([7, 6, 7], "6.0 to 7.0"),
        ([7, 9, 7], "7.0 to 9.0"),
        ([7, 7.5, 7], "something else than whole pushes"),
    ],
)
def test_the_oracle_sees_what_is_lost_and_what_is_there_twice(values, wrong):
    """Seven pushes acknowledged, and one more under way of a dead pusher."""
    if not wrong:
        return oracle._whole("weights", np.array(values, np.float32), 7, 1)
    with pytest.raises(AssertionError, match=wrong):
        oracle._whole("weights", np.array(values, np.float32), 7, 1)


def moment(files=3, **figures):
    rank = {"role": "server", "rss": 200 << 20, "shared": 0, "descriptors": 30, "mappings": 800, "threads": 4}
    return {"ranks": {1: rank | figures, 2: rank}, "shm_files": files}


def test_what_grows_in_a_marathon_is_seen():
    same = marathon.compare([moment()] * 30)
    assert same["server rss"] == {"first": 200 << 20, "last": 200 << 20, "grown": False}
    grown = marathon.compare([moment(mappings=800 + 10 * kill, files=kill) for kill in range(30)])
    assert {name for name, told in grown.items() if told["grown"]} == {"server mappings", "job shm_files"}


def test_results_are_put_into_their_parts_of_the_page(tmp_path, monkeypatch):
    wide = chaos._told(chaos.wide(3)) | {"hosts": 1, "outcome": "survived", "to_next_push": [0.1], "to_all": [0.2]}
    run = {"seed": 1, "kind": "marathon", "point": "", "hosts": 1, "kills": 30, "killed": 33, "generations": 60}
    monkeypatch.setattr(chaos_results, "PAGE", tmp_path / "page.md")
    parts = [f"<!-- {name} -->\nold {name}\n<!-- end of {name} -->\n" for name in ("chaos", "wide", "marathon")]
    chaos_results.PAGE.write_text("\n".join(parts))
    chaos_results.write([wide, run | {"figures": marathon.compare([moment()] * 30)}])
    text = chaos_results.PAGE.read_text()
    assert "old chaos" in text and "old wide" not in text and "old marathon" not in text
    assert "| 3 | float16 | 3, 3 | 0.0 | rank=6 at=pull step=8; rank=4 at=recover step=1 | survived |" in text
    assert "| 30 kills, 33 ranks, 60 generations | after kill 10 | in the end |" in text
    assert "| server rss | 200 MB | 200 MB |" in text and "| codecs, servers, staleness | 1 of 1 |" in text


@on_openmpi
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=full) for seed in (18, 14))])
def test_what_is_acknowledged_is_there_whatever_the_codec_the_copies_and_the_clocks(seed, mpi, tmp_path):
    run = chaos.wide(seed)
    figures = chaos.check(run, *chaos.play(run, mpi, tmp_path))
    assert figures["outcome"] in run.expected


@full
@on_openmpi
@pytest.mark.timeout(900)
def test_a_marathon_loses_nothing_and_nothing_grows(mpi, tmp_path):
    line = marathon.run(mpi, 5, 1, tmp_path)
    assert "error" not in line, line["error"]
    assert line["kills"] == 5 and line["generations"] >= 5


@on_openmpi
@pytest.mark.parametrize(
    ("point", "seed"),
    [
        ("rebuild", 3),
        pytest.param("lagging", 1, marks=full),
        pytest.param("recover", 1, marks=full),
        pytest.param("prepare", 1, marks=full),
        pytest.param("applied", 2, marks=full),
        pytest.param("rename", 3, marks=full),
    ],
)
def test_what_is_acknowledged_is_in_the_weights(point, seed, mpi, tmp_path):
    run = chaos.point(point, seed)
    figures = chaos.check(run, *chaos.play(run, mpi, tmp_path))
    assert figures["outcome"] in run.expected


@on_openmpi
def test_servers_on_other_hosts_may_die(hosts, mpi, tmp_path):
    """Two of them; whoever reads or writes there at that moment goes on."""
    run = chaos.point("rebuild", 3, hosts=3)
    figures = chaos.check(run, *chaos.play(run, mpi, tmp_path / "job", hosts.environment))
    assert figures["recoveries"] >= 1


@full
@on_openmpi
@pytest.mark.parametrize(("kind", "seed"), [("async", 4), ("async factor", 2), ("async strips", 4)])
def test_training_reaches_its_accuracy_whoever_dies(kind, seed, mpi, tmp_path):
    run = chaos.draw(seed, kind)
    figures = chaos.check(run, *chaos.play(run, mpi, tmp_path))
    assert figures["recoveries"] >= 1


@full
@on_openmpi
def test_a_synchronous_run_ends_with_the_weights_of_an_undisturbed_one(mpi, tmp_path):
    run = chaos.draw(5, "sync")
    disturbed, killed = chaos.play(run, mpi, tmp_path / "disturbed")
    chaos.check(run, disturbed, killed)
    assert chaos.distance(disturbed, chaos.undisturbed(run, mpi, tmp_path / "undisturbed")) < 1e-4
