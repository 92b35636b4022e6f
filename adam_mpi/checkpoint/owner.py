"""Who has a run directory: one job at a time.

A claim is a file `owner/N.json`. Whoever takes the run makes the file with the next number by `os.link`, which exactly
one can do, on NFS too (`flock` is not to be relied on there). The newest claim is the owner's, who touches it again and
again; an owner that ends makes a last claim, which says that nobody has the run. A job whose claim is no longer the
newest has lost the run and writes nothing more into it.
"""

import errno
import json
import math
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from adam_mpi.base.errors import LostRun, UserError

FOLDER = "owner"
BEAT_SECONDS, STALE_SECONDS = 2.0, 60.0
"""How often an owner shows that it lives, and how long it may be silent before anybody may take the run."""
NOTICE_SECONDS = 2 * BEAT_SECONDS
"""How long whoever takes the run from a living job gives it to find that out."""
SUPERVISOR, ATTEMPT = "ADAM_MPI_SUPERVISOR", "ADAM_MPI_ATTEMPT"
"""Variables by which a supervisor names itself, and counts the jobs that it starts one after the other."""
TRIES, WATCH_SECONDS = 100, 0.1
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Process(NamedTuple):
    """A process that can be looked for from the same machine; a number that is used again has another start."""

    machine: str
    pid: int
    started: str


@dataclass(frozen=True)
class Record:
    """What a claim says of its job."""

    token: str
    host: str = ""
    pid: int = 0
    since: float = 0.0
    job: str = ""
    """Of Slurm, with the name of the cluster; it starts the same job again with a higher count."""
    restart: int = 0
    supervisor: str = ""
    attempt: int = 0
    processes: tuple[Process, ...] = ()
    """Those of a job that is on one machine; of others nobody can tell from one place whether all are gone."""
    released: bool = False

    def __str__(self) -> str:
        job = f", Slurm job {self.job.rpartition('/')[2]}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {time.strftime('%F %T', time.localtime(self.since))}"


@dataclass(frozen=True)
class Claim:
    """A claim that was found: `age` is how long ago it was touched, by the clock of the file system."""

    number: int
    record: Record
    age: float
    touched: float = 0.0


@dataclass(frozen=True)
class Owner:
    """A job's own claim on its run."""

    run: Path
    number: int
    token: str

    @property
    def path(self) -> Path:
        return self.run / FOLDER / f"{self.number}.json"

    def check(self) -> None:
        """Raise LostRun where another job has the run; a file system that does not answer proves nothing."""
        try:
            ours = _numbers(self.path.parent)[-1] == self.number and _read(self.path).token == self.token
        except OSError as error:
            ours = error.errno not in (errno.ENOENT, errno.ESTALE)
        if not ours and self.path.parent.is_dir():
            raise LostRun(f"run directory {self.run} has been taken by {self._successor()}; this job ends")

    def _successor(self) -> str:
        try:
            claim = find(self.run)
        except (OSError, UserError):
            claim = None
        return "another job" if claim is None or claim.record.released else str(claim.record)

    def enter(self, processes: Sequence[Process]) -> None:
        """Tell who the job is now: after a loss others have its processes, and another host may have its head."""
        self.check()
        with suppress(OSError):
            now = replace(_here(processes), token=self.token, since=_read(self.path).since)
            _write(self.path.with_name(f".{self.token}"), now).replace(self.path)

    def release(self) -> None:
        """Leave the run to whoever comes next, unless somebody has it already."""
        if (heart := _hearts.pop(self, None)) is not None:
            heart.over.set()
        with suppress(OSError, LostRun):
            self.check()
            part = _write(self.path.with_name(f".{self.token}"), Record(self.token, released=True))
            _link(part, self.path.with_name(f"{self.number + 1}.json"))
            part.unlink()
            self.path.unlink()

    def beat(self) -> "Heartbeat":
        """The heartbeat of this claim in this process, which begins with the first call."""
        if self not in _hearts:
            _hearts[self] = Heartbeat(self)
        return _hearts[self]


class Heartbeat:
    """Touches the claim from a thread of its own: a file system that hangs must not stop the rank."""

    def __init__(self, owner: Owner) -> None:
        self.owner, self.over = owner, threading.Event()
        self.lost: LostRun | None = None
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.thread.start()

    @property
    def beats(self) -> bool:
        """Whether the job has the run, as far as is known; not when it has released it."""
        return self.lost is None and not self.over.is_set()

    def look(self) -> None:
        """Raise LostRun once it is known that another job has the run; asks no file."""
        if self.lost is not None:
            raise LostRun(str(self.lost))

    def _run(self) -> None:
        while not self.over.wait(BEAT_SECONDS):
            try:
                self.owner.check()
                os.utime(self.owner.path)
            except LostRun as lost:
                self.lost = None if self.over.is_set() else lost
                return
            except OSError:
                continue


_hearts: dict[Owner, Heartbeat] = {}


def take(run: Path, processes: Sequence[Process], by_force: bool = False) -> tuple[Owner, str]:
    """Claim a run for the job of these processes; returns the claim, and what is to be said about the owner before.

    Raises a UserError that names the owner where another job has the run and shows that it lives; waits for one that
    does not show it until the run may be taken.
    """
    folder, record = run / FOLDER, _here(processes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = _write(folder / f".{record.token}", record)
        try:
            return _take(run, part, record, by_force)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"run directory {run}: {error.strerror}; make room, or give another with --run DIR") from None


def _take(run: Path, part: Path, record: Record, by_force: bool) -> tuple[Owner, str]:
    for _ in range(TRIES):
        before = find(run, part)
        why = reason(before, record, by_force)
        if before is not None and why is None:
            _await_silence(run, before, part)
            continue
        number = before.number + 1 if before is not None else 1
        owner = Owner(run, number, record.token)
        if _link(part, owner.path):
            # Whoever was slow may have made a number that was used before: only the last one counts.
            if _numbers(owner.path.parent)[-1] == number:
                _forget(owner)
                return owner, why or ""
            owner.path.unlink()
    raise UserError(f"run directory {run}: other jobs take it again and again; give another with --run DIR")


def _await_silence(run: Path, before: Claim, part: Path) -> None:
    """Until the owner may have lost the run, or has left it; raises the refusal when it shows that it lives."""
    if any(other.machine == process().machine for other in before.record.processes):
        raise UserError(_refusal(run, before))
    told = time.monotonic() + NOTICE_SECONDS
    while (now := find(run, part)) is not None and now.number == before.number and now.age <= STALE_SECONDS:
        if now.touched != before.touched:
            raise UserError(_refusal(run, now))
        if time.monotonic() > told:
            told = math.inf
            print(
                f"adam_mpi: run directory {run}: {now.record} has it and is silent; it is taken over after "
                f"{STALE_SECONDS:g} s of that, or at once with --take-over",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(WATCH_SECONDS)


def find(run: Path, touched: Path | None = None) -> Claim | None:
    """The newest claim on a run, if there is one; `touched` is a file beside it that may be touched for the time."""
    folder = run / FOLDER
    for _ in range(TRIES):
        number = _numbers(folder)[-1]
        if not number:
            return None
        try:
            path = folder / f"{number}.json"
            at = _touched(path)
            return Claim(number, _read(path), _now(touched) - at, at)
        except FileNotFoundError:
            # A newer one has come.
            continue
    raise UserError(f"{folder}: changes all the time")


def reason(before: Claim | None, mine: Record, by_force: bool) -> str | None:
    """Why the run may be taken, to be said where there is something to say; None where it may not. Pure but for the
    look at this machine's processes."""
    if before is None or before.record.released:
        return ""
    other = before.record
    if mine.supervisor and mine.supervisor == other.supervisor and mine.attempt > other.attempt:
        return ""
    if mine.job and mine.job == other.job and mine.restart > other.restart:
        return ""
    if other.processes and not any(map(_alive, other.processes)):
        return ""
    if before.age > STALE_SECONDS:
        return f"taken over from {other}, which has been silent for {before.age:.0f} s"
    return f"taken over from {other}" if by_force else None


def running(run: Path) -> Claim | None:
    """The claim of the job that has the run now, as far as can be told."""
    try:
        with tempfile.NamedTemporaryFile(dir=run / FOLDER, prefix=".") as file:
            claim = find(run, Path(file.name))
    except OSError:
        claim = find(run)
    if claim is None or claim.record.released or claim.age > STALE_SECONDS:
        return None
    dead = claim.record.processes and not any(map(_alive, claim.record.processes))
    return None if dead else claim


def process() -> Process:
    """This one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers of one machine have numbers of their own.
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return Process("", os.getpid(), "")
    return Process(machine, os.getpid(), _started(os.getpid()))


def _alive(other: Process) -> bool:
    """Whether it may live: those of other machines may."""
    if not other.machine or other.machine != process().machine:
        return True
    return _started(other.pid) == other.started


def _started(pid: int) -> str:
    """When a process was started, in the kernel's own count; nothing where it has ended."""
    try:
        # The name, in parentheses, may have anything in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _here(processes: Sequence[Process], environment: Mapping[str, str] = os.environ) -> Record:
    """What the job of these processes says of itself."""
    job = environment.get("SLURM_JOB_ID", "")
    alone = len({other.machine for other in processes}) == 1 and processes[0].machine
    return Record(
        uuid.uuid4().hex,
        socket.gethostname(),
        os.getpid(),
        time.time(),
        f"{environment.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else "",
        _count(environment.get("SLURM_RESTART_COUNT")),
        environment.get(SUPERVISOR, ""),
        _count(environment.get(ATTEMPT)),
        tuple(processes) if alone else (),
    )


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _refusal(run: Path, before: Claim) -> str:
    heard = f"last heard of {max(before.age, 0.0):.0f} s ago"
    return (
        f"run directory {run} is in use by another job: {before.record}, {heard}; "
        f"wait for its end, give another with --run DIR, or take it away from that job with --take-over "
        f"(an owner that is silent for {STALE_SECONDS:g} s has lost it anyway)"
    )


def _numbers(folder: Path) -> list[int]:
    """Those of all claims, in order, after a 0."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return [0]
    numbers = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return [0, *sorted(int(number) for number in numbers if number.isdecimal())]


def _read(path: Path) -> Record:
    """A claim that cannot be understood is of a job of which nothing is known."""
    text = path.read_text()
    try:
        told: dict[str, Any] = json.loads(text)
        return Record(**told | {"processes": tuple(Process(*other) for other in told["processes"])})
    except (ValueError, KeyError, TypeError):
        return Record("", "a host that is not known")


def _write(path: Path, record: Record) -> Path:
    path.write_text(json.dumps(asdict(record)))
    return path


def _link(part: Path, path: Path) -> bool:
    """Make a file exactly once: False where there is one already."""
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


def _forget(owner: Owner) -> None:
    """Claims before this one: whoever has one of them finds it gone."""
    for number in _numbers(owner.path.parent)[1:]:
        if number < owner.number:
            owner.path.with_name(f"{number}.json").unlink(missing_ok=True)


def _touched(path: Path) -> float:
    """When it was; asked of the open file, which NFS does not answer from what it remembers."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def _now(touched: Path | None) -> float:
    """The time of the file system, whose clock may be another than ours."""
    if touched is None:
        return time.time()
    os.utime(touched)
    return _touched(touched)
