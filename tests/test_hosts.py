"""Test hosts: they hear each other unless they are cut off, a job runs on all of them, and nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from launch import ROOT, clean_environment, given, spread

REACH = "import socket, sys; socket.create_connection((sys.argv[1], 7), 1).close()"
ANSWER = """
import socket
listener = socket.create_server(("", 7))
print(socket.gethostname(), flush=True)
while True:
    listener.accept()[0].close()
"""


@pytest.fixture
def hears(hosts):
    """Whether a host hears h2."""
    with subprocess.Popen(hosts.command("exec", "h2", "python3", "-c", ANSWER), stdout=subprocess.PIPE) as answering:
        assert answering.stdout.readline() == b"h2\n"
        yield lambda host: _reaches(hosts, host)
        answering.kill()


def _reaches(hosts, host):
    try:
        return hosts.call("exec", host, "python3", "-c", REACH, "h2") == ""
    except subprocess.CalledProcessError as error:
        assert "TimeoutError" in error.stderr or "No route" in error.stderr
        return False


def test_a_cut_is_between_two_hosts_only(hosts, hears):
    assert hears("h0") and hears("h1")
    hosts.call("cut", "h1", "h2")
    assert hears("h0") and not hears("h1")
    hosts.call("mend")
    assert hears("h0") and hears("h1")


def namespaces(name):
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0].removeprefix(f"{name}-") for line in listed.splitlines() if line.startswith(name)}


def test_hosts_of_two_runs_are_apart_and_none_stays(hosts):
    name = (hosts.folder / "name").read_text().strip()
    look = 'ip netns; cat "$ADAM_MPI_HOSTS/name"; exit 7'
    other = subprocess.run(
        [ROOT / "scripts" / "hosts", "run", "2", "sh", "-c", look], capture_output=True, text=True, check=False
    )
    assert other.returncode == 7, other.stderr
    *listed, its = other.stdout.splitlines()
    assert {f"{its}-{host}" for host in ("h0", "h1", "hub")} <= {line.split()[0] for line in listed}
    assert namespaces(its) == set()
    assert namespaces(name) == {"h0", "h1", "h2", "hub"}


@pytest.mark.parametrize(("ranks", "mpi"), spread([6, 3]), indirect=["mpi"])
def test_a_job_runs_on_three_hosts(ranks, hosts, launch):
    keys = given("data.images=2000", "train.epochs=1", "store.interval=0")
    job = launch(ranks, "train", *keys, environment=hosts.environment)
    assert job.returncode == 0, job.said()
    first = "\n".join(text.partition("\n")[0] for text in job.logs().values())
    assert [first.count(f"on {host}:") for host in ("h0", "h1", "h2")] == [ranks // 3] * 3
    assert job.summary["status"] == "done"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_lost_host_is_named_and_the_job_goes_on_from_its_store(hosts, tmp_path):
    keys = given("data.images=4000", "train.epochs=6", "store.interval=0.5", "observe.interval=0.2")
    command = [ROOT / "scripts" / "train", "-n", "6", "--restarts", "2", "--run", tmp_path / "run", *keys]
    environment = clean_environment() | hosts.environment
    with (tmp_path / "stderr").open("w") as stderr:
        job = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        limit = time.monotonic() + 120
        while not any((tmp_path / "run" / "store").glob("*/server-*.h5")) or not _trains(tmp_path / "run"):
            assert job.poll() is None and time.monotonic() < limit, (tmp_path / "stderr").read_text()
            time.sleep(0.05)
        name = (hosts.folder / "name").read_text().strip()
        for process in subprocess.check_output(["ip", "netns", "pids", f"{name}-h1"], text=True).split():
            os.kill(int(process), signal.SIGKILL)
        assert job.wait(150) == 0
    finally:
        job.kill()
    said = (tmp_path / "stderr").read_text()
    assert re.search(r"adam_mpi: lost with their host: rank \d, \w+ .*on h1; rank \d, \w+ .*on h1\n", said), said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert re.search(r"\d+ acknowledged pushes .* are lost", summary["resumed"]), summary["resumed"]


def _trains(run):
    file = run / "metrics.jsonl"
    return file.exists() and len(file.read_text().splitlines()) > 5
