"""The board: figures of the whole job from the last word of every rank."""

from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.sharding.phases import Phase


def worker(rank=0, sent=0, waited=0.0, **more):
    pushes = {"sent": sent, "acknowledged": sent, "bytes": 100 * sent, "last": sent}
    word = {"role": "worker", "rank": rank, "pushes": pushes, "pulls": {"count": 1, "bytes": 8}}
    return word | {"clock_wait": waited} | more


def server(rank=0, shards=1, leads=None, **tables):
    word = {"role": "server", "rank": rank, "duplicates": 0, "refused": 0, "shards": shards, "leads": leads or {}}
    word["strips"] = [0] if shards else []
    return word | {"tables": [(name.removeprefix("of_"), 0, applied) for name, applied in tables.items()]}


def data(phase, finished, loss=0.0, correct=0, done=False):
    word = {"role": "data", "phase": phase, "finished": finished, "loss": loss, "correct": correct, "done": done}
    return word | {"skipped": 0, "not_finite": 0}


def test_a_last_word_stays_the_last_when_a_periodic_one_follows():
    board = JobStatistics()
    board.hear(2, worker(2, sent=5, final=True))
    board.hear(2, worker(2, sent=6))
    board.hear(3, worker(3, sent=1))
    assert board.finals("worker", [2, 3]) == 1 and board.pushes([2, 3])["sent"] == 7
    assert board.finals("worker", [3]) == 0


def test_pushes_are_applied_when_every_server_with_shards_has_applied_them():
    board = JobStatistics()
    for word in [server(0, of_3=9, of_4=1), server(1, of_3=7, of_4=1), server(2, shards=0)]:
        board.hear(word["rank"], word)
    board.hear(3, worker(3, sent=9, waited=0.5))
    board.hear(4, worker(4, sent=1, waited=0.25))
    assert board.pushes(range(5)) == {
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
    assert board.pulls() == {"count": 2, "bytes": 16} and board.clock_wait() == 0.75


def test_pushes_of_a_rank_that_has_taken_over_another_strip_are_those_of_its_last_one():
    board = JobStatistics()
    board.hear(0, server(0) | {"tables": [("3", 0, 5), ("3", 1, 9)], "strips": [0, 1]})
    board.hear(1, server(1) | {"tables": [("3", 0, 6)]})
    board.hear(3, worker(3, sent=9))
    assert board.pushes([0, 1, 3])["applied"] == 9 and not board.short([0, 1, 3])


def test_what_a_pusher_counts_as_acknowledged_and_a_shard_lacks_is_short():
    """Also of a pusher that is lost, and where a server has never had anything of him."""
    board = JobStatistics()
    board.hear(0, server(0, of_3=9, of_4=4, of_5=6))
    board.hear(1, server(1, of_3=9, of_4=3))
    for rank, sent in ((3, 9), (4, 4), (5, 6)):
        board.hear(rank, worker(rank, sent=sent))
    assert board.short([0, 1, 3, 4]) == {"4": 1, "5": 6} and board.pushes([0, 1, 3, 4])["short"] == 7
    assert board.pushes([0, 1, 3, 4])["applied"] == 12
    # A clock that only the dead knew of is computed again without them.
    assert board.short([0, 1, 3, 4], pushers=[3, 4]) == {"4": 1}


def test_the_pushes_of_the_dead_are_counted_though_another_head_heard_them():
    board = JobStatistics()
    board.go_on({"3": [5, 4], "4": [2, 2]}, {})
    board.hear(0, server(0, of_3=6, of_4=9))
    # Of a server that is lost: what it had applied is not what the others have.
    board.hear(1, server(1, of_3=1, of_4=1))
    board.hear(4, worker(4, sent=9))
    pushes = board.pushes([0, 4])
    assert (pushes["sent"], pushes["acknowledged"], pushes["applied"]) == (14, 13, 15)
    assert pushes["unacknowledged_of_dead"] == 2


def test_figures_count_only_the_phase_they_are_of():
    board = JobStatistics()
    board.hear(0, data(phase=3, finished=30, loss=15.0, correct=20, done=True))
    board.hear(1, data(phase=2, finished=99, loss=99.0, correct=99, done=True))
    figures = board.figures(Phase(3, "train", 2), seconds=2.0)
    assert (figures["images"], figures["images_per_second"]) == (30, 15.0)
    assert (figures["loss"], figures["accuracy"]) == (0.5, 20 / 30)


def test_histograms_of_all_servers_are_one():
    board = JobStatistics()
    board.hear(0, server(0, leads={"0": 3, "10": 1}))
    board.hear(1, server(1, leads={"0": 1, "2": 1}))
    assert board.distribution("leads") == {"max": 10, "mean": 2.0, "histogram": {"0": 4, "2": 1, "10": 1}}


def test_a_board_that_has_heard_nothing_has_figures_too():
    board = JobStatistics()
    assert board.figures(Phase(0, "train", 1), 0.0)["loss"] == 0 and board.pushes([])["applied"] == 0
    assert board.distribution("leads") == {"max": 0, "mean": 0.0, "histogram": {}}
