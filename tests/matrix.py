"""The failure matrix: each role struck by each kind of failure on each MPI, in real jobs; what happens, and its cost.

    scripts/failure_matrix [--mpi NAME] [--kind KIND ...]      # writes the rows into docs/FAILURES.md
"""

import argparse
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import ROOT, Hosts, Job, Mpi, available, given, start

PAGE = ROOT / "docs" / "FAILURES.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
HEADER = "| MPI | role | failure | what happens | seconds | lost |\n| --- | --- | --- | --- | --- | --- |\n"
# Ranks 0 and 1 serve data, 2 to 4 parameters, 5 to 7 train.
RANKS = {"data": 0, "server": 3, "worker": 6}
POINTS = {"data": "batch", "server": "apply", "worker": "compute"}
KINDS = ("kill", "raise", "stop", "slow", "cut")
SETTINGS = given(
    "layout.data=2", "layout.servers=3", "server.shard=20000", "data.images=6000",
    "observe.interval=0.2", "cluster.stopped=2", "cluster.seconds=10", "store.interval=1",
)  # fmt: skip


def row(mpi: Mpi, role: str, kind: str, folder: Path) -> list[str]:
    """Strikes one rank of a job and tells what came of it."""
    how = "factor=10" if kind == "slow" else f"at={POINTS[role]} step=30"
    fault = f"{kind} rank={RANKS[role]} {how}"
    settings = given(f'inject.faults=["{fault}"]', "train.epochs=4")
    job = start(mpi, 8, "train", *SETTINGS, *settings, folder=folder).wait(150)
    return [mpi.name, role, kind, *outcome(job, min(job.struck().values(), default=None))]


def cut_row(mpi: Mpi, folder: Path) -> list[str]:
    """Cuts the network between two of three hosts."""
    hosts = Hosts(folder / "hosts")
    hosts.call("up", 3)
    try:
        keys = [*SETTINGS, *given("train.epochs=1000")]
        job = start(mpi, 8, "train", *keys, folder=folder, environment=hosts.environment)
        job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")
        hosts.call("cut", "h1", "h2")
        since = time.time()
        return [mpi.name, "any", "cut between two hosts", *outcome(job.wait(150), since)]
    finally:
        hosts.call("down")


def outcome(job: Job, struck: float | None) -> list[str]:
    """(what happens, seconds, what is lost)."""
    summary = job.summary
    ended = f"{time.time() - struck:.1f}" if struck else ""
    if not (job.run / "DONE").exists():
        cause = (summary.get("failure") or "no word").partition("\n")[0].removesuffix("; the job ends")
        cause = cause.replace(f" on {socket.gethostname()}", "")
        return [f"the job ends: {cause}", ended, "what is not in the store (1 s)"]
    recoveries = summary["recoveries"]
    if not recoveries:
        return ["the job goes on with it", "0", "nothing"]
    missing = summary["pushes"]["unacknowledged_of_dead"]
    lost = f"at most {missing} pushes of the dead, not acknowledged" if missing else "nothing"
    seconds = ", ".join(f"{recovery['seconds']:.2f}" for recovery in recoveries if recovery["seconds"] is not None)
    return ["the others go on without it", seconds, lost]


def rows(mpis: list[Mpi], kinds: list[str]) -> Iterator[list[str]]:
    for mpi in mpis:
        for kind in kinds:
            for role in RANKS if kind != "cut" else ("any",):
                # A rank that ends may write its log for a moment longer than mpirun lives.
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    try:
                        yield cut_row(mpi, Path(folder)) if kind == "cut" else row(mpi, role, kind, Path(folder))
                    except pytest.fail.Exception as failure:
                        yield [mpi.name, role, kind, f"did not end: {str(failure).partition(chr(10))[0]}", "", ""]


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
