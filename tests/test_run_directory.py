"""Requests in a run directory, and what is read from files of it that others may have changed."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
from launch import ROOT, clean_environment

from adam_mpi.base import files
from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import owner, run_directory, stores
from adam_mpi.cli import main
from adam_mpi.config import load
from adam_mpi.data.formats import hdf5
from adam_mpi.data.inputs import Inputs
from adam_mpi.data.sets import describe
from adam_mpi.model.engine import jit, tuner
from adam_mpi.planning.plan import model
from adam_mpi.report import write_report
from adam_mpi.report.run_data import read_run
from adam_mpi.runtime import agreement, compile
from adam_mpi.runtime.job import ClaimedRun, JobRequest
from adam_mpi.sweep import table


@pytest.fixture
def run(tmp_path):
    """A run that has finished an epoch."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text("")
    (path / "summary.json").write_text('{"images_per_second": 5.0, "staleness": {}}')
    (path / "metrics.jsonl").write_text("")
    return path


def test_a_file_is_replaced_atomically(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    files.write_text(path, "old")

    def cut(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(path, "new")
    assert path.read_text() == "old"


def test_a_file_is_on_disk_before_it_replaces_another(tmp_path, monkeypatch):
    """Else a power loss may leave the new name and nothing in it."""
    path = tmp_path / "config.toml"
    files.write_text(path, "old")
    on_disk = []
    replaced = []
    replace = type(path).replace

    def note_sync(descriptor):
        on_disk.append((os.fstat(descriptor).st_ino, Path(f"/proc/self/fd/{descriptor}").read_text()))

    def note_replace(self, target):
        replaced.append((self.stat().st_ino, self.read_text()))
        assert on_disk == replaced
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(type(path), "replace", note_replace)
    files.write_text(path, "new")
    assert path.read_text() == "new" and len(replaced) == 1


def test_the_configuration_of_a_run_is_whole_whenever_a_resumed_job_is_killed(run, monkeypatch, shapes):
    """`--resume` without a configuration reads it."""
    config = load(None, ["store.interval=0"])
    files.write_text(run / "config.toml", "of the job before")
    (run / "log").mkdir()
    held, _ = owner.claim_run(run, [owner.this_process()])
    claimed = ClaimedRun(run, run_directory.load_or_create_identity(run), held, describe(config.data), shapes)
    world = types.SimpleNamespace(layout=types.SimpleNamespace(replicas=1))
    seen = []
    write = type(run).write_text

    def cut(path, text, *more):
        """A kill comes when half of the text is written."""
        write(path, text[: len(text) // 2], *more)
        seen.append((run / "config.toml").read_text())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(run), "write_text", cut)
        agreement.prepare_job(config, claimed, JobRequest(resume=True, minutes=1.0), world, stores.FoundStores())
    assert seen == ["of the job before"]
    held.release()


def test_torn_lines_of_metrics_are_skipped(run):
    """A kill leaves the last line torn, and the next job writes its first one right behind it."""
    line = {"seconds": 2.0, "part": "validation", "done": True, "accuracy": 0.5}
    whole = json.dumps(line)
    (run / "metrics.jsonl").write_text(f"{whole}\n{whole[:20]}{whole}\n7\n{whole}\n{whole[:-3]}")
    assert run_directory.read_metrics(run) == [line, line]
    assert read_run(run, "run").metrics == [line, line]
    assert table.read_outcome(run).curve == [(2.0, 0.5), (2.0, 0.5)]


@pytest.mark.parametrize("command", [("grow", "2"), ("inspect", "--copies")])
def test_a_request_to_a_job_that_does_not_run_is_refused(run, command, capsys):
    assert main([*command, str(run)]) == 2
    assert "no job runs there; start one with --run" in capsys.readouterr().err
    held, _ = owner.claim_run(run, [owner.this_process()])
    assert "asked for 2" in run_directory.grow(run, 2)
    (run / "GROW").unlink()
    held.release()
    (run / "DONE").touch()
    assert main([*command, str(run)]) == 2
    assert "no job runs there; the last one has left DONE" in capsys.readouterr().err
    assert not (run / "GROW").exists() and not (run / "COMPARE").exists()


def test_a_report_into_no_folder_is_refused_in_one_line(run, tmp_path, capsys):
    assert main(["report", str(run), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert f"there is no folder {tmp_path / 'no'}; make it, or give another file" in capsys.readouterr().err


def test_the_folder_of_a_sweep_stands_for_its_runs(run, tmp_path, monkeypatch):
    folder = tmp_path / "sweep"
    taken = []
    for name in ("b", "a"):
        (folder / name).mkdir(parents=True)
    (folder / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match="no run of this sweep has finished an epoch"):
        write_report([folder], tmp_path / "page.html")
    for name in ("b", "a"):
        for file in ("config.toml", "summary.json", "metrics.jsonl"):
            (folder / name / file).write_text((run / file).read_text())

    def note(path, name):
        taken.append((path, name))
        if len(taken) == 3:
            raise UserError("these are all")

    monkeypatch.setattr("adam_mpi.report.read_run", note)
    with pytest.raises(UserError, match="these are all"):
        write_report([folder, run], tmp_path / "page.html")
    assert taken == [(folder / "a", "a"), (folder / "b", "b"), (run, "run")]


@pytest.fixture(scope="module")
def shapes():
    config = load(None)
    return model(config, describe(config.data))


def test_the_choices_of_the_tuner_are_taken(shapes, tmp_path):
    assert tuner.check(tuner.fixed(shapes), shapes) == ""
    assert compile.choose_kernels(load(None), shapes, tmp_path / "kernels.json") == compile.choose_kernels(
        load(None), shapes, tmp_path / "kernels.json"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"forward": ["__import__('os').system('true')", 1]}, "forward must be 2 whole numbers from 1 to 1024"),
        ({"weights": [1, 2]}, "weights must be 3 whole numbers"),
        ({"data": [True, 1]}, "data must be 2 whole numbers"),
        ({"data": [0, 1]}, "data must be 2 whole numbers"),
        ({"data": "12"}, "data must be 2 whole numbers"),
        ({"algorithm": "exec"}, "algorithm is none of direct"),
        ({"algorithm": ["direct"]}, "algorithm is none of direct"),
        ({"more": 1}, "direct has the keys algorithm, forward, data, weights and no others"),
    ],
)
def test_choices_that_no_tuner_has_made_are_refused(shapes, tmp_path, change, reason):
    name = next(iter(tuner.fixed(shapes)))
    direct = {"algorithm": "direct", "forward": [2, 4], "data": [2, 4], "weights": [1, 1, 5]}
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({name: direct}))
    assert compile.choose_kernels(load(None), shapes, path) == {name: direct}
    path.write_text(json.dumps({name: direct | change}))
    with pytest.raises(UserError, match=f"kernels.json: {name}: {reason}.*; remove the file"):
        compile.choose_kernels(load(None), shapes, path)


@pytest.mark.parametrize("text", ["[1]", "{", '{"elsewhere": {"algorithm": "direct"}}'])
def test_a_file_without_a_table_of_choices_is_refused(shapes, tmp_path, text):
    (tmp_path / "kernels.json").write_text(text)
    with pytest.raises(UserError, match="remove the file to have kernels chosen again"):
        compile.choose_kernels(load(None), shapes, tmp_path / "kernels.json")


GOOD = {
    "shape": [3, 4, 5],
    "dtype": "uint8",
    "classes": 2,
    "names": ["a", "b"],
    "mean": [1, 2, 3.5],
    "factor": [1, 1, 1],
}


def test_inputs_are_the_same_after_writing_and_reading():
    made = Inputs.from_json(json.dumps(GOOD))
    assert made.shape == (3, 4, 5) and Inputs.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3, 4]},
        {"shape": [3, 4, "5"]},
        {"shape": [3, 4, -5]},
        {"shape": [3, True, 5]},
        {"shape": 7},
        {"shape": [[3], 4, 5]},
        {"dtype": "object"},
        {"dtype": "float64"},
        {"dtype": ["uint8"]},
        {"classes": "2"},
        {"shape": [3, 1 << 20, 1 << 20]},
        {"classes": 0},
        {"classes": 2.0},
        {"names": ["a"]},
        {"names": [1, 2]},
        {"names": "ab"},
        {"mean": [1]},
        {"mean": [1, 2, "3"]},
        {"mean": [1, 2, float("nan")]},
        {"factor": []},
        {"factor": {"a": 1}},
        {"more": 1},
    ],
)
def test_inputs_of_a_kind_that_no_data_set_has_are_refused(change):
    with pytest.raises(UserError, match="^inputs: "):
        Inputs.from_json(json.dumps(GOOD | change))


@pytest.mark.parametrize("text", ["{", "[]", "7", "null", '{"shape": [1, 1, 1]}', "[" * 100000])
def test_inputs_that_are_not_a_table_are_refused(text):
    with pytest.raises(UserError, match="^inputs: not what this program writes"):
        Inputs.from_json(text)


def test_data_sets_need_no_locks(tmp_path, monkeypatch):
    opened = []
    kind = h5py.File
    path = tmp_path / "set.h5"
    with kind(path, "w") as file:
        file["train/images"], file["train/labels"] = np.zeros((4, 2, 2), np.uint8), np.arange(4)

    def note(*arguments, **options):
        opened.append(options.get("locking"))
        return kind(*arguments, **options)

    monkeypatch.setattr(h5py, "File", note)
    hdf5.open_parts(path)
    assert main(["pack", str(path), "-o", str(tmp_path / "packed.h5")]) == 0
    assert opened and not any(locking is not False for locking in opened)


# numba looks first for a folder in its settings, then beside the source and at home.
READ_ONLY = """import sys
import adam_mpi
from numba.core import caching
kind = getattr(caching, "CacheImpl", None) or caching._CacheImpl
kind._locator_classes = kind._locator_classes[:1]
from adam_mpi.cli import main
sys.exit(main(sys.argv[1:]))
"""


def predict(environment, path):
    command = [sys.executable, "-c", READ_ONLY, "predict", str(path), "x.png"]
    environment = clean_environment() | environment
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_where_nothing_can_be_written_the_cache_is_named(tmp_path):
    """As a read-only installation and home look to numba, to root too."""
    done = predict({}, tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith("nor at home; set ADAM_MPI_CACHE to a folder that can be written")
    done = predict({"ADAM_MPI_CACHE": str(tmp_path / "cache")}, tmp_path)
    assert f"{tmp_path}: no weights" in done.stderr
    assert (tmp_path / "cache" / "numba").is_dir()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAM_MPI_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="cannot be written; set ADAM_MPI_CACHE"):
        jit.folder()
