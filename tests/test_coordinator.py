"""The parts of a coordinator, without a job around them: what it hands over, reports and writes at the end."""

import json
import threading
import types
from dataclasses import replace

import pytest

from adam_mpi.base.errors import LostRun, LostState, UserError
from adam_mpi.config import load
from adam_mpi.monitor.status_writer import StatusWriter
from adam_mpi.runtime import job, job_report
from adam_mpi.runtime.completion import Completion
from adam_mpi.runtime.job import CoordinatorResources, CoordinatorState, JobRecord
from adam_mpi.runtime.job_report import JobReport
from adam_mpi.runtime.recovery_log import Recovery, RecoveryLog
from adam_mpi.sharding.training_state import Phase


def state(**changes):
    values = {
        "number": 5,
        "phase": Phase(3, "train", 2),
        "phase_started_at": 1090.0,
        "best": 0.5,
        "best_epoch": 1,
        "reason": "epochs",
        "results": {"epochs": 1, "images": 640, "images_skipped": 0, "train_loss": 0.25},
        "train_seconds": 2.0,
        "started_at": 1000.0,
        "stopped_by": "",
        "stale": True,
        "snapshots": ["epoch-0001"],
        "recoveries": [],
        "pushes": {"3": [7, 6]},
        "carried": {"3": 0.5},
        "spares_started": [{"seconds": 1.0, "cpu": 0.5}],
        "refusal_reported": False,
        "snapshot_times": {"epoch-0001": 1050.0},
        "good_snapshots": ["epoch-0001"],
        "divergences": [],
        "detector": {"best": 0.25},
        "plateau": {"best": 0.5, "bad_epochs": 1, "scale": 0.3},
    }
    return CoordinatorState(**(values | changes))


@pytest.mark.parametrize("phase", [Phase(3, "train", 2), None], ids=str)
def test_the_state_of_a_coordinator_goes_through_json(phase):
    before = state(phase=phase)
    assert CoordinatorState.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_the_record_of_a_job_continues_with_the_next_coordinator():
    record = JobRecord.start(None)
    record.continue_from(state(stopped_by="the file STOP"))
    figures = {"images": 320, "images_skipped": 2, "loss": 0.125, "accuracy": 0.75}
    record.end_phase(Phase(4, "train", 2), figures, seconds=1.0)
    record.end_phase(Phase(5, "validation", 2), figures, seconds=9.0)
    assert record.results == {
        "epochs": 2,
        "images": 960,
        "images_skipped": 2,
        "train_loss": 0.125,
        "validation_accuracy": 0.75,
        "validation_loss": 0.125,
    }
    assert record.images_per_second == 320 and record.stopped_by == "the file STOP"


@pytest.mark.parametrize(("part", "counted"), [("train", 13.0), ("validation", 3.0)])
def test_an_epoch_counts_the_seconds_of_all_generations_whose_images_it_counts(part, counted, monkeypatch):
    """Other phases begin again after a loss, and so do their seconds."""
    clock = types.SimpleNamespace(now=500.0)
    monkeypatch.setattr(job.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(job.time, "time", lambda: clock.now + 600.0)
    record = replace(JobRecord.start(None), phase_began=clock.now)
    record.continue_from(state(phase=Phase(3, part, 2)))
    clock.now += 3
    assert record.phase_seconds == counted and record.phase_started_at == 1103.0 - counted
    figures = {"images": 320, "images_skipped": 0, "loss": 0.125, "accuracy": 0.75}
    record.end_phase(Phase(4, part, 2), figures, record.phase_seconds)
    assert record.phase_seconds == 0


def recovery(**changes):
    return Recovery(**({"generation": 1, "dead": [], "members": [], "detected": 10.0} | changes))


def test_a_recovery_that_the_next_loss_interrupted_lasts_until_pushes_are_applied_again():
    losses = [recovery(seconds=0.2), recovery(generation=2, detected=12.0)]
    report = {"generation": 2, "rebuilt": 1, "dropped": 4, "resumed_at": [12.5, None]}
    recoveries = RecoveryLog(2, types.SimpleNamespace(of_role=lambda role: [report]), losses)
    first, last = recoveries.current()
    assert first == losses[0]
    assert last == recovery(generation=2, detected=12.0, seconds=0.5, rebuilt=1, duplicates=4)
    report["resumed_at"] = [12.5, 13.0]
    assert [loss["seconds_all"] for loss in recoveries.to_json()] == [3.0, 1.0]


def test_a_recovery_is_in_progress_until_a_push_is_applied():
    reports = []
    recoveries = RecoveryLog(2, types.SimpleNamespace(of_role=lambda role: reports))
    assert not recoveries.in_progress
    recoveries.recoveries.append(recovery(generation=2))
    assert recoveries.in_progress
    reports.append({"generation": 2, "rebuilt": 0, "dropped": 0, "resumed_at": [10.5, None]})
    assert not recoveries.in_progress


@pytest.fixture
def report(tmp_path):
    """A report of a job in `tmp_path` whose rank 0 has all roles."""
    places = [types.SimpleNamespace(member=1), types.SimpleNamespace(member=2)]
    layout = types.SimpleNamespace(places=places, workers=[0], servers=[1])
    world = types.SimpleNamespace(config=load(None), layout=layout, hosts=["a"], generation=0)
    (tmp_path / "log").mkdir()
    job = types.SimpleNamespace(directory=tmp_path, failure_file=tmp_path / "log" / "failure.txt", resume=None)
    return JobReport(
        world=world,
        job=job,
        data=None,
        schedule=None,
        record=JobRecord.start(None),
        recoveries=None,
        spares=None,
        snapshots=None,
        statistics=types.SimpleNamespace(count_finals=lambda role, members: 1),
        progress=types.SimpleNamespace(name=lambda phase: "epoch 1/1 train"),
        status_writer=StatusWriter(tmp_path),
        metrics=None,
    )


def test_a_disk_that_hangs_does_not_keep_a_job_from_ending_that_has_diverged(report, monkeypatch):
    hanging = threading.Event()
    back = threading.Event()
    written = []
    monkeypatch.setattr(job_report, "DISK_SECONDS", 0.01)
    monkeypatch.setattr(report, "summary", lambda status: {})
    monkeypatch.setattr(
        report, "write_summary", lambda summary: hanging.set() or back.wait(20) or written.append(summary)
    )
    with pytest.raises(UserError, match="training has diverged"):
        report.end_diverged("training has diverged")
    assert hanging.wait(20) and written == []
    back.set()


@pytest.fixture
def completion(report):
    checkpoints = types.SimpleNamespace(owner=types.SimpleNamespace(check=lambda: None), finished=lambda: True)
    resources = CoordinatorResources(report.statistics, report.status_writer, None, None)
    return Completion(None, report, checkpoints, resources)


def test_a_job_that_loses_the_run_while_it_writes_its_weights_leaves_no_marker(completion, tmp_path):
    """Writing them may take longer than an owner may be silent."""
    lost = []

    def check():
        if lost:
            raise LostRun("has been taken by another job")

    completion.checkpoints.owner.check = check
    completion.checkpoints.write_weights = lambda: lost.append(True)
    with pytest.raises(LostRun):
        completion.write_results({})
    assert lost and not (tmp_path / "DONE").exists()


def test_the_marker_says_how_the_job_ended(completion, tmp_path):
    completion.checkpoints.write_weights = lambda: (tmp_path / "weights.h5").touch()
    completion.report.record.stopped_by = "the file STOP"
    completion.write_results({"status": "stopped"})
    assert (tmp_path / "STOPPED").read_text() == "the file STOP\n" and not (tmp_path / "weights.h5").exists()
    completion.report.record.stopped_by = ""
    completion.write_results({"status": "done"})
    assert (tmp_path / "DONE").exists() and (tmp_path / "weights.h5").exists()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "done"}


def test_a_job_whose_weights_lack_acknowledged_pushes_does_not_end_as_done(completion, tmp_path):
    completion.report.statistics.short = lambda members, pushers: {"2": 3}
    completion.servers_finishing = True
    with pytest.raises(LostState, match="acknowledged pushes are not in all weights: 3 of rank 2; the job is not done"):
        completion.step()
    assert completion.resources.results_task is None and not (tmp_path / "DONE").exists()
