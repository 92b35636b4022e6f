"""The report of why a job ends: made once, on stderr, in the failure file and in the summary."""

import json
import os
import threading

import pytest

from adam_mpi.cluster import report_once


@pytest.fixture
def failure_file(tmp_path):
    (tmp_path / "log").mkdir()
    return tmp_path / "log" / "failure.txt"


def test_a_report_is_complete_when_the_file_has_content(failure_file):
    assert not report_once.wait_for_report(failure_file, 0.0)
    failure_file.touch()
    assert not report_once.wait_for_report(failure_file, 0.02)
    failure_file.write_text("the cause")
    assert report_once.wait_for_report(failure_file, 0.0)


def test_a_run_directory_that_hangs_does_not_prevent_the_report(failure_file, capsys, monkeypatch):
    monkeypatch.setattr(report_once, "REPORT_SECONDS", 0.1)
    go = threading.Event()
    before = set(threading.enumerate())

    def hang(*arguments):
        go.wait()
        raise OSError

    monkeypatch.setattr(report_once.Path, "open", hang)
    report_once.report_failure(failure_file, "the cause")
    assert capsys.readouterr().err == "adam_mpi: the cause\n"
    monkeypatch.undo()
    go.set()
    # It prints too, which must not be among what the next test prints.
    (reporting,) = set(threading.enumerate()) - before
    reporting.join(10)
    assert not reporting.is_alive()


def test_only_the_first_report_counts(failure_file, capsys):
    report_once.report_failure(failure_file, "the cause")
    report_once.report_failure(failure_file, "a consequence", "interrupted")
    assert failure_file.read_text() == "the cause\n"
    assert capsys.readouterr().err == "adam_mpi: the cause\n"


def test_a_second_report_waits_for_the_first(failure_file):
    """The second process ends the job next: under MPICH a message that was not read by then was lost."""
    failure_file.touch()
    second = threading.Thread(target=report_once.report_failure, args=(failure_file, "a consequence"))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    failure_file.write_text("the cause\n")
    second.join(10)
    assert not second.is_alive() and failure_file.read_text() == "the cause\n"


def test_a_second_report_is_made_if_the_first_is_not(failure_file, capsys, monkeypatch):
    monkeypatch.setattr(report_once, "PRINT_SECONDS", 0.01)
    failure_file.touch()
    report_once.report_failure(failure_file, "a consequence")
    assert "a consequence" in capsys.readouterr().err and failure_file.read_text() == "a consequence\n"


def test_a_pipe_is_read_when_the_launcher_has_emptied_it():
    reader, writer = os.pipe()
    os.write(writer, b"the cause\n")
    assert not report_once.wait_until_read(writer, 0.0)
    os.read(reader, 100)
    assert report_once.wait_until_read(writer, 0.0)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("before", [None, {"status": "running", "epochs": 3}])
def test_a_report_is_added_to_the_summary(failure_file, before):
    summary = failure_file.parent.parent / "summary.json"
    if before:
        summary.write_text(json.dumps(before))
    report_once.report_failure(failure_file, "by hand", "interrupted")
    noted = {"status": "interrupted", "failure": "by hand", "exit_code": 1}
    assert json.loads(summary.read_text()) == (before or {}) | noted


def test_the_exit_code_is_that_of_the_first_report(failure_file):
    assert report_once.reported_exit_code(failure_file) == 1
    report_once.report_failure(failure_file, "not a number", exit_code=2)
    report_once.report_failure(failure_file, "a consequence", exit_code=1)
    assert report_once.reported_exit_code(failure_file) == 2


def test_a_missing_run_directory_does_not_prevent_the_report(tmp_path, capsys):
    report_once.report_failure(tmp_path / "gone" / "log" / "failure.txt", "the cause")
    assert capsys.readouterr().err == "adam_mpi: the cause\n"
