"""The failure matrix: each role struck by each kind of failure on each MPI, in real jobs; what happens, and its cost.

scripts/failure_matrix [--mpi NAME] [--kind KIND ...]      # writes the rows into docs/explanation/failures.md
"""

import argparse
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from launch import ROOT, Disk, Freezer, Hosts, Job, Mpi, available, given, start

PAGE = ROOT / "docs" / "explanation" / "failures.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
HEADER = "| MPI | role | failure | what happens | seconds | lost |\n| --- | --- | --- | --- | --- | --- |\n"
# Ranks 0 and 1 serve data, 2 to 4 parameters, 5 to 7 train.
RANKS = {"data": 0, "server": 3, "worker": 6}
POINTS = {"data": "batch", "server": "apply", "worker": "compute"}
STRIKES = ("kill", "raise", "stop", "slow")
KINDS = (*STRIKES, "freeze", "silent", "cut", "full", "hang")
ENDLESS = given("train.epochs=1000000", "snapshot.minutes=0")
SETTINGS = given(
    "layout.data=2",
    "layout.servers=3",
    "server.shard=20000",
    "data.images=6000",
    "observe.interval=0.2",
    "cluster.stopped=2",
    "cluster.seconds=10",
    "store.interval=1",
)


def row(mpi: Mpi, role: str, kind: str, folder: Path) -> list[str]:
    """Strikes one rank of a job and tells what came of it."""
    how = "factor=10" if kind == "slow" else f"at={POINTS[role]} step=30"
    fault = f"{kind} rank={RANKS[role]} {how}"
    settings = given(f'inject.faults=["{fault}"]', "train.epochs=4")
    job = start(mpi, 8, "train", *SETTINGS, *settings, folder=folder).wait(150)
    return [mpi.name, role, kind, *outcome(job, min(job.struck().values(), default=None))]


def training(job: Job) -> Job:
    return job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")


def outlived(job: Job, since: float) -> list[str]:
    """Lets a job that goes on without a rank train for a while, and ends it."""
    before = len(job.metrics())
    job.until(lambda: job.process.poll() is not None or len(job.metrics()) > before + 100, "its end, or more work")
    (job.run / "STOP").touch()
    return outcome(job.wait(150), since)


def freeze_row(mpi: Mpi, role: str, folder: Path) -> list[str]:
    """Freezes one rank, as a paused container would be."""
    freezer = Freezer.make()
    if freezer is None:
        raise LookupError("no control groups of version 2 that we may make")
    job = training(start(mpi, 8, "train", *SETTINGS, *ENDLESS, folder=folder))
    since = time.time()
    freezer.freeze(job.rank(RANKS[role]).pid)
    found = outlived(job, since)
    freezer.close()
    return [mpi.name, role, "frozen container", *found]


def silent_row(mpi: Mpi, role: str, folder: Path) -> list[str]:
    """Stops one rank where no sentinel looks for stopped ones: nothing but its silence tells of it."""
    job = training(start(mpi, 8, "train", *SETTINGS, *ENDLESS, *given("cluster.stopped=0"), folder=folder))
    since = time.time()
    job.rank(RANKS[role]).suspend()
    return [mpi.name, role, "silent", *outlived(job, since)]


def cut_row(mpi: Mpi, staleness: str, folder: Path) -> list[str]:
    """Cuts the network between two of three hosts."""
    hosts = Hosts(folder / "hosts")
    hosts.call("up", 3)
    try:
        # All data is on h0: what is cut off is a worker's way to a server, and a server's to its copies.
        keys = [*SETTINGS, *ENDLESS, *given(f"consistency.staleness={staleness}", "layout.data=1")]
        job = training(start(mpi, 8, "train", *keys, folder=folder, environment=hosts.environment))
        hosts.call("cut", "h1", "h2")
        since = time.time()
        happens, seconds, lost = outcome(job.wait(150), since)
        lost = lost if staleness == "inf" else "what was trained since the last snapshot"
        return [mpi.name, "any", f"cut between two hosts, staleness {staleness}", happens, seconds, lost]
    finally:
        hosts.call("down")


def full_row(mpi: Mpi, lasting: bool, folder: Path) -> list[str]:
    """Leaves no room in the run directory, for a while or until the end."""
    with Disk.make(folder / "disk") as disk:
        keys = [*SETTINGS, *ENDLESS, *given(f"store.dir={folder / 'store'}")]
        job = training(start(mpi, 8, "train", "--run", disk.folder / "run", *keys, folder=folder))
        disk.fill()
        job.until(lambda: "it is retried, and training continues" in job.stderr, "its warning")
        if not lasting:
            disk.empty()
            job.until(lambda: "has caught up" in job.stderr, "word that it has caught up")
        # A file of no bytes has room.
        (job.run / "STOP").touch()
        since = time.time()
        kind = "run directory full to the end" if lasting else "run directory full for a while"
        return [mpi.name, "any", kind, *outcome(job.wait(150), since)]


def hang_row(mpi: Mpi, folder: Path) -> list[str]:
    """Has the disk of a server take nothing of a snapshot."""
    fault = given('inject.faults=["delay rank=3 at=snapshot seconds=1000"]', "train.epochs=2")
    job = training(start(mpi, 8, "train", *SETTINGS, *fault, folder=folder))
    job.until(lambda: any(line["part"] == "test" for line in job.metrics()), "the end of training")
    since = time.time()
    return [mpi.name, "server", "disk hangs at the end", *outcome(job.wait(150), since)]


def outcome(job: Job, struck: float | None) -> list[str]:
    """(what happens, seconds, what is lost)."""
    summary = job.summary
    ended = f"{time.time() - struck:.1f}" if struck else ""
    if not ((job.run / "DONE").exists() or (job.run / "STOPPED").exists()):
        cause = (summary or {}).get("failure") or told(job)
        cause = cause.partition("\n")[0].removesuffix("; the job ends")
        cause = re.sub(r"/\S+/run/", "", cause.replace(f" on {socket.gethostname()}", ""))
        return [f"the job ends: {cause}", ended, "what is not in the store (1 s)"]
    recoveries = summary["recoveries"]
    if not recoveries:
        return ["the job goes on with it", "0", "nothing"]
    missing = summary["pushes"]["unacknowledged_of_dead"]
    lost = f"at most {missing} pushes of the dead, not acknowledged" if missing else "nothing"
    seconds = ", ".join(f"{recovery['seconds']:.2f}" for recovery in recoveries if recovery["seconds"] is not None)
    return ["the others go on without it", seconds, lost]


def told(job: Job) -> str:
    """The reason on the terminal, of a job that could not write it down."""
    return next(iter(re.findall(r"^adam_mpi: (?!warning|.* has caught up)(.*)", job.stderr, re.M)), "no word")


def makers(mpi: Mpi, kind: str) -> list[Callable[[Path], list[str]]]:
    """What makes the rows of a kind of failure, each in a folder of its own."""
    if kind in STRIKES:
        return [partial(row, mpi, role, kind) for role in RANKS]
    if kind == "cut":
        return [partial(cut_row, mpi, staleness) for staleness in ("0", "3", "inf")]
    if kind == "full":
        return [partial(full_row, mpi, lasting) for lasting in (False, True)]
    if kind == "hang":
        return [partial(hang_row, mpi)]
    return [partial({"freeze": freeze_row, "silent": silent_row}[kind], mpi, role) for role in RANKS]


def rows(mpis: list[Mpi], kinds: list[str]) -> Iterator[list[str]]:
    for mpi in mpis:
        for kind in kinds:
            for make in makers(mpi, kind):
                # A rank that ends may write its log for a moment longer than mpirun lives.
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    try:
                        yield make(Path(folder))
                    except pytest.fail.Exception as failure:
                        role, said = make.args[1], str(failure).partition(chr(10))[0]
                        yield [mpi.name, str(role), kind, f"did not end: {said}", "", ""]
                    except (OSError, LookupError) as error:
                        print(f"{mpi.name} {kind}: left out: {error}", file=sys.stderr)


def write(found: list[list[str]]) -> None:
    """Put the rows into the page, in the place of those of the same MPI, role and failure."""
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    kept = {tuple(line.split(" | ")[:3]): line for line in table.removeprefix(HEADER).splitlines()}
    for cells in found:
        line = f"| {' | '.join(cells)} |"
        kept[tuple(line.split(" | ")[:3])] = line
    PAGE.write_text(before + BEGIN + HEADER + "".join(f"{line}\n" for _, line in sorted(kept.items())) + END + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", choices=[mpi.name for mpi in available()], help="only this one")
    parser.add_argument("--kind", choices=KINDS, nargs="*", default=list(KINDS), help="only these failures")
    options = parser.parse_args()
    # Whoever ends us from outside wants the jobs and hosts to end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for cells in rows([mpi for mpi in available() if options.mpi in (None, mpi.name)], options.kind):
        print(" | ".join(cells), flush=True)
        write([cells])
    return 0


if __name__ == "__main__":
    sys.exit(main())
