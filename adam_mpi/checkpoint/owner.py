"""The owner of a run directory: one job at a time.

A claim is a file `owner/N.json`. A job that takes the run makes the file with the next number by `os.link`, which
exactly one job can do, on NFS too (`flock` is not to be relied on there). The newest claim is the owner's, who touches
it at intervals; an owner that ends makes a last claim, which says that the run is free. A job whose claim is no longer
the newest has lost the run and writes nothing more into it.
"""

import errno
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from adam_mpi.base.errors import LostRun, UserError
from adam_mpi.checkpoint.claim_file import (
    FOLDER,
    TRIES,
    Claim,
    Process,
    Record,
    claim_numbers,
    describe_job,
    find_claim,
    make_once,
    may_be_alive,
    read_record,
    remove_claims_before,
    this_process,
    write_record,
)

BEAT_SECONDS = 2.0
"""How often an owner touches its claim."""
STALE_SECONDS = 60.0
"""How long an owner may be silent before any job may take the run."""
NOTICE_SECONDS = 2 * BEAT_SECONDS
"""How long a job that takes the run from a living one gives it to notice."""
WATCH_SECONDS = 0.1


@dataclass(frozen=True)
class Owner:
    """A job's own claim on its run."""

    run: Path
    number: int
    token: str

    @property
    def path(self) -> Path:
        """Return the claim file of this owner of the run."""
        return self.run / FOLDER / f"{self.number}.json"

    def check(self) -> None:
        """Raise LostRun where another job owns the run; a file system that does not answer proves nothing."""
        try:
            ours = claim_numbers(self.path.parent)[-1] == self.number and read_record(self.path).token == self.token
        except OSError as error:
            ours = error.errno not in (errno.ENOENT, errno.ESTALE)
        if not ours and self.path.parent.is_dir():
            raise LostRun(f"run directory {self.run} has been taken by {self._successor()}; this job ends")

    def _successor(self) -> str:
        """Return a text about the job that owns the run now."""
        try:
            claim = find_claim(self.run)
        except (OSError, UserError):
            claim = None
        return "another job" if claim is None or claim.record.released else str(claim.record)

    def update_processes(self, processes: Sequence[Process]) -> None:
        """Write the owner's current `processes` into its claim: they change when ranks are lost or join."""
        self.check()
        with suppress(OSError):
            now = replace(describe_job(processes), token=self.token, since=read_record(self.path).since)
            write_record(self.path.with_name(f".{self.token}"), now).replace(self.path)

    def release(self) -> None:
        """Leave the owned run to the next job, unless another one has it already."""
        if (heartbeat := _heartbeats.pop(self, None)) is not None:
            heartbeat.over.set()
        with suppress(OSError, LostRun):
            self.check()
            part = write_record(self.path.with_name(f".{self.token}"), Record(self.token, released=True))
            make_once(part, self.path.with_name(f"{self.number + 1}.json"))
            part.unlink()
            self.path.unlink()

    def heartbeat(self) -> "Heartbeat":
        """Return the heartbeat of this owner in this process; the first call starts it."""
        if self not in _heartbeats:
            _heartbeats[self] = Heartbeat(self)
        return _heartbeats[self]


class Heartbeat:
    """Touches the claim from a thread of its own: a file system that hangs must not stop the rank."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.over = threading.Event()
        self.lost: LostRun | None = None
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the job owns the run as far as is known; False once it has released it."""
        return self.lost is None and not self.over.is_set()

    def raise_if_lost(self) -> None:
        """Raise LostRun once the heartbeat has found that another job owns the run; this reads no file."""
        if self.lost is not None:
            raise LostRun(str(self.lost))

    def _run(self) -> None:
        """Check that the run is still owned, and touch its claim, in the heartbeat's thread."""
        while not self.over.wait(BEAT_SECONDS):
            try:
                self.owner.check()
                os.utime(self.owner.path)
            except LostRun as lost:
                self.lost = None if self.over.is_set() else lost
                return
            except OSError:
                continue


_heartbeats: dict[Owner, Heartbeat] = {}


def claim_run(run: Path, processes: Sequence[Process], by_force: bool = False) -> tuple[Owner, str]:
    """Claim `run` for the job of `processes`; return its owner, and a note about the previous one or an empty text.

    Raises a UserError that names the owner where another job has the run and shows that it lives; waits for an owner
    that does not show it until the run may be taken. `by_force`: take it from a living job too.
    """
    folder = run / FOLDER
    record = describe_job(processes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = write_record(folder / f".{record.token}", record)
        try:
            return _take_run(run, part, record, by_force)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"run directory {run}: {error.strerror}; make room, or give another with --run DIR") from None


def _take_run(run: Path, part: Path, record: Record, by_force: bool) -> tuple[Owner, str]:
    """Take the run as its owner, as soon as the previous owner's claim allows it; return the owner and a note."""
    for _ in range(TRIES):
        before = find_claim(run, part)
        note = may_take(before, record, by_force)
        if before is not None and note is None:
            _await_silence(run, before, part)
            continue
        number = before.number + 1 if before is not None else 1
        owner = Owner(run, number, record.token)
        if make_once(part, owner.path):
            # A slow job may have made a number that was used before: only the highest one counts.
            if claim_numbers(owner.path.parent)[-1] == number:
                remove_claims_before(owner.path, number)
                return owner, note or ""
            owner.path.unlink()
    raise UserError(f"run directory {run}: other jobs keep taking it; give another with --run DIR")


def _await_silence(run: Path, before: Claim, part: Path) -> None:
    """Return when the run's owner has been silent for long or has left; raise the refusal when it lives."""
    if any(other.machine == this_process().machine for other in before.record.processes):
        raise UserError(_refusal(run, before))
    notice = time.monotonic() + NOTICE_SECONDS
    while (now := find_claim(run, part)) is not None and now.number == before.number and now.age <= STALE_SECONDS:
        if now.touched != before.touched:
            raise UserError(_refusal(run, now))
        if time.monotonic() > notice:
            notice = math.inf
            print(
                f"adam_mpi: run directory {run}: {now.record} has it and is silent; it is taken over after "
                f"{STALE_SECONDS:g} s of that, or at once with --take-over",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(WATCH_SECONDS)


def may_take(before: Claim | None, mine: Record, by_force: bool) -> str | None:
    """Return None where the job `mine` may not own the run, else a note to print or an empty text.

    Pure except for a look at this machine's processes.
    """
    if before is None or before.record.released:
        return ""
    other = before.record
    if mine.supervisor and mine.supervisor == other.supervisor and mine.attempt > other.attempt:
        return ""
    if mine.job and mine.job == other.job and mine.restart > other.restart:
        return ""
    if other.processes and not any(map(may_be_alive, other.processes)):
        return ""
    if before.age > STALE_SECONDS:
        return f"taken over from {other}, which has been silent for {before.age:.0f} s"
    return f"taken over from {other}" if by_force else None


def running(run: Path) -> Claim | None:
    """Return the claim of the job that owns `run` now, as far as can be seen from here; None if no job runs."""
    try:
        with tempfile.NamedTemporaryFile(dir=run / FOLDER, prefix=".") as file:
            claim = find_claim(run, Path(file.name))
    except OSError:
        claim = find_claim(run)
    if claim is None or claim.record.released or claim.age > STALE_SECONDS:
        return None
    dead = claim.record.processes and not any(map(may_be_alive, claim.record.processes))
    return None if dead else claim


def _refusal(run: Path, before: Claim) -> str:
    """Return why a run that the job of the claim `before` owns cannot be used, and what to do."""
    age = max(before.age, 0.0)
    return (
        f"run directory {run} is in use by another job: {before.record}, last heard of {age:.0f} s ago; "
        f"wait for its end, give another with --run DIR, or take it away from that job with --take-over "
        f"(an owner that is silent for {STALE_SECONDS:g} s has lost it anyway)"
    )
