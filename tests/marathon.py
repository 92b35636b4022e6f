"""The marathon: one job whose ranks are killed again and again, and replaced, until it is asked to end.

Nothing acknowledged may be lost, and nothing may grow: memory, descriptors, mappings, threads and shared memory of the
ranks that are left in the end are compared with those after the tenth kill, role by role.

    scripts/chaos --marathon
"""

import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from launch import Job, Mpi, given, start
from oracle import conserved

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint.run_directory import compare_copies

KILLS, RANKS, SERVERS, SLOTS = 100, 8, 3, 24
SETTINGS = [
    "data.images=3200",
    "train.epochs=1000000",
    "server.shard=12000",
    "observe.interval=0.5",
    "inject.conserve=true",
    "optimizer.learning_rate=1",
    "optimizer.schedule=constant",
    "store.interval=2",
    "snapshot.minutes=0",
    "push.protocol=delta",
    "layout.data=1",
    f"layout.servers={SERVERS}",
    "recover.respawn=true",
    "cluster.seconds=120",
    "recover.seconds=60",
    "worker.threads=1",
]
BASE = 10
"""Kills after which the figures are those that later ones are compared with."""
GROWTH = 0.10
PAIR = 0.2
"""How often two die at once."""
SECONDS = 240
"""For the job to be whole again, and to end."""
FIGURES = ("rss", "shared", "descriptors", "mappings", "threads")
# So little more is chance: a connection, a list that was made larger.
SLACK = {"rss": 4 << 20, "shared": 4 << 20, "descriptors": 4, "mappings": 8, "threads": 1}


def run(mpi: Mpi, kills: int = KILLS, seed: int = 1, folder: Path | None = None) -> dict:
    """Run it; returns the line of results, with an `error` and the folder that was kept if something was wrong."""
    place, began = folder or Path(tempfile.mkdtemp(prefix="adam_mpi-marathon-")), time.monotonic()
    line = {"seed": seed, "kind": "marathon", "point": "", "hosts": 1, "ranks": RANKS, "wanted": kills}
    settings = given(*SETTINGS, f"run.seed={seed}")
    job = start(mpi, RANKS, "train", *settings, folder=place, options=("--host", f"localhost:{SLOTS}"))
    try:
        line |= _run(job, kills, random.Random(seed))
        if folder is None:
            shutil.rmtree(place)
    except (AssertionError, pytest.fail.Exception, LookupError, UserError, psutil.Error) as error:
        line |= {"error": str(error)[:4000], "kept": str(place)}
    finally:
        job.end()
    line["job_seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(line), flush=True)
    return line


def _run(job: Job, kills: int, chance: random.Random) -> dict:
    runners, history = Runners(job), []
    runners.whole()
    runners.figures()
    for kill in range(1, kills + 1):
        victims = runners.choose(chance)
        began = time.monotonic()
        for member in victims:
            runners.kill(member)
        runners.whole()
        history.append(runners.figures())
        _show(kill, kills, victims, time.monotonic() - began, history[-1])
    (job.run / "STOP").touch()
    job.wait(SECONDS)
    assert (job.run / "STOPPED").exists() and job.left_over() == [], job.said()
    summary = job.summary
    killed = {member for recovery in summary["recoveries"] for member in recovery["members"]}
    assert killed == runners.killed, f"killed were {sorted(runners.killed)}, lost {sorted(killed)}"
    assert summary["status"] == "stopped" and summary["ranks"]["total"] == RANKS, summary["ranks"]
    conserved(job.run, summary)
    said = compare(history)
    figures = {"kills": len(history), "killed": len(runners.killed), "generations": summary["generation"]}
    figures |= {"pushes": summary["pushes"], "figures": said, "shm_files": history[-1]["shm_files"]}
    grown = {name: told for name, told in said.items() if told["grown"]}
    assert not grown, f"grown since kill {BASE}: {grown}"
    return figures


class Runners:
    """The ranks of a running job, as the run directory and the system show them."""

    def __init__(self, job: Job) -> None:
        self.job, self.log = job, job.run / "log"
        self.killed: set[int] = set()
        self.copies = 0
        """Copies on other servers when all are whole."""
        self.processes: dict[int, psutil.Process] = {}
        self.roles: dict[int, str] = {}
        self.numbers: set[str] = set()
        """What Open MPI has in the names of the job's files in /dev/shm."""

    def whole(self) -> None:
        """Wait until as many ranks as there should be are at work, and all copies of all shards are whole."""
        limit, missing = time.monotonic() + SECONDS, "anything"
        while (missing := self._missing()) or (missing := self._compare()):
            ended = self.job.process.poll() is not None
            if ended or time.monotonic() > limit:
                why = "the job has ended" if ended else f"not in {SECONDS} s"
                pytest.fail(f"missing: {missing}; {why}\n{self.job.said()}", pytrace=False)
            time.sleep(0.05)

    def _missing(self) -> str:
        """What there is not yet, for people; nothing when all are at work."""
        generation, members = self._members()
        if len(members) != RANKS or members & self.killed:
            return f"{RANKS} living ranks in generation {generation}: it has {sorted(members)}"
        self.processes = {m: p for m, p in self._found().items() if m in members}
        if lost := members - self.processes.keys():
            return f"processes of ranks {sorted(lost)}"
        rows = self._rows(generation)
        self.roles = {m: "+".join(r["role"] for r in rows if r["rank"] == m) for m in members}
        silent = [member for member, roles in self.roles.items() if not roles]
        return f"word of ranks {silent} in generation {generation}" if silent else ""

    def _members(self) -> tuple[int, set[int]]:
        """The newest generation, and the numbers for life of its ranks."""
        known = {int(path.stem.partition("-")[2]): path for path in self.log.glob("generation-*.json")}
        if not known:
            return 0, set(range(RANKS))
        return max(known), set(json.loads(known[max(known)].read_text()))

    def _rows(self, generation: int) -> list[dict]:
        """What is told of each rank, if that is newer than the generation."""
        path, began = self.job.run / "status.json", self.log / f"generation-{generation}.json"
        if not path.exists() or (began.exists() and path.stat().st_mtime_ns < began.stat().st_mtime_ns):
            return []
        return json.loads(path.read_text())["ranks"]

    def _found(self) -> dict[int, psutil.Process]:
        """Ranks by their number for life, which is in the name of the log that they have open."""
        found = {}
        for process in psutil.Process(self.job.process.pid).children(recursive=True):
            try:
                links = [link.readlink().name for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            except OSError:
                continue
            for name in links:
                if match := re.fullmatch(r"rank-(\d+)\.log", name):
                    found[int(match[1])] = process
        return found

    def _compare(self) -> str:
        """Have all copies compared, which those that are not whole are not; nothing when all are there and the same."""
        generation, _ = self._members()
        try:
            text, same = compare_copies(self.job.run, 20)
        except UserError as error:
            return str(error)
        assert same, text
        count, told = int(text.split()[0]), int(text.rpartition(" ")[2].rstrip(")"))
        self.copies = self.copies or count
        whole = count == self.copies and told == generation == self._members()[0]
        return "" if whole else f"copies of all shards: {text}, wanted {self.copies} in generation {generation}"

    def choose(self, chance: random.Random) -> list[int]:
        """Whoever is killed next, sometimes two: all copies are whole, so one is left whichever servers they are."""
        count = 2 if chance.random() < PAIR else 1
        victims = chance.sample(sorted(self.processes), count)
        servers = [member for member in self.processes if "server" in self.roles[member]]
        assert set(servers) - set(victims), f"{victims} have the last whole copies: servers are {servers}"
        return victims

    def kill(self, member: int) -> None:
        self.killed.add(member)
        self.processes[member].kill()

    def figures(self) -> dict:
        """Of each rank, with its roles; and how many files the job has in /dev/shm."""
        ranks = {m: {"role": self.roles[m]} | _figures(p) for m, p in sorted(self.processes.items())}
        return {"ranks": ranks, "shm_files": self._shm_files()}

    def _shm_files(self) -> int:
        """Files in /dev/shm of all that this mpirun has started: its number is in their names."""
        maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in self.processes.values())
        self.numbers |= {match[1] for match in re.finditer(r"/dev/shm/\S*\.([0-9a-f]+)[0-9a-f]{4}\.\d+", maps)}
        return sum(any(f".{number}" in path.name for number in self.numbers) for path in Path("/dev/shm").iterdir())


def _figures(process: psutil.Process) -> dict:
    """What a process has taken; of shared memory what is mapped, as what is touched of it is a matter of chance."""
    mappings = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    shared = [line.split()[0].split("-") for line in mappings if "/dev/shm/" in line or "/memfd:" in line]
    return {
        "rss": process.memory_info().rss,
        "shared": sum(int(end, 16) - int(start, 16) for start, end in shared),
        "descriptors": process.num_fds(),
        "mappings": len(mappings),
        "threads": process.num_threads(),
    }


def compare(history: list[dict]) -> dict[str, dict]:
    """Role and figure -> the most of any rank with that role after the tenth kill and in the end; whether it has grown.

    A role that nobody had after the tenth kill is compared with the first kill after that. Files are the job's.
    """
    said = {}
    for role in sorted({rank["role"] for moment in history for rank in moment["ranks"].values()}):
        for figure in FIGURES:
            values = [_most(moment, role, figure) for moment in history]
            later = [value for value in values[BASE - 1 :] if value is not None]
            if len(later) > 1:
                said[f"{role} {figure}"] = _told(later[0], later[-1], SLACK[figure])
    files = [moment["shm_files"] for moment in history[BASE - 1 :]]
    return said | ({"job shm_files": _told(files[0], files[-1], 2)} if len(files) > 1 else {})


def _most(moment: dict, role: str, figure: str) -> int | None:
    return max((rank[figure] for rank in moment["ranks"].values() if rank["role"] == role), default=None)


def _told(first: int, last: int, slack: int) -> dict:
    return {"first": first, "last": last, "grown": last > max(first * (1 + GROWTH), first + slack)}


def _show(kill: int, kills: int, victims: list[int], seconds: float, figures: dict) -> None:
    """Where it stands, on a line for each kill."""
    who = ", ".join(f"rank {member}" for member in victims)
    most: dict[str, int] = defaultdict(int)
    for rank in figures["ranks"].values():
        most[rank["role"]] = max(most[rank["role"]], rank["rss"] >> 20)
    memory = ", ".join(f"{role} {size} MB" for role, size in sorted(most.items()))
    text = f"kill {kill}/{kills}: {who}; whole again after {seconds:.1f} s; at most {memory}"
    print(text, file=sys.stderr, flush=True)
