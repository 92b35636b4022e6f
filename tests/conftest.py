"""How every test runs: which are chosen, how outcomes are recorded, how a hang ends, and the fixtures they share.

Tests marked `mpi` run on every rank of an mpirun (pytest --with-mpi), and only they do. All others run without one;
those that need a whole job start it themselves through the fixture `launch`, once for each MPI there is.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from launch import NO_JOBS, Hosts, Job, Mpi, available, start

IN_TURN = (
    "test_cli",
    "test_clicks",
    "test_data_jobs",
    "test_factors",
    "test_resume",
    "test_timeline",
    "test_live_view",
    "test_metrics",
    "test_report",
    "test_diagnostics",
    "test_inference",
)
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)

# All ranks must draw the same examples, and a slow machine is no failure.
hypothesis.settings.register_profile("same everywhere", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("same everywhere")
hypothesis.settings.register_profile("fast", hypothesis.settings.get_profile("same everywhere"), max_examples=20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")
    parser.addoption("--fast", action="store_true", help="leave out tests that start jobs or are marked `slow`")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("with_mpi"):
        # After a failure on one rank the others may wait for it for ever: the first failure ends the job.
        config.option.maxfail = 1
    else:
        # Whoever ends the tests from outside wants the jobs that they have started to end too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if config.getoption("fast"):
        hypothesis.settings.load_profile("fast")
        os.environ[NO_JOBS] = "yes"


def its_turn(item: pytest.Item) -> bool:
    """Whole jobs of these modules run on one MPI each, in turn: both are seen, in half the time."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if item.module.__name__ not in IN_TURN or "mpi" not in parameters:
        return True
    names = [mpi.name for mpi in available()]
    others = item.nodeid.replace(parameters["mpi"], "")
    return parameters["mpi"] not in names or names[zlib.crc32(others.encode()) % len(names)] == parameters["mpi"]


def is_fast(item: pytest.Item) -> bool:
    """Whether a test starts no job and is not marked `slow`."""
    return "slow" not in item.keywords and not {"mpi", "hosts"} & set(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def wanted(item: pytest.Item) -> bool:
        in_its_place = ("mpi" in item.keywords) == config.getoption("with_mpi")
        if config.getoption("fast") and not is_fast(item):
            return False
        return in_its_place and (config.getoption("full") or ("full" not in item.keywords and its_turn(item)))

    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = [item for item in items if wanted(item)]
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The modules with the most whole jobs first: who is done early finds something short.
        jobs = Counter(item.module for item in items if "start_job" in getattr(item, "fixturenames", ()))
        items.sort(key=lambda item: -jobs[item.module])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # Under mpirun, having nothing to do must not look like a dead rank.
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.pluginmanager.getplugin("session")
    if config.getoption("with_mpi") and session is not None and session.testsfailed:
        from mpi4py import MPI

        sys.stdout.flush()
        MPI.COMM_WORLD.Abort(1)


def record(word: str, test: str) -> None:
    """Leaves a line for scripts/test, at once, so that it is there whatever happens next."""
    if folder := os.environ.get("ADAM_MPI_TEST_RESULTS"):
        with Path(folder, f"rank-{RANK}.results").open("a") as file:
            file.write(f"{word} {test}\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    record("begin", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        record(report.outcome, report.nodeid)


def pytest_timeout_set_timer(item: pytest.Item, settings) -> bool | None:
    """Under MPI a hanging rank is inside C, where no exception reaches it: name it, show where it is, end it."""
    if not item.config.getoption("with_mpi"):
        return None

    def end() -> None:
        item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
        where = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident])[-4:])
        print(f"\nrank {RANK} did not end {item.nodeid} in {settings.timeout:g} s; it is here:\n{where}", flush=True)
        time.sleep(1)  # the exit ends the other ranks, which have the same to say
        os._exit(1)

    timer = threading.Timer(settings.timeout, end)
    timer.daemon = True
    timer.start()
    item.cancel_timeout = timer.cancel
    return True


@pytest.fixture(params=[mpi.name for mpi in available()])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI there is, in turn."""
    found = [mpi for mpi in available() if mpi.name == request.param]
    if not found:
        pytest.skip(f"there is no {request.param} here")
    return found[0]


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    """Three test hosts; `environment=hosts.environment` starts a job on them.

    By `indirect` they have options of `scripts/hosts up`, such as ("--delay", "1ms").
    """
    if os.getuid() or shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("test hosts need root and iproute2")
    made = Hosts(tmp_path / "hosts")
    try:
        made.call("up", 3, *getattr(request, "param", ()))
    except subprocess.CalledProcessError as error:
        if "neither netem nor" not in error.stderr:
            raise
        pytest.skip(error.stderr.strip())
    yield made
    made.call("down")


@pytest.fixture
def start_job(mpi: Mpi, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts `mpirun -n RANKS python -m adam_mpi ARGUMENTS` in tmp_path and leaves it running: see launch.start."""
    jobs: list[Job] = []

    def call(ranks: int, *arguments: object, **options) -> Job:
        jobs.append(start(mpi, ranks, *arguments, folder=tmp_path / f"job-{len(jobs)}", **options))
        return jobs[-1]

    yield call
    for job in jobs:
        job.end()
        shutil.rmtree(job.temporary, ignore_errors=True)


@pytest.fixture
def launch(start_job: Callable[..., Job]) -> Callable[..., Job]:
    """The same, and waits for its end."""

    def call(ranks: int, *arguments: object, timeout: float = 100, **options) -> Job:
        return start_job(ranks, *arguments, **options).wait(timeout)

    return call
