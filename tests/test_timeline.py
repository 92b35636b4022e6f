"""The timeline: spans and arrows of every thread, on one clock, in a bounded file that trace viewers open."""

import gzip
import json
from collections import defaultdict

import pytest
from launch import given
from mpi4py import MPI

from adam_mpi import config
from adam_mpi.base import trace
from adam_mpi.cluster.world import World
from adam_mpi.monitor import timeline
from adam_mpi.monitor import timeline as clock_offset

SMALL = given("data.images=2000", "train.epochs=1", "store.interval=0.5")

# Microseconds that clocks of ranks which share cores may be apart once they are aligned.
ALIGNED = 500.0


@pytest.fixture
def traced(launch, tmp_path):
    """The events of a small job with two servers."""
    job = launch(5, "train", *SMALL, *given("layout.servers=2", "server.shard=20000", "observe.trace=true"))
    assert job.returncode == 0, job.said()
    assert not list(job.run.glob("log/trace-*")), "parts are left"
    with gzip.open(job.run / "trace.json.gz", "rt") as file:
        return job, json.load(file)["traceEvents"]


def test_spans_and_arrows_of_a_job(traced):
    job, events = traced
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names) == [0, 1, 2, 3, 4] and "worker" in names[4]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {"kernels", "push", "pull", "apply", "flush", "prepare", "serve"} <= {event["name"] for event in spans}
    assert {(event["pid"], event["tid"]) for event in spans} <= set(rows)
    assert all(rows[e["pid"], e["tid"]].startswith("trainer") for e in spans if e["name"] == "kernels")
    arrows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    # An arrow for each push to each server, and time runs from its tail to its point.
    assert len(arrows) == 2 * job.summary["pushes"]["sent"] > 0
    assert all(arrow["s"]["ts"] <= arrow["f"]["ts"] + ALIGNED for arrow in arrows.values())
    for arrow in arrows.values():
        assert _inside(arrow["s"], spans) == "push" and _inside(arrow["f"], spans) == "apply"


def _inside(event: dict, spans: list[dict]) -> str:
    """The name of the span that an end of an arrow lies in."""
    same = (span for span in spans if (span["pid"], span["tid"]) == (event["pid"], event["tid"]))
    found = [s["name"] for s in same if s["ts"] <= event["ts"] <= s["ts"] + s["dur"] + 0.001]
    return found[0] if found else "none"


def test_off_nothing_is_kept():
    assert trace.span("apply") is trace.NOTHING
    trace.record("pull", 0)
    trace.sends((1,))
    with trace.span("apply"):
        pass


def test_a_row_keeps_the_newest():
    recorder = trace.start(room=3)
    try:
        for number in range(5):
            with trace.span(str(number)):
                pass
    finally:
        trace.stop()
    ((name, row),) = recorder.rows
    assert name == "MainThread" and [event[0] for event in row] == ["2", "3", "4"]


@pytest.mark.mpi
def test_clocks_are_aligned():
    """Clocks that are a thousand seconds per rank apart agree afterward, to half of a message and its answer."""
    world = World(MPI.COMM_WORLD, config.load())
    wrong_by = 1_000_000_000_000 * world.rank
    offset, most = clock_offset.offset(world, lambda: trace.now() + wrong_by)
    assert abs(offset + wrong_by) <= most
    world.finish()


@pytest.mark.mpi
def test_the_file_is_bounded(tmp_path_factory, monkeypatch):
    comm = MPI.COMM_WORLD
    monkeypatch.setattr(timeline, "MOST_EVENTS", 10 * comm.size)
    folder = comm.bcast(tmp_path_factory.mktemp("run") if comm.rank == 0 else None)
    (folder / "log").mkdir(exist_ok=True)
    world = World(comm, config.load())
    made = timeline.Timeline(world, folder)
    for _ in range(50):
        with trace.span("kernels"):
            trace.record("pull", trace.now(), row="pull")
    made.write(world)
    world.finish()
    if comm.rank == 0:
        made.merge()
        with gzip.open(folder / "trace.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert len(spans) == 10 * comm.size
        assert {event["pid"] for event in spans} == set(range(comm.size))
