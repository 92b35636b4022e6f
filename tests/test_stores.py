"""Stores on the disks of several nodes: which rank reads which file, and what is not whole."""

import json
import shutil

import numpy as np
import pytest
from mpi4py import MPI

from adam_mpi.base.errors import LostRun, UserError
from adam_mpi.checkpoint import owner, resume, run_directory, store_file, stores
from adam_mpi.checkpoint.hdf5_file import FORMAT
from adam_mpi.checkpoint.store_file import StoreContent, StoredShard
from adam_mpi.checkpoint.stores import VisibleFile
from adam_mpi.config import load
from adam_mpi.sharding.shards import Shard

DESCRIPTION = {"parameters": 300, "began": 10**18}


def visible(name, modified=1, inode=1):
    return VisibleFile("0001", name, modified, inode)


def test_files_that_all_see_are_read_by_different_ranks():
    shared = [visible(f"server-{server}") for server in range(4)]
    chosen = stores.assign_readers([shared, shared])
    assert sorted(chosen.values()) == [0, 0, 1, 1] and len(chosen) == 4


def test_a_file_is_read_where_it_lies():
    assert stores.assign_readers([[visible("a")], [], [visible("b"), visible("c")]]) == {"a": 0, "b": 2, "c": 2}


def test_of_two_files_of_one_name_the_newer_one_is_read():
    old = visible("a", modified=5, inode=9)
    new = visible("a", modified=6, inode=2)
    assert stores.assign_readers([[old], [new], [old]]) == {"a": 1}


def file(*sizes, position=True, nanoseconds=2 * 10**18, **counts):
    counts = {"version": 1, "pushes": 3, "images": 96} | counts
    pieces = [size and StoredShard(0, size, nanoseconds=nanoseconds, values={}, **counts) for size in sizes]
    return StoreContent(pieces, np.zeros(8, np.uint8) if position else None, 5, 160)


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
        ({"a": file(100, nanoseconds=10**17), "b": file(200)}, "a: is of another attempt, before this one began"),
    ],
)
def test_what_is_not_whole_is_named(tmp_path, files, trouble):
    with pytest.raises(UserError, match=trouble):
        stores.check_files(tmp_path, DESCRIPTION, files)


def test_what_is_whole_is_taken(tmp_path):
    assert list(stores.check_files(tmp_path, DESCRIPTION, {"a": file(100), "b": file(150, 50)})) == ["a", "b"]


@pytest.fixture
def two(tmp_path):
    """Two runs of one base name whose stores are in one folder, each with two attempts."""
    config = load(None, [f"store.dir={tmp_path / 'stores'}"])
    runs = [tmp_path / name / "mine" for name in ("a", "b")]
    for run in runs:
        run.mkdir(parents=True)
        place = stores.folder(config, run, run_directory.load_or_create_identity(run))
        for _ in range(2):
            attempt = resume.next_attempt(place)
            resume.describe_store(attempt, config, 1, 300, run_directory.load_or_create_identity(run))
            store_file.create(attempt / "server-00000.h5", [Shard(0, "dense1", 0, 300)], ["weights"], 8)
    return config, runs


def claim(run, by_force=False):
    """The claim of this process on `run`."""
    return owner.claim_run(run, [owner.this_process()], by_force)[0]


def attempts(config, run):
    return [
        path.name
        for path in stores.attempt_folders(stores.folder(config, run, run_directory.load_or_create_identity(run)))
    ]


def test_runs_of_one_name_neither_see_nor_remove_each_other(two):
    config, (one, other) = two
    assert attempts(config, one) == attempts(config, other) == ["0001", "0002"]
    place = stores.folder(config, one, run_directory.load_or_create_identity(one))
    held = claim(one)
    stores.remove_earlier_attempts(place / "0002", run_directory.load_or_create_identity(one), held)
    assert attempts(config, one) == ["0002"] and attempts(config, other) == ["0001", "0002"]


def test_what_is_marked_as_another_run_s_is_neither_read_nor_removed(two):
    """Even where it lies among ours."""
    config, (one, other) = two
    mine = run_directory.load_or_create_identity(one)
    place = stores.folder(config, one, mine)
    description = json.loads((place / "0001" / stores.DESCRIPTION).read_text())
    description["run"] = run_directory.load_or_create_identity(other).id
    (place / "0001" / stores.DESCRIPTION).write_text(json.dumps(description))
    shutil.rmtree(place / "0002")
    seen = stores.find_stores(MPI.COMM_SELF, place, mine, True)
    assert seen.attempt is None and seen.trouble[0].endswith(
        "is of another run; move it away, or give another store.dir"
    )
    stores.remove_earlier_attempts(place / "0002", mine, claim(one))
    assert (place / "0001").exists()


def test_a_store_of_format_3_is_refused_by_name(two):
    config, (one, _) = two
    mine = run_directory.load_or_create_identity(one)
    place = stores.folder(config, one, mine)
    shutil.rmtree(place / "0001")
    description = json.loads((place / "0002" / stores.DESCRIPTION).read_text())
    (place / "0002" / stores.DESCRIPTION).write_text(json.dumps(description | {"format": 3}))
    seen = stores.find_stores(MPI.COMM_SELF, place, mine, True)
    cure = "commit 450b6f2 is the last whose `adam_mpi merge` reads format 3"
    assert seen.attempt is None and seen.last == 2
    assert seen.trouble == (f"{place / '0002'}: format 3; this version reads format {FORMAT}; {cure}",)


def test_a_job_that_has_lost_the_run_removes_no_store(two):
    config, (one, _) = two
    place = stores.folder(config, one, run_directory.load_or_create_identity(one))
    held = claim(one)
    claim(one, by_force=True)
    with pytest.raises(LostRun):
        stores.remove_earlier_attempts(place / "0002", run_directory.load_or_create_identity(one), held)
    assert attempts(config, one) == ["0001", "0002"]


def test_a_run_that_is_moved_keeps_its_stores_and_a_copy_of_it_gets_its_own(two, tmp_path):
    config, (one, _) = two
    before = run_directory.load_or_create_identity(one)
    place = stores.folder(config, one, before)
    shutil.copytree(one, tmp_path / "copy" / "mine")
    copy = run_directory.load_or_create_identity(tmp_path / "copy" / "mine")
    assert copy.id != before.id and copy.known == (copy.id, before.id)
    assert (
        run_directory.load_or_create_identity(tmp_path / "copy" / "mine") == copy
        and run_directory.load_or_create_identity(one) == before
    )
    assert attempts(config, tmp_path / "copy" / "mine") == []
    moved = one.rename(tmp_path / "renamed")
    now = run_directory.load_or_create_identity(moved)
    assert now.id == before.id and stores.folder(config, moved, now) == place
    (moved / run_directory.IDENTITY_FILE).write_text('{"id": "../../elsewhere", "directory": "", "before": []}')
    assert ".." not in run_directory.load_or_create_identity(moved).id


def test_attempts_are_counted_beyond_four_digits(tmp_path):
    for name in ("9999", "10000", "0003", "mine"):
        (tmp_path / name).mkdir()
    assert [path.name for path in stores.attempt_folders(tmp_path)] == ["0003", "9999", "10000"]
    assert resume.next_attempt(tmp_path).name == "10001"
    run = tmp_path / "run"
    run.mkdir()
    stores.remove_earlier_attempts(tmp_path / "10000", run_directory.load_or_create_identity(run), claim(run))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10000", "mine", "run"]
