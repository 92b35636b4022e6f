"""Whole jobs as subprocesses: `mpirun -n N python -m adam_mpi ...` on a chosen MPI, always with an end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent

# The options of mpirun are in scripts/lib.sh, once for everybody.
LAUNCH = '. "$0"; mpi_launch "$1" "$2"; shift 2; exec "${launch[@]}" "$@"'

# What an mpirun around us has set would make a second one believe that it is a rank.
INHERITED = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "HYDI_", "MPIR_")
KEPT = "OMPI_ALLOW_RUN_AS_ROOT"

# What Open MPI says at every start with --with-ft ulfm; no setting of it keeps it back.
UNTESTED = re.compile(r"-{70,}\nWARNING: The selected 'osc' module [^-]*?-failure[^-]*-{70,}\n|.*help-mpi-ft.txt.*\n?")


NO_JOBS = "ADAM_MPI_TEST_NO_JOBS"
"""The variable that `pytest --fast` sets: a test that starts a job nevertheless lacks the mark `slow`, and fails."""


@dataclass(frozen=True)
class Mpi:
    """One MPI: how it is called, its mpirun, and the Python whose mpi4py picks it."""

    name: str
    mpirun: Path
    python: Path


@cache
def available() -> list[Mpi]:
    """The MPIs that scripts/test has found, or else the one beside this Python or on PATH."""
    listed = os.environ.get("ADAM_MPI_TEST_MPIS")
    beside = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return [_describe(Path(path).absolute()) for path in (listed or beside or "").split(":") if path]


def _describe(mpirun: Path) -> Mpi:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    name = "openmpi" if "Open MPI" in version else "mpich" if "HYDRA" in version else mpirun.parent.name
    own = (mpirun.parent.parent / "pyvenv.cfg").exists()
    return Mpi(name, mpirun, mpirun.parent / "python" if own else Path(sys.executable))


def clean_environment() -> dict[str, str]:
    """This process's environment without what an mpirun around it has set."""
    return {key: value for key, value in os.environ.items() if key.startswith(KEPT) or not key.startswith(INHERITED)}


@dataclass(frozen=True)
class Hosts:
    """Test hosts h0, h1, ...: `call("exec", "h1", "hostname")` is `scripts/hosts exec DIR h1 hostname`."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """With it a job is started on them."""
        return {"ADAM_MPI_HOSTS": str(self.folder)}

    def command(self, order: str, *arguments: object) -> list[str]:
        return [str(word) for word in (ROOT / "scripts" / "hosts", order, self.folder, *arguments)]

    def call(self, order: str, *arguments: object) -> str:
        done = subprocess.run(self.command(order, *arguments), check=True, capture_output=True, text=True, timeout=60)
        return done.stdout


@dataclass(frozen=True)
class Freezer:
    """A control group of its own, whose freezer holds what is put into it."""

    group: Path
    file: str
    words: tuple[str, str]

    @classmethod
    def make(cls, version: int = 2) -> "Freezer | None":
        """None where there are no such groups, or none that we may make."""
        root = Path("/sys/fs/cgroup")
        places = (root / "unified", root) if version == 2 else (root / "freezer",)
        file, words = ("cgroup.freeze", ("0", "1")) if version == 2 else ("freezer.state", ("THAWED", "FROZEN"))
        for place in places:
            with suppress(OSError):
                group = Path(tempfile.mkdtemp(prefix="adam-", dir=place))
                if (group / file).exists():
                    return cls(group, file, words)
                group.rmdir()
        return None

    def freeze(self, pid: int) -> None:
        (self.group / "cgroup.procs").write_text(str(pid))
        (self.group / self.file).write_text(self.words[1])

    def close(self) -> None:
        """Lets go what it holds, and waits for its end, which somebody has ordered."""
        (self.group / self.file).write_text(self.words[0])
        limit = time.monotonic() + 20
        while self.group.exists():
            if time.monotonic() > limit:
                pytest.fail(f"{(self.group / 'cgroup.procs').read_text()} did not end in 20 s")
            with suppress(OSError):
                self.group.rmdir()
            time.sleep(0.01)


@dataclass(frozen=True)
class Disk:
    """A file system of 64 MB, in memory, that can be filled. Needs root."""

    folder: Path

    @classmethod
    @contextmanager
    def make(cls, folder: Path) -> "Iterator[Disk]":
        """Raises OSError where it cannot be made."""
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
        done = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise OSError(done.stderr.strip())
        try:
            yield cls(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True, timeout=60)

    @property
    def filling(self) -> Path:
        return self.folder / "filling"

    def fill(self) -> None:
        """Leaves no room for another byte."""
        with self.filling.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def empty(self) -> None:
        self.filling.unlink()


@dataclass
class Job:
    """A started job; after `wait` it has its return code, its seconds and all that it has written."""

    process: subprocess.Popen
    folder: Path
    run: Path
    temporary: str
    """Where mpirun keeps its own files: killed ones leave them behind, under names that a later one may want."""
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        # Open MPI ends its own messages with a zero byte.
        said = UNTESTED.sub("", (self.folder / "stderr").read_text().replace("\0", "\n"))
        return said if said.strip() else ""

    @property
    def summary(self) -> dict | None:
        """The run's summary.json, when it has got that far."""
        file = self.run / "summary.json"
        return json.loads(file.read_text()) if file.exists() else None

    def logs(self) -> dict[str, str]:
        """The log of each rank, by the file's name without its ending."""
        return {file.stem: file.read_text() for file in sorted(self.run.glob("log/rank-*.log"))}

    def wait(self, timeout: float = 100) -> "Job":
        """Until it has ended; a job that does not is ended, and the test fails naming the ranks that hang."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            hanging = [name for name, text in self.logs().items() if not ended(text)]
            self.end()
            names = ", ".join(hanging) or "no rank has a log"
            pytest.fail(f"no end after {timeout} s; not ended: {names}\n{self.said()}", pytrace=False)
        self.seconds = time.monotonic() - self.began
        return self

    def said(self) -> str:
        """All output, for the message of a failed test."""
        return f"stdout:\n{self.stdout}\nstderr:\n{self.stderr}"

    def ranks(self) -> list[psutil.Process]:
        """The running processes of the ranks, in no order; on other hosts they are no children of mpirun."""
        return [process for process in _naming(str(self.run)) if _is_rank(process)]

    def rank(self, number: int) -> psutil.Process:
        """The running process of one rank."""
        for process in self.ranks():
            names = process.environ()
            if int(names.get("OMPI_COMM_WORLD_RANK") or names.get("PMI_RANK") or 0) == number:
                return process
        raise LookupError(f"rank {number} is not running")

    def struck(self) -> dict[int, float]:
        """When each rank was struck by a fault on purpose, in seconds since 1970."""
        line = re.compile(r"^(\S+ \S+) .* injected (?:kill|raise|stop) at", re.M)
        found = {int(name.removeprefix("rank-")): line.search(text) for name, text in self.logs().items()}
        moments = {rank: datetime.fromisoformat(hit[1].replace(",", ".")) for rank, hit in found.items() if hit}
        return {rank: moment.timestamp() for rank, moment in moments.items()}

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl so far."""
        file = self.run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def until(self, happened: Callable[[], object], what: str, timeout: float = 60) -> "Job":
        """Polls until something has happened in the running job; the test fails when it does not."""
        limit = time.monotonic() + timeout
        while not happened():
            if self.process.poll() is not None or time.monotonic() > limit:
                end = "before it ended" if self.process.poll() is not None else f"in {timeout} s"
                pytest.fail(f"the job did not get to {what} {end}\n{self.said()}", pytrace=False)
            time.sleep(0.01)
        return self

    def left_over(self, timeout: float = 5) -> list[str]:
        """Command lines of what still runs for this job after its end: ranks and sentinels name its run directory."""
        limit = time.monotonic() + timeout
        while (left := _naming(str(self.run))) and time.monotonic() < limit:
            time.sleep(0.02)
        return [_command_line(process) for process in left]

    def end(self) -> None:
        """Ends mpirun and whatever it has started (ranks have process groups of their own)."""
        if self.process.poll() is not None:
            return
        family = [*self._family(), *self.ranks()]
        self.process.send_signal(signal.SIGTERM)
        psutil.wait_procs([psutil.Process(self.process.pid), *family], timeout=3)
        for process in family:
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.wait(10)

    def _family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _naming(path: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if path in _command_line(process)]


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "python" in process.name() and "adam_mpi" in process.cmdline()
    except psutil.Error:
        return False


def ended(log: str) -> bool:
    """Whether a rank's log says that it has come to an end, good or bad."""
    return log.endswith("INFO finished\n") or "ERROR the job ends:" in log


def given(*pairs: str) -> list[str]:
    """`--set` for each `section.key=value`."""
    return [word for pair in pairs for word in ("--set", pair)]


def spread(values: Sequence[object]) -> list:
    """Parameters (value, mpi): each value on one MPI in turn, and with --full on the others too."""
    names = [mpi.name for mpi in available()]
    return [
        pytest.param(value, name, marks=[] if turn % len(names) == index else [pytest.mark.full])
        for turn, value in enumerate(values)
        for index, name in enumerate(names)
    ]


def start(
    mpi: Mpi,
    ranks: int,
    *arguments: object,
    folder: Path,
    options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Job:
    """Starts `mpirun -n RANKS OPTIONS python -m adam_mpi ARGUMENTS`, with working directory and output in `folder`.

    A job that trains gets `--run FOLDER/run` unless the arguments have a --run of their own.
    With ADAM_MPI_HOSTS in its environment it runs on those test hosts.
    """
    if NO_JOBS in os.environ:
        pytest.fail("a test that starts a job must be marked `slow`: --fast leaves those out", pytrace=False)
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(argument) for argument in arguments]
    run = folder / "run"
    if "--run" in words:
        run = folder / words[words.index("--run") + 1]
    elif words[:1] == ["train"]:
        words += ["--run", str(run)]
    # Kernels are generated and compiled for each model and batch, half a minute long: only for the default ones here.
    if any(word.startswith(("model.layers", "train.batch")) for word in words):
        words[1:1] = given("kernels.engine=reference")
    program = [*options, mpi.python, "-m", "adam_mpi", *words]
    # Short, because sockets are in there, whose paths have a limit.
    temporary = tempfile.mkdtemp(prefix="adam-")
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            ["bash", "-c", LAUNCH, ROOT / "scripts" / "lib.sh", mpi.mpirun, str(ranks), *program],
            cwd=folder,
            env=clean_environment() | {"TMPDIR": temporary} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    return Job(process, folder, run, temporary)
