"""A generation is begun once, and who is not in it finds out."""

import threading

import pytest

from adam_mpi.cluster import fence


def test_a_generation_is_claimed_by_one_side_only(tmp_path):
    fence.claim(tmp_path, 1, [0, 1, 2])
    fence.claim(tmp_path, 1, [0, 1, 2])
    with pytest.raises(fence.Evicted, match="generation 1 has begun with others"):
        fence.claim(tmp_path, 1, [3])


def test_who_is_not_in_the_newest_generation_is_out(tmp_path):
    fence.check(tmp_path, 0, 3)
    fence.claim(tmp_path, 1, [0, 3])
    fence.check(tmp_path, 0, 3)
    fence.claim(tmp_path, 4, [0, 2])
    fence.check(tmp_path, 4, 3)
    with pytest.raises(fence.Evicted, match="taken for dead; generation 4"):
        fence.check(tmp_path, 0, 3)
    fence.clear(tmp_path)
    fence.check(tmp_path, 0, 3)


@pytest.mark.parametrize("why", ["late", "out"])
def test_a_watch_ends_who_is_late_or_out(tmp_path, why):
    ended = threading.Event()
    watch = fence.Watch(tmp_path, 0.2 if why == "late" else 60.0, ended.set, lambda error: ended.set())
    assert not watch.end()
    watch.begin(0, 3)
    if why == "out":
        fence.claim(tmp_path, 1, [0])
    assert ended.wait(20)
    assert watch.end()
