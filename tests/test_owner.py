"""A run directory has one owner at a time, whatever file system it is on."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest

from adam_mpi.base.errors import LostRun, UserError
from adam_mpi.checkpoint import claim_file, owner
from adam_mpi.checkpoint.claim_file import ATTEMPT, SUPERVISOR, Claim, Process, Record, may_be_alive, start_time
from adam_mpi.cluster import report_once

ALIVE = owner.this_process()
GONE = Process(ALIVE.machine, 1, "some other start")
FAR = Process("another machine", 1, "5")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Without a supervisor, and with a short interval of heartbeats."""
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.01)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", SUPERVISOR, ATTEMPT):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def silent(claim, seconds):
    """Make `claim` look as if it had not been touched for `seconds`."""
    status = claim.path.stat()
    os.utime(claim.path, (status.st_atime - seconds, status.st_mtime - seconds))


def test_a_second_job_is_refused_with_the_owner_and_what_to_do(tmp_path):
    first, _ = owner.claim_run(tmp_path, [ALIVE])
    refusal = rf"in use by another job: process {os.getpid()} on \S+, since .*, last heard of 0 s ago; .*--take-over"
    with pytest.raises(UserError, match=refusal):
        owner.claim_run(tmp_path, [ALIVE])
    first.check()
    assert owner.running(tmp_path) is not None
    assert [path.name for path in (tmp_path / "owner").iterdir()] == ["1.json"]


def test_what_is_released_is_free(tmp_path):
    first, _ = owner.claim_run(tmp_path, [ALIVE])
    first.release()
    assert owner.running(tmp_path) is None
    second, note = owner.claim_run(tmp_path, [ALIVE])
    assert note == "" and second.number > first.number
    second.check()
    with pytest.raises(LostRun, match="this job ends"):
        first.check()
    # It is no longer the first job's to release.
    first.release()
    second.check()


def test_a_silent_owner_is_taken_over_after_the_stated_time_by_the_clock_of_the_file_system(tmp_path, environment):
    first, _ = owner.claim_run(tmp_path, [ALIVE])
    silent(first, owner.STALE_SECONDS - 10)
    environment.setattr(owner.time, "time", lambda: 1e12)  # our own clock is wrong
    with pytest.raises(UserError, match="last heard of 50 s ago"):
        owner.claim_run(tmp_path, [ALIVE])
    silent(first, 20)
    second, note = owner.claim_run(tmp_path, [ALIVE])
    assert "silent for 70 s" in note
    with pytest.raises(LostRun):
        first.check()
    second.check()


def test_it_can_be_taken_by_force(tmp_path):
    first, _ = owner.claim_run(tmp_path, [ALIVE, FAR])
    second, note = owner.claim_run(tmp_path, [ALIVE], by_force=True)
    assert note.startswith(f"taken over from process {os.getpid()}")
    with pytest.raises(LostRun, match=f"has been taken by process {os.getpid()}"):
        first.check()
    second.check()


@pytest.mark.parametrize(
    ("processes", "free"),
    [((GONE, GONE), True), ((GONE, ALIVE), False), ((GONE, FAR), False), ((FAR,), False), ((), False)],
)
def test_a_job_whose_processes_are_all_gone_is_taken_over_at_once(tmp_path, processes, free):
    first, _ = owner.claim_run(tmp_path, processes)
    first.heartbeat()
    if free:
        owner.claim_run(tmp_path, [ALIVE])
    else:
        # Of processes on other machines only the heartbeat shows that they live.
        with pytest.raises(UserError, match="in use"):
            owner.claim_run(tmp_path, [ALIVE])
    first.release()


def test_a_silent_owner_on_another_machine_is_waited_for_and_taken_over(tmp_path, environment, capsys):
    environment.setattr(owner, "STALE_SECONDS", 0.5)
    environment.setattr(owner, "NOTICE_SECONDS", 0.1)
    first, _ = owner.claim_run(tmp_path, [ALIVE, FAR])
    second, note = owner.claim_run(tmp_path, [ALIVE])
    assert "which has been silent for" in note
    assert "has it and is silent; it is taken over after 0.5 s" in capsys.readouterr().err
    second.check()
    with pytest.raises(LostRun):
        first.check()


def test_a_process_that_has_ended_is_gone_even_before_its_parent_waits_for_it(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = Process(ALIVE.machine, child.pid, start_time(child.pid))
    assert may_be_alive(known) and known.started
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not may_be_alive(known)
    child.wait()
    assert not may_be_alive(known)


@pytest.mark.parametrize(
    ("before", "now", "free"),
    [
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_CLUSTER_NAME": "b"}, False),
        ({SUPERVISOR: "a", ATTEMPT: "1"}, {SUPERVISOR: "a", ATTEMPT: "2"}, True),
        ({SUPERVISOR: "a", ATTEMPT: "1"}, {SUPERVISOR: "a", ATTEMPT: "1"}, False),
        ({SUPERVISOR: "a", ATTEMPT: "1"}, {SUPERVISOR: "b", ATTEMPT: "2"}, False),
    ],
)
def test_a_job_that_is_restarted_takes_over_at_once(before, now, free):
    first = claim_file.describe_job([ALIVE], before)
    found = Claim(1, first, 0.0)
    assert (owner.may_take(found, claim_file.describe_job([ALIVE], now), False) == "") == free


def test_of_many_jobs_at_once_one_gets_the_run(tmp_path):
    """Twice: the run is free, and it has a silent owner."""
    for turn in range(2):
        ready, won, lost = threading.Barrier(8), [], []

        def come(ready=ready, won=won, lost=lost):
            ready.wait(20)
            try:
                won.append(owner.claim_run(tmp_path, [ALIVE])[0])
            except UserError:
                lost.append(1)

        threads = [threading.Thread(target=come) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert (len(won), len(lost)) == (1, 7), turn
        won[0].check()
        silent(won[0], 100)


def test_a_slow_job_does_not_use_an_old_number(tmp_path, environment):
    """It has seen claim 1; meanwhile that is taken over, released, and taken again."""
    first, _ = owner.claim_run(tmp_path, [GONE])
    find = owner.find_claim
    others = []

    def slow(run, probe=None):
        found = find(run, probe)
        if not others:
            others.append(first)
            owner.claim_run(tmp_path, [ALIVE])[0].release()
            others.append(owner.claim_run(tmp_path, [ALIVE])[0])
        return found

    environment.setattr(owner, "find_claim", slow)
    with pytest.raises(UserError, match="in use"):
        owner.claim_run(tmp_path, [ALIVE])
    others[1].check()
    assert [path.name for path in (tmp_path / "owner").iterdir()] == [others[1].path.name]


def test_without_links_and_with_a_lost_answer_it_works_as_well(tmp_path, environment):
    link = os.link

    def lost_answer(source, target):
        link(source, target)
        raise FileExistsError

    environment.setattr(owner.os, "link", lost_answer)
    owner.claim_run(tmp_path / "nfs", [ALIVE])[0].check()

    def none(source, target):
        raise OSError(errno.EPERM, "no links here")

    environment.setattr(owner.os, "link", none)
    owner.claim_run(tmp_path / "fat", [ALIVE])[0].check()
    with pytest.raises(UserError, match="in use"):
        owner.claim_run(tmp_path / "fat", [ALIVE])


def test_a_claim_that_cannot_be_parsed_counts_until_it_is_stale(tmp_path, environment):
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "3.json").write_text('{"token": ')
    environment.setattr(owner, "STALE_SECONDS", 0.2)
    second, note = owner.claim_run(tmp_path, [ALIVE])
    assert second.number == 4 and "a host that is not known, since" in note and "silent for" in note


def test_a_claim_has_the_current_processes_of_its_job(tmp_path):
    """After a loss: the first process is gone, the others continue."""
    first, _ = owner.claim_run(tmp_path, [GONE])
    first.update_processes([GONE, ALIVE])
    with pytest.raises(UserError, match="in use"):
        owner.claim_run(tmp_path, [ALIVE])
    first.check()
    second, _ = owner.claim_run(tmp_path, [ALIVE], by_force=True)
    with pytest.raises(LostRun):
        first.update_processes([ALIVE])
    second.check()


def test_the_heartbeat_touches_the_claim_and_notices_that_it_is_lost(tmp_path, environment):
    first, _ = owner.claim_run(tmp_path, [ALIVE, FAR])
    silent(first, 30)
    before = first.path.stat().st_mtime
    heart = first.heartbeat()
    assert first.heartbeat() is heart
    until(lambda: first.path.stat().st_mtime > before + 20, "a touch")
    heart.raise_if_lost()
    second, _ = owner.claim_run(tmp_path, [ALIVE], by_force=True)
    heart.thread.join(20)
    with pytest.raises(LostRun, match="has been taken by process"):
        heart.raise_if_lost()
    second.release()
    first.release()


def test_a_file_system_that_hangs_stops_the_heartbeat_only(tmp_path, environment):
    first, _ = owner.claim_run(tmp_path, [ALIVE])
    inside, back = threading.Event(), threading.Event()

    def hang(path):
        inside.set()
        back.wait(60)

    environment.setattr(owner.os, "utime", hang)
    heart = first.heartbeat()
    assert inside.wait(20)
    heart.raise_if_lost()
    back.set()
    first.release()


def test_errors_of_the_file_system_take_the_run_from_no_job(tmp_path, environment):
    first, _ = owner.claim_run(tmp_path, [ALIVE])

    def fail(folder):
        raise OSError(errno.EIO, "input/output error")

    with environment.context() as patch:
        patch.setattr(owner.os, "listdir", fail)
        first.check()
    first.check()
    first.path.unlink()
    with pytest.raises(LostRun):
        first.check()
    first.path.parent.rmdir()
    first.check()


def test_a_job_that_has_lost_the_run_leaves_no_failure_in_it(tmp_path, environment, capsys):
    first, _ = owner.claim_run(tmp_path, [ALIVE])
    environment.setenv(report_once.OWNER_FILE, str(first.path))
    second, _ = owner.claim_run(tmp_path, [ALIVE], by_force=True)
    report_once.report_failure(tmp_path / "failure.txt", "rank 1 died")
    assert "rank 1 died" in capsys.readouterr().err and not (tmp_path / "failure.txt").exists()
    environment.setenv(report_once.OWNER_FILE, str(second.path))
    report_once.report_failure(tmp_path / "failure.txt", "rank 1 died")
    assert (tmp_path / "failure.txt").read_text() == "rank 1 died\n"


def test_a_record_goes_through_a_file(tmp_path):
    job = {"job": "c/7", "restart": 2, "supervisor": "s", "attempt": 4}
    record = Record(token="t", host="h", pid=3, since=1.5, processes=(ALIVE, FAR), **job)
    assert claim_file.read_record(claim_file.write_record(tmp_path / "r.json", record)) == record
    assert json.loads((tmp_path / "r.json").read_text())["job"] == "c/7" and "Slurm job 7" in str(record)


def until(happened, what, seconds=20.0):
    limit = owner.time.monotonic() + seconds
    while not happened():
        assert owner.time.monotonic() < limit, f"no {what} in {seconds:g} s"
        owner.time.sleep(0.002)
