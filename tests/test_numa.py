"""NUMA nodes, read from folders like the system's, and threads that are bound to their cores."""

import os
import threading

import pytest

from adam_mpi.base import pools
from adam_mpi.base.pools import ThreadPool


def tree(folder, *lists):
    for number, cores in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n")
    (folder / "possible").write_text("0-1\n")
    return folder


def test_nodes_are_read_in_the_order_of_their_numbers(tmp_path):
    lists = ["0-3,8", "4-5", "", *(str(core) for core in range(20, 29))]
    found = pools.nodes(tree(tmp_path, *lists))
    assert found == [{0, 1, 2, 3, 8}, {4, 5}, *({core} for core in range(20, 29))]


def test_a_system_without_the_folder_has_no_nodes(tmp_path):
    assert pools.nodes(tmp_path) == pools.nodes(tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("allowed", "threads", "wanted"),
    [
        (range(8), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (range(8), 4, [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2),
        (range(8), 1, [{0, 1, 2, 3}]),
        ([1, 5, 6], 3, [{1}] * 2 + [{5, 6}]),
        ([0, 1], 2, [set(), set()]),
    ],
)
def test_a_thread_gets_the_allowed_cores_of_one_node(allowed, threads, wanted):
    assert pools.assign([range(4), range(4, 8)], allowed, threads) == wanted


def test_with_one_node_no_thread_is_bound():
    assert pools.assign([range(8)], range(8), 2) == [frozenset()] * 2


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_threads_run_on_their_cores_and_the_caller_is_not_bound():
    before = os.sched_getaffinity(0)
    core = min(before)
    pool = ThreadPool(2, [frozenset(), frozenset([core])])
    seen = {}
    pool.run([(n, lambda: seen.update({threading.get_ident(): os.sched_getaffinity(0)})) for n in (0, 1)])
    caller = seen.pop(threading.get_ident())
    assert caller == before and list(seen.values()) == [{core}]
