"""Stores on the disks of several nodes: who reads which file, and what is not whole."""

import numpy as np
import pytest

from adam_mpi.durable import stores
from adam_mpi.durable.slots import Piece, Stored
from adam_mpi.durable.stores import Sight
from adam_mpi.errors import UserError

TOLD = {"parameters": 300, "began": 10**18}


def sight(name, modified=1, inode=1):
    return Sight("0001", name, modified, inode)


def test_files_that_all_see_are_read_by_different_ranks():
    shared = [sight(f"server-{server}") for server in range(4)]
    chosen = stores.readers([shared, shared])
    assert sorted(chosen.values()) == [0, 0, 1, 1] and len(chosen) == 4


def test_a_file_is_read_where_it_lies():
    assert stores.readers([[sight("a")], [], [sight("b"), sight("c")]]) == {"a": 0, "b": 2, "c": 2}


def test_of_two_files_of_one_name_the_newer_one_is_read():
    old, new = sight("a", modified=5, inode=9), sight("a", modified=6, inode=2)
    assert stores.readers([[old], [new], [old]]) == {"a": 1}


def file(*sizes, position=True, nanoseconds=2 * 10**18, **counts):
    counts = {"version": 1, "pushes": 3, "images": 96} | counts
    pieces = [size and Piece(0, size, nanoseconds=nanoseconds, values={}, **counts) for size in sizes]
    return Stored(pieces, np.zeros(8, np.uint8) if position else None, 5, 160)


def test_what_is_lost_is_what_was_acknowledged_and_is_not_in_every_shard():
    assert file(100).lost == (2, 64)
    assert file(100, pushes=5, images=160).lost == (0, 0)


@pytest.mark.parametrize(
    "files, trouble",
    [
        ({"a": file(100, None), "b": file(200)}, "a: not every shard has been written"),
        ({"a": file(100, position=False), "b": file(200)}, "a: not every shard has been written"),
        ({"a": file(100)}, "100 of 300 parameters are here"),
        ({"a": file(100), "b": file(200), "c": file(100)}, "400 of 300 parameters are here"),
        ({"a": file(100), "b": "b: cannot be read"}, "b: cannot be read"),
        ({"a": file(100, nanoseconds=10**17), "b": file(200)}, "a: is of another life, before this one began"),
    ],
)
def test_what_is_not_whole_is_told(tmp_path, files, trouble):
    with pytest.raises(UserError, match=trouble):
        stores.check(tmp_path, TOLD, files)


def test_what_is_whole_is_taken(tmp_path):
    assert list(stores.check(tmp_path, TOLD, {"a": file(100), "b": file(150, 50)})) == ["a", "b"]
