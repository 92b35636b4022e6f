"""The state of a job from the reports of its ranks: busy, slow, waiting for others; and the norms of its layers."""

from types import SimpleNamespace

import numpy as np
from test_job_statistics import server, worker
from test_network import block, prepare

from adam_mpi.cluster import layout
from adam_mpi.cluster.control_messages import Statistics
from adam_mpi.cluster.layout import Place, arrange
from adam_mpi.config import Layout
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import tensors, views
from adam_mpi.monitor import status
from adam_mpi.monitor.aggregate_statistics import coarse_histogram
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.worker import diagnostics
from adam_mpi.worker.diagnostics import Waits

LAYOUT = arrange(["a"] * 6, Layout(data=1, servers=1))


def report(at, busy, images, **more):
    """A worker's report at an interval."""
    values = {"busy": busy, "images": images, "queue": 1, "waits": {}, "whom": {}}
    return Statistics(worker(sent=int(at)) | values | more, at=at)


def collect(*ranks):
    """Statistics of workers from rank 2 on: at 0 s nothing, at 2 s busy seconds and images as given."""
    made = JobStatistics()
    for rank, (busy, images, more) in enumerate(ranks, 2):
        made.update(rank, report(0.0, 0.0, 0))
        made.update(rank, report(2.0, busy, images, **more))
    return made


def row(made, rank):
    return next(row for row in made.rank_rows(LAYOUT) if row["rank"] == rank)


def test_shares_and_amounts_are_those_since_the_report_before():
    made = collect((1.5, 300, {"waits": {"data": 0.5}, "whom": {"data": [0]}}))
    found = row(made, 2)
    assert (found["busy"], found["images"], found["bytes"]) == (0.75, 150.0, 100)
    assert found["waits"] == {"data": 0.25} and found["waiting"] == "data of rank 0 25%"
    assert found["role"] == "worker" and found["replica"] == 0


def test_a_rank_that_computes_longer_on_an_image_is_slow_and_one_that_waits_is_not():
    made = collect((1.0, 100, {}), (1.0, 100, {}), (2.0, 50, {}), (0.1, 10, {}))
    assert [found["rank"] for found in made.rank_rows(LAYOUT) if found["slow"]] == [4]


def test_reports_of_ranks_that_are_gone_are_left_out():
    made = collect((1.0, 10, {}))
    made.update(9, report(0.0, 0.0, 0))
    made.update(1, report(0.0, 0.0, 0))
    assert [found["rank"] for found in made.rank_rows(LAYOUT)] == [2]


def test_a_single_worker_is_not_slow():
    assert not row(collect((2.0, 1, {})), 2)["slow"]


def test_a_wait_for_a_clock_names_the_workers_that_are_behind():
    made = collect((1.0, 10, {"waits": {"clock": 1.0}}), (1.0, 10, {}))
    made.update(1, Statistics(server() | {"clocks": {"2": 5, "3": 4}, "queue": 0, "bytes": 0}))
    assert row(made, 2)["waiting"] == "clock of rank 3 50%" and row(made, 1)["waiting"] == "pushes 100%"


def test_groups_have_means_sums_and_the_main_reason():
    made = collect((1.0, 10, {"waits": {"data": 0.2, "clock": 0.6}}), (2.0, 10, {"waits": {"clock": 0.2}}))
    (found,) = status.groups(made.rank_rows(LAYOUT))
    assert (found["role"], found["ranks"], found["busy"], found["bytes"]) == ("worker", 2, 0.75, 200)
    assert (found["waiting"], found["waited"]) == ("clock", 0.2)


def test_a_histogram_stays_short():
    assert coarse_histogram(JobStatistics().histogram("leads")) == {}
    total = coarse_histogram(type(JobStatistics().histogram("leads"))({value: 1 for value in range(100_000)}))
    assert total[8] == 8 and total[16] == 16 and sum(total.values()) == 100_000 and len(total) < 25


def test_norms_and_dead_units_of_a_push():
    """A unit whose bias is far below zero is dead; its layer's figures say so, and the last layer has none."""
    shapes, weights = prepare("conv relu pool")
    named = views(weights, tensors(shapes))
    named["dense1/bias"][:2] = -100
    gradient = np.zeros_like(weights)
    pixels, labels, ids = block(4)
    Network(shapes, 4, 1).context().train(weights, gradient, pixels, labels, ids, epoch=1)
    probe = diagnostics.Probe(shapes, interval=1.0)
    probe.look(gradient, 4, weights)
    found = probe.layers
    assert found["dense1"]["dead"] >= 2 / 6 and "dead" not in found["dense2"]
    both = np.concatenate([named["dense2/weight"].ravel(), named["dense2/bias"]])
    np.testing.assert_allclose(found["dense2"]["weight_norm"], np.linalg.norm(both), rtol=1e-4)
    parts = views(gradient, tensors(shapes))
    both = np.concatenate([parts["conv1/weight"].ravel(), parts["conv1/bias"]]) / 4
    np.testing.assert_allclose(found["conv1"]["gradient_norm"], np.linalg.norm(both), rtol=1e-4)
    probe.look(2 * gradient, 4, weights)
    assert probe.layers is found, "looked again before it was time"


def test_a_wait_names_ranks_by_the_number_that_they_keep():
    """The ranks of MPI change when others are lost."""
    strips = [Place(rank, "n", ("worker",), 0, rank, rank + 5) for rank in (0, 1)]
    world = SimpleNamespace(layout=layout.Layout(tuple(strips), 2), rank=0)
    replica = SimpleNamespace(idle_share=1.0, waits_for_strips=True)
    worker = SimpleNamespace(world=world, replica=replica, current=SimpleNamespace(data=None, pulls=None))
    waits = Waits()
    waits.count(worker)
    assert waits.stats()["whom"] == {"strips": [6]}
