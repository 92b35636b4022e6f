"""Test hosts: they hear each other unless they are cut off, a job runs on all of them, and nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from launch import ROOT, Hosts, clean_environment, given, spread

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


DELAY, COUNT = 0.05, 100
ECHO = """
import socket
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.bind(("", 7))
print(socket.gethostname(), flush=True)
while True:
    echo.sendto(*echo.recvfrom(9))
"""
TRIPS = f"""
import socket, time
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asking.settimeout(20)
asking.connect(("h2", 7))
for count in (1, 1, {COUNT}):
    began = time.monotonic()
    for number in range(count):
        asking.send(bytes([number]))
    answers = [asking.recv(9)[0] for _ in range(count)]
    print(time.monotonic() - began, answers == sorted(answers))
"""


LATE = ("--delay", f"{DELAY}s")


@pytest.mark.parametrize("hosts", [LATE, (*LATE, "--rate", "1gbit")], indirect=True)
def test_what_hosts_send_is_late_by_the_delay_in_order_and_all_at_once(hosts):
    with subprocess.Popen(hosts.command("exec", "h2", "python3", "-c", ECHO), stdout=subprocess.PIPE) as echoing:
        assert echoing.stdout.readline() == b"h2\n"
        # The first asks for addresses besides.
        _, one, many = hosts.call("exec", "h0", "python3", "-c", TRIPS).splitlines()
        echoing.kill()
    assert float(one.split()[0]) >= 2 * DELAY
    assert many.endswith("True") and 2 * DELAY <= float(many.split()[0]) < COUNT * 2 * DELAY


@pytest.mark.parametrize("delay", ["1", "ms", "1 ms", "-1ms", "1h"])
def test_a_delay_that_makes_no_sense_is_named(delay, tmp_path):
    command = Hosts(tmp_path).command("up", 2, "--delay", delay)
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (1, f"hosts: --delay {delay}: expected a time, as in 1ms\n")


def test_hosts_have_cores_of_their_own(tmp_path):
    hosts, cores = Hosts(tmp_path / "hosts"), os.cpu_count()
    told = subprocess.run(hosts.command("up", 1, "--cores", cores + 1), capture_output=True, text=True, check=False)
    assert told.returncode == 1 and f"--cores {cores + 1}: 1 hosts, but {cores} cores in all" in told.stderr
    if os.getuid() or not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("needs root, and the first two cores of the machine")
    hosts.call("up", 2, "--cores", 1)
    ask = "import os; print(sorted(os.sched_getaffinity(0)))"
    assert [hosts.call("exec", host, "python3", "-c", ask) for host in ("h0", "h1")] == ["[0]\n", "[1]\n"]
    hosts.call("down")
    assert not list(hosts.folder.iterdir())


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
