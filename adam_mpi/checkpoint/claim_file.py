"""The files `owner/N.json` in which jobs claim a run directory, each made exactly once, on NFS too."""

import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from adam_mpi.base.errors import UserError

FOLDER = "owner"
SUPERVISOR = "ADAM_MPI_SUPERVISOR"
"""Variable by which a supervisor names itself."""
ATTEMPT = "ADAM_MPI_ATTEMPT"
"""Variable in which a supervisor counts the jobs that it starts one after the other."""
TRIES = 100
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Process(NamedTuple):
    """A process; one that gets the same pid later has another `started`."""

    machine: str
    """Boot and pid namespace; empty where the system does not name them."""
    pid: int
    started: str


@dataclass(frozen=True)
class Record:
    """What a claim says about its job."""

    token: str
    host: str = ""
    pid: int = 0
    since: float = 0.0
    job: str = ""
    """Name of the Slurm cluster and the job's id there."""
    restart: int = 0
    """How often Slurm has restarted the same job."""
    supervisor: str = ""
    attempt: int = 0
    processes: tuple[Process, ...] = ()
    """All processes of a job on one machine; empty for a job on several, whose processes no single node can check."""
    released: bool = False

    def __str__(self) -> str:
        job = f", Slurm job {self.job.rpartition('/')[2]}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {time.strftime('%F %T', time.localtime(self.since))}"


@dataclass(frozen=True)
class Claim:
    """A claim that was found."""

    number: int
    record: Record
    age: float
    """Seconds since it was touched, by the clock of the file system."""
    touched: float = 0.0


def describe_job(processes: Sequence[Process], environment: Mapping[str, str] = os.environ) -> Record:
    """Return the record for a claim file: what the job of these `processes` says about itself."""
    job = environment.get("SLURM_JOB_ID", "")
    one_machine = len({other.machine for other in processes}) == 1 and processes[0].machine
    return Record(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        since=time.time(),
        job=f"{environment.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else "",
        restart=_count(environment.get("SLURM_RESTART_COUNT")),
        supervisor=environment.get(SUPERVISOR, ""),
        attempt=_count(environment.get(ATTEMPT)),
        processes=tuple(processes) if one_machine else (),
    )


def _count(text: str | None) -> int:
    """Return the number in an environment variable of the launcher, for a claim record; 0 without one."""
    return int(text) if text and text.isdecimal() else 0


def find_claim(run: Path, probe: Path | None = None) -> Claim | None:
    """Return the newest claim file of `run` or None; `probe`: a file beside it that may be touched to ask the clock."""
    folder = run / FOLDER
    for _ in range(TRIES):
        number = claim_numbers(folder)[-1]
        if not number:
            return None
        try:
            path = folder / f"{number}.json"
            touched = _touched(path)
            return Claim(number, read_record(path), _file_system_time(probe) - touched, touched)
        except FileNotFoundError:
            # A newer claim has replaced it.
            continue
    raise UserError(f"{folder}: claims change all the time; give another run directory with --run DIR")


def claim_numbers(folder: Path) -> list[int]:
    """Return 0 and the numbers of all claim files in `folder`, in order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return [0]
    numbers = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return [0, *sorted(int(number) for number in numbers if number.isdecimal())]


def read_record(path: Path) -> Record:
    """Return the job record in the claim file `path`; one that cannot be parsed is that of an unknown job."""
    text = path.read_text()
    try:
        content: dict[str, Any] = json.loads(text)
        return Record(**content | {"processes": tuple(Process(*other) for other in content["processes"])})
    except (ValueError, KeyError, TypeError):
        return Record("", "a host that is not known")


def write_record(path: Path, record: Record) -> Path:
    """Write the job `record` to the claim file `path` and return `path`."""
    path.write_text(json.dumps(asdict(record)))
    return path


def make_once(part: Path, path: Path) -> bool:
    """Give the content of `part` the name `path` of a claim file; return False where `path` exists already."""
    try:
        os.link(part, path)
        return True
    except FileExistsError:
        # Over NFS the answer to a link that was made may be lost, and the second try fails.
        return path.exists() and path.samefile(part)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    try:
        with path.open("x") as file:
            file.write(part.read_text())
        return True
    except FileExistsError:
        return False


def remove_claims_before(path: Path, number: int) -> None:
    """Remove the claim files beside `path` with smaller numbers; a job that has one of them finds it gone."""
    for other in claim_numbers(path.parent)[1:]:
        if other < number:
            path.with_name(f"{other}.json").unlink(missing_ok=True)


def _touched(path: Path) -> float:
    """Return when the claim file `path` was touched; asked of the open file, as NFS caches other answers."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def _file_system_time(probe: Path | None) -> float:
    """Return the time by the file system's clock, which may differ from ours; `probe` is touched for that."""
    if probe is None:
        return time.time()
    os.utime(probe)
    return _touched(probe)


def this_process() -> Process:
    """Return this process as a claim record lists it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers on one machine have pids of their own.
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return Process("", os.getpid(), "")
    return Process(machine, os.getpid(), start_time(os.getpid()))


def may_be_alive(other: Process) -> bool:
    """Return whether `other`, a process of a claim record, may be alive; always True on another machine."""
    if not other.machine or other.machine != this_process().machine:
        return True
    return start_time(other.pid) == other.started


def start_time(pid: int) -> str:
    """Return when the process `pid` of a claim was started, in the kernel's count; an empty text if it has ended."""
    try:
        # The name, in parentheses, may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
