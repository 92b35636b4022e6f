"""Test hosts: they hear each other unless they are cut off, a job runs on all of them, and nothing is left behind."""

import subprocess

import pytest
from launch import ROOT, given, spread

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
