"""The statistics of the whole job from the last report of every rank."""

from adam_mpi.cluster.control_messages import Statistics
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.sharding.training_state import Phase


def worker(rank=0, sent=0, waited=0.0, **more):
    pushes = {"sent": sent, "acknowledged": sent, "bytes": 100 * sent, "last": sent}
    values = {"role": "worker", "rank": rank, "pushes": pushes, "pulls": {"count": 1, "bytes": 8}}
    return values | {"clock_wait": waited} | more


def server(rank=0, shards=1, leads=None, **tables):
    values = {"role": "server", "rank": rank, "duplicates": 0, "refused": 0, "shards": shards, "leads": leads or {}}
    values["strips"] = [0] if shards else []
    return values | {"tables": [(name.removeprefix("of_"), 0, applied) for name, applied in tables.items()]}


def data(phase, finished, loss=0.0, correct=0, done=False):
    values = {"role": "data", "phase": phase, "finished": finished, "sums": [loss, correct], "done": done}
    return values | {"skipped": 0, "not_finite": 0}


def collect(*reports):
    """The statistics of a job whose ranks have sent these reports."""
    statistics = JobStatistics()
    for rank, values in reports:
        statistics.update(rank, Statistics(values))
    return statistics


def test_a_final_report_stays_final_when_a_periodic_one_follows():
    statistics = JobStatistics()
    statistics.update(2, Statistics(worker(2, sent=5), final=True))
    statistics.update(2, Statistics(worker(2, sent=6), at=1.0))
    statistics.update(3, Statistics(worker(3, sent=1)))
    assert statistics.count_finals("worker", [2, 3]) == 1 and statistics.pushes([2, 3])["sent"] == 7
    assert statistics.count_finals("worker", [3]) == 0


def test_pushes_are_applied_when_every_server_with_shards_has_applied_them():
    servers = [(0, server(0, of_3=9, of_4=1)), (1, server(1, of_3=7, of_4=1)), (2, server(2, shards=0))]
    workers = [(3, worker(3, sent=9, waited=0.5)), (4, worker(4, sent=1, waited=0.25))]
    statistics = collect(*servers, *workers)
    assert statistics.pushes(range(5)) == {
        "sent": 10,
        "acknowledged": 10,
        "applied": 8,
        "given_up": 0,
        "unacknowledged_of_dead": 0,
        "short": 2,
        "duplicates": 0,
        "refused": 0,
        "bytes": 1000,
    }
    assert statistics.pulls() == {"count": 2, "bytes": 16} and statistics.clock_wait() == 0.75


def test_pushes_of_a_rank_that_has_taken_over_another_strip_are_those_of_its_last_one():
    both = server(0) | {"tables": [("3", 0, 5), ("3", 1, 9)], "strips": [0, 1]}
    statistics = collect((0, both), (1, server(1) | {"tables": [("3", 0, 6)]}), (3, worker(3, sent=9)))
    assert statistics.pushes([0, 1, 3])["applied"] == 9 and not statistics.short([0, 1, 3])


def test_what_a_pusher_counts_as_acknowledged_and_a_shard_lacks_is_short():
    """Also for a pusher that is lost, and where a server has never received a push of it."""
    servers = [(0, server(0, of_3=9, of_4=4, of_5=6)), (1, server(1, of_3=9, of_4=3))]
    statistics = collect(*servers, *((rank, worker(rank, sent=sent)) for rank, sent in ((3, 9), (4, 4), (5, 6))))
    assert statistics.short([0, 1, 3, 4]) == {"4": 1, "5": 6} and statistics.pushes([0, 1, 3, 4])["short"] == 7
    assert statistics.pushes([0, 1, 3, 4])["applied"] == 12
    # A clock that only lost ranks knew is computed again without them.
    assert statistics.short([0, 1, 3, 4], pushers=[3, 4]) == {"4": 1}


def test_the_pushes_of_lost_ranks_are_counted_though_another_coordinator_received_them():
    statistics = JobStatistics()
    statistics.continue_from({"3": [5, 4], "4": [2, 2]}, {})
    # What a lost server had applied is not what the others have.
    reports = [(0, server(0, of_3=6, of_4=9)), (1, server(1, of_3=1, of_4=1)), (4, worker(4, sent=9))]
    for rank, values in reports:
        statistics.update(rank, Statistics(values))
    pushes = statistics.pushes([0, 4])
    assert (pushes["sent"], pushes["acknowledged"], pushes["applied"]) == (14, 13, 15)
    assert pushes["unacknowledged_of_dead"] == 2


def test_figures_count_only_the_phase_they_are_of():
    now = data(phase=3, finished=30, loss=15.0, correct=20, done=True)
    earlier = data(phase=2, finished=99, loss=99.0, correct=99, done=True)
    statistics = collect((0, now), (1, earlier))
    figures = statistics.figures(Phase(3, "train", 2), seconds=2.0)
    assert (figures["images"], figures["images_per_second"]) == (30, 15.0)
    assert (figures["loss"], figures["accuracy"]) == (0.5, 20 / 30)


def test_histograms_of_all_servers_are_one():
    statistics = collect((0, server(0, leads={"0": 3, "10": 1})), (1, server(1, leads={"0": 1, "2": 1})))
    assert statistics.distribution("leads") == {"max": 10, "mean": 2.0, "histogram": {"0": 4, "2": 1, "10": 1}}


def test_a_job_without_reports_has_figures_too():
    statistics = JobStatistics()
    assert statistics.figures(Phase(0, "train", 1), 0.0)["loss"] == 0 and statistics.pushes([])["applied"] == 0
    assert statistics.distribution("leads") == {"max": 0, "mean": 0.0, "histogram": {}}
