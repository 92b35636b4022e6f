"""What people see of a running job: the live view of scripts/train on a terminal, and `adam_mpi top`."""

import shutil
import subprocess
import sys
from shlex import join

import pytest
from launch import ROOT, given
from terminal import Terminal

from adam_mpi.monitor import live_view

LONG = given("data.images=6000", "train.epochs=500", "observe.interval=0.2")
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
TOP = [sys.executable, "-m", "adam_mpi", "top"]


@pytest.fixture
def terminal():
    opened = []

    def open_one(*command: object) -> Terminal:
        opened.append(Terminal(join(map(str, command))))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.mark.slow
@needs_tmux
def test_a_terminal_shows_the_run_and_its_roles_in_place(terminal, tmp_path):
    run = tmp_path / "run"
    screen = terminal(ROOT / "scripts" / "train", "-n", 4, "--run", run, *LONG)
    text = screen.until(lambda text: "ETA" in text and "%" in text.partition("server")[2], "view by role", 100)
    # Lines of epochs that are over stand above it.
    line = [line for line in text.splitlines() if "ETA" in line][-1]
    assert line.startswith("epoch ") and all(word in line for word in ("loss", "accuracy", "images/s", "ETA"))
    rows = {words[0]: line for line in text.splitlines() if (words := line.split())}
    assert {"data", "worker", "server"} <= set(rows) and "busy" in rows["role"] and "waiting for" in rows["role"]
    assert "/s" in rows["worker"] and "staleness" in rows["role"]
    # The view is one: later states take its place instead of following it.
    (run / "STOP").touch()
    text = screen.until(lambda text: "ended with" in text, "end", 60)
    assert text.count("busy") == 0 and "stopped by the file STOP" in text and "ended with 0" in text


@needs_tmux
@pytest.mark.full  # who counts as slow, and who waits, takes cores of its own to see
def test_top_follows_a_job_to_its_end(terminal, start_job):
    job = start_job(5, "train", *LONG, *given('inject.faults=["slow rank=3 factor=8"]', "consistency.staleness=0"))
    job.until((job.run / "status.json").exists, "its first status")
    screen = terminal(*TOP, job.run)
    # Rank 3 is slow; the other workers wait for its clock.
    text = screen.until(lambda text: "slow" in text and "clock of rank 3" in text, "slow rank others wait for")
    rows = {line.split()[0]: line for line in text.splitlines() if line[:1].isdigit()}
    assert sorted(rows) == ["0", "1", "2", "3", "4"]
    assert "slow" in rows["3"] and "slow" not in rows["2"] + rows["4"] and "clock of" not in rows["3"]
    (job.run / "STOP").touch()
    text = screen.until(lambda text: "ended with" in text, "end")
    assert "stopped" in text and "ended with 0" in text
    assert job.wait().returncode == 0, job.said()


def test_top_without_a_terminal_shows_it_once(launch):
    job = launch(2, "train", *given("data.images=500", "train.epochs=1"))
    shown = subprocess.run([*TOP, job.run], capture_output=True, text=True, timeout=60, check=True)
    assert "done" in shown.stdout and "worker" in shown.stdout and "\x1b" not in shown.stdout


def test_top_shows_spares(tmp_path):
    run = {"name": "epoch 1", "share": 0.5, "loss": 1.0, "accuracy": 0.5, "images_per_second": 9.0, "staleness": 0.0}
    run["metrics"] = ["loss", "accuracy"]
    status = {"time": 0.0, "seconds": 1.0, "interval": 2.0, "run": run, "ranks": []}
    some = {"spares": {"ready": 2, "coming": 1}}
    shown = [live_view.view(tmp_path, status | more).renderables[0].plain for more in ({}, some)]
    assert "stand by" not in shown[0] and shown[1].endswith("spares: 2 stand by, 1 are starting")


def test_top_of_nothing(tmp_path):
    shown = subprocess.run([*TOP, tmp_path], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 2 and "no run directory" in shown.stderr


def test_elsewhere_it_is_quiet(launch):
    """No control codes in a file."""
    job = launch(2, "train", *given("data.images=500", "train.epochs=1"))
    assert "\x1b" not in job.stdout + job.stderr and "epoch 1/1 train  100%" in job.stdout
