"""Sweeps: their runs, their table, and real jobs that are interrupted and resumed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import given

from adam_mpi.base.errors import UserError
from adam_mpi.cli import main
from adam_mpi.sweep.jobs import command_lines, points
from adam_mpi.sweep.table import Outcome, Row, advice, read_outcome, table_rows, usual_target

SMALL = given('model.layers=[{kind="dense",units=10}]', "kernels.engine=reference", "data.images=320", "train.epochs=2")


def test_points_are_all_combinations_with_all_seeds():
    found = points(["consistency.staleness=0,inf", "push.codec=none,topk"], 2, Path("s"))
    assert len(found) == len({point.run for point in found}) == 8
    assert [point.seed for point in found] == [1] * 4 + [2] * 4
    assert found[1].values == ("consistency.staleness=0", "push.codec=topk")
    assert found[1].run == Path("s/consistency.staleness=0_push.codec=topk_seed=1")
    line = command_lines(found, ["my conf.toml"]).splitlines()[1]
    assert shlex.split(line) == [
        "my conf.toml",
        "--set",
        "consistency.staleness=0",
        "--set",
        "push.codec=topk",
        "--set",
        "run.seed=1",
        "--run",
        "s/consistency.staleness=0_push.codec=topk_seed=1",
        "--resume",
    ]


@pytest.mark.parametrize("over", ["staleness=0", "consistency.staleness", "consistency.staleness=0,,1", "run.seed=1,2"])
def test_text_that_is_no_list_of_values_is_refused(over):
    with pytest.raises(UserError, match="--over"):
        points([over], 1, Path("s"))


def outcome(*curve):
    return Outcome(list(curve), 1000.0, 0.5)


def test_time_to_target_and_advice():
    slow, quick, never = outcome((10, 0.9), (20, 0.98)), outcome((5, 0.5), (9, 0.985)), outcome((5, 0.4), (10, 0.6))
    planned = points(["a.b=1,2,3"], 1, Path("s"))
    found = table_rows(planned, dict(zip(planned, (slow, quick, never), strict=True)), 0.98)
    assert [row.times for row in found] == [[20], [9], []]
    assert advice(found, 0.98).startswith("Take a.b=2: 9.0 s to 98.00% on average; one seed is no evidence")
    assert usual_target([slow, quick, never]) == 0.98
    assert "No value reached 99.00%" in advice(table_rows(planned, {planned[0]: slow}, 0.99), 0.99)


def test_values_within_the_spread_of_seeds_count_as_equal():
    def row(value, *times):
        return Row(value, [outcome((time, 1.0)) for time in times], list(times))

    text = advice([row("x=1", 10, 12), row("x=2", 11, 13), row("x=3", 30, 31)], 0.9)
    assert text == "Take x=1: 11.0 s to 90.00% on average; within the spread of the seeds as good: x=2."


def test_seconds_of_a_resumed_run_are_added_up(tmp_path):
    entries = [(10, "train", 0.5), (11, "validation", 0.8), (2, "train", 0.9), (4, "validation", 0.95)]
    text = "".join(json.dumps({"seconds": s, "part": p, "accuracy": a, "done": True}) + "\n" for s, p, a in entries)
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "summary.json").write_text(json.dumps({"images_per_second": 5.0, "staleness": {"mean": 1.5}}))
    assert read_outcome(tmp_path) == Outcome([(11, 0.8), (15, 0.95)], 5.0, 1.5)


@pytest.mark.slow
def test_a_sweep_runs_what_is_missing_and_recommends(tmp_path, capsys):
    # One rank needs no mpirun: `env` starts it as it is.
    command = [
        "sweep",
        "--over",
        "optimizer.learning_rate=0.01,0.05",
        "-n",
        "1",
        "--launch",
        "env",
        "-o",
        str(tmp_path / "s"),
    ]
    command += [*SMALL, "--target", "0.02"]
    assert main(command) == 0
    output = capsys.readouterr().out.splitlines()
    jobs = tmp_path / "s" / "jobs.txt"
    assert output[0] == (
        f"2 runs, 0 of them done; as a Slurm array: sbatch --array=1-2 --ntasks=1 slurm/train.sh @{jobs}"
    )
    assert output[1:3] == [f"{i}/2 optimizer.learning_rate={rate} seed=1: done" for i, rate in ((1, 0.01), (2, 0.05))]
    assert output[-1].startswith("Take optimizer.learning_rate=0.0")
    # Without its marker a run is repeated, the others are not. A third value is one more run of the same sweep.
    (tmp_path / "s" / "optimizer.learning_rate=0.05_seed=1" / "DONE").unlink()
    command[2] += ",-1"
    assert main(command) == 2 and "optimizer.learning_rate = -1" in capsys.readouterr().err
    command[2] = "optimizer.learning_rate=0.01,0.05,0.1"
    assert main(command) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("3 runs, 1 of them done") and [line[:3] for line in output[1:3]] == ["2/3", "3/3"]
    # The table alone, and another sweep in the same folder.
    assert main([*command, "--table"]) == 0
    assert capsys.readouterr().out.splitlines() == output[3:]
    assert main([*command, "--set", "train.batch=16"]) == 2
    assert "holds a sweep of other jobs" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_that_fails_is_reported(tmp_path, capsys):
    faults = 'inject.faults=["raise role=worker at=compute step=2"]'
    command = ["sweep", "--over", "optimizer.learning_rate=0.01", "--launch", "env", "-o", str(tmp_path), *SMALL]
    assert main([*command, *given(faults)]) == 2
    streams = capsys.readouterr()
    assert (
        "1/1 optimizer.learning_rate=0.01 seed=1: FAILED" in streams.out
        and "no run of this sweep is done" in streams.err
    )


def test_sweeps_over_the_same_key_have_folders_of_their_own(tmp_path, monkeypatch, capsys):
    """The second takes the next folder, and each finds its own again."""
    monkeypatch.chdir(tmp_path)
    commands = [
        ["sweep", "--over", "optimizer.learning_rate=0.01", "--launch", "false", "-n", str(n)] for n in (1, 2, 1)
    ]
    assert [main(command) for command in commands] == [2, 2, 2]
    folders = re.findall(r"slurm/train.sh @(.*)/jobs.txt", capsys.readouterr().out)
    assert folders == [f"runs/sweep-optimizer.learning_rate{more}" for more in ("", "-2", "")]


# In place of mpirun: the first job is done at once, the second runs until it is interrupted.
LAUNCHER = """#!/bin/sh
while [ "$1" != --run ]; do shift; done
mkdir -p "$2"
case $2 in *rate=0.01*) touch "$2/DONE"; exit 0 ;; esac
trap 'echo ended >"$2/ended"; exit 1' INT
echo $$ >"$2/pid.part"; mv "$2/pid.part" "$2/pid"
while :; do sleep 0.01; done
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_is_one_line_and_leaves_no_job(number, tmp_path):
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    command = ["sweep", "--over", "optimizer.learning_rate=0.01,0.05,0.1", "--launch", launcher, "-o", tmp_path / "s"]
    words = [sys.executable, "-m", "adam_mpi", *map(str, command)]
    sweep = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    second = tmp_path / "s" / "optimizer.learning_rate=0.05_seed=1"
    limit = time.monotonic() + 60
    while not (second / "pid").exists():
        assert sweep.poll() is None and time.monotonic() < limit, "the second job did not begin"
        time.sleep(0.01)
    sweep.send_signal(number)
    out, text = sweep.communicate(timeout=60)
    assert sweep.returncode == 130 and "1/3 optimizer.learning_rate=0.01 seed=1: done" in out
    assert text == "adam_mpi: interrupted; 1 of 3 runs are done; run the same command to resume\n"
    assert (second / "ended").exists() and not (tmp_path / "s" / "optimizer.learning_rate=0.1_seed=1").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((second / "pid").read_text()), 0)
