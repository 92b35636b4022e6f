"""Chaos: whole jobs whose ranks are killed at seeded moments, and what must be true of them afterward.

In a *training* run ranks are killed from outside at random moments; it must reach its accuracy, and a synchronous one
the weights of an undisturbed run. In a *conservation* run every push adds exactly 1 to every parameter, and ranks are
killed at named points of the program; in the end every weight, with what codecs still carry for it, is the number of
acknowledged pushes. *Wide* runs are conservation runs over all combinations of codec, servers and staleness, with one
to three kills each. The *marathon* (marathon.py) is one long run through many kills.

    scripts/chaos                 # all of it; see there
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import chaos_results as results
import marathon
import numpy as np
import pytest
from launch import Job, Mpi, available, given, start
from oracle import conserved, weights
from test_train import SMOOTH

from adam_mpi.cluster.layout import Layout, arrange
from adam_mpi.config import load
from adam_mpi.sharding.codecs import CODECS

SECONDS = 200
# Ten ranks on two loaded cores have long delays: at the default rate such a run may diverge.
TARGET = ["train.epochs=20", "train.target=0.85", "optimizer.learning_rate=0.01"]
# The batch is cut in another way when somebody has died: what is rounding must stay rounding.
IN_STEP = ["consistency.staleness=0", "train.epochs=3", "data.images=3000", "server.shard=2000", SMOOTH]
FACTOR, STRIPS = "push.protocol=factor", "layout.partitions=2"
KINDS = {
    "async": TARGET,
    "sync": IN_STEP,
    "async factor": [*TARGET, FACTOR],
    "sync factor": [*IN_STEP, FACTOR],
    "async strips": [*TARGET, STRIPS],
    "sync strips": [*IN_STEP, STRIPS],
}
TRAINING = ["data.images=8000", "server.shard=12000", "observe.interval=0.5", "snapshot.minutes=0"]
CONSERVATION = [
    "data.images=3200",
    "train.epochs=3",
    "server.shard=12000",
    "observe.interval=0.5",
    "inject.conserve=true",
    "optimizer.learning_rate=1",
    "optimizer.schedule=constant",
    "store.interval=0.5",
]
# Where a rank is killed, whose it is, and what has to happen first for the point to be reached.
POINTS = {
    "prepare": "server",
    "applied": "server",
    "rename": "data",
    "rebuild": "server",
    "recover": "worker",
    "lagging": "server",
}
# The dimensions of wide runs: all of their 36 combinations are among the first 36 seeds.
PACKED, SERVERS, STALENESS = ("none", "onebit", "topk", "float16"), (3, 4, 5), (0.0, 3.0, math.inf)
# How their ranks die; steps are few enough to be reached whoever gets how much of the work.
PATTERNS = ("one", "two at once", "one after another", "while recovering", "while rebuilding", "every server")
MOMENTS = {"data": ("batch",), "server": ("apply", "applied", "prepare"), "worker": ("compute", "push", "pull")}
STEPS = (8, 20, 32)
# How a job ends whose shards have no whole copy left.
NAMED_END = re.compile(r"no copy is left of|may lack acknowledged pushes")


@dataclass(frozen=True)
class Strike:
    """A rank that kills itself at the `step`-th visit of a named point."""

    rank: int
    at: str
    step: int

    def __str__(self) -> str:
        return f"kill rank={self.rank} at={self.at} step={self.step}"


@dataclass(frozen=True)
class Run:
    """A seed's run: its layout, and who is killed, as (role, which of that role, images trained on before)."""

    seed: int
    kind: str
    ranks: int
    data: int
    servers: int
    kills: tuple[tuple[str, int, int], ...] = ()
    point: str = ""
    hosts: int = results.HOSTS
    codec: str = "none"
    staleness: float = math.inf
    copies: int = 3
    pattern: str = ""

    @property
    def expected(self) -> tuple[str, ...]:
        """A run that loses every server ends by name; so may one whose only copy left lags behind."""
        if self.pattern == "every server":
            return ("named end",)
        return ("survived", "named end") if self.point == "lagging" else ("survived",)

    @property
    def factors(self) -> bool:
        """Whether dense layers of a conservation run push activations and errors: a third of them do."""
        return self.seed % 3 == 0

    @property
    def layout(self) -> Layout:
        """Who does what at the start."""
        ranks = [(self.ranks + self.hosts - 1 - host) // self.hosts for host in range(self.hosts)]
        names = [f"h{host}" for host, count in enumerate(ranks) for _ in range(count)]
        return arrange(names, load(None, self.settings).layout)

    @property
    def settings(self) -> list[str]:
        common = [f"layout.data={self.data}", f"layout.servers={self.servers}", f"run.seed={self.seed}"]
        if self.kind != "conservation":
            return [*TRAINING, *common, *KINDS[self.kind]]
        # What is pushed as factors is not packed.
        common.append(f"push.protocol={'factor' if self.factors and not self.carries else 'delta'}")
        common += [f"push.codec={self.codec}", f"server.copies={self.copies}"]
        return [*CONSERVATION, *common, f"consistency.staleness={self.staleness}"]

    @property
    def carries(self) -> bool:
        """Whether pushers carry into later pushes what earlier ones left out."""
        return CODECS[self.codec].feedback

    @property
    def keys(self) -> list[str]:
        slow = [f"delay rank={self.layout.servers[1]} at=apply seconds=0.04"] if self.point == "lagging" else []
        faults = ", ".join(f'"{fault}"' for fault in [*slow, *self.strikes])
        return given(*self.settings, *([f"inject.faults=[{faults}]"] if faults else []))

    @property
    def strikes(self) -> list[Strike]:
        """Who is killed by a fault on purpose."""
        if self.kind != "conservation":
            return []
        chance = random.Random(self.seed)
        return PLANS[self.pattern](self, chance) if self.pattern else self._at_point(chance)

    def _at_point(self, chance: random.Random) -> list[Strike]:
        """Copies are only rebuilt, and ranks only recover, after somebody else has died, early on."""
        if self.point == "lagging":
            return self._lagging(chance)
        visits = {"rename": (1, 1), "recover": (1, 1), "rebuild": (1, 3)}
        step = chance.randint(*visits.get(self.point, (5, 60)))
        victim, other, *_ = self.layout.ranks_with(POINTS[self.point])
        strikes = [Strike(victim, self.point, step)]
        if self.point in ("rebuild", "recover"):
            strikes.append(Strike(other, "apply" if self.point == "rebuild" else "compute", 40))
        return strikes

    def _lagging(self, chance: random.Random) -> list[Strike]:
        """One server, then two more while they bring the fourth up to date, which is slow."""
        first, _, *others = self.layout.servers
        step = chance.randint(2, 5)
        return [Strike(first, "applied", 20), *(Strike(rank, "rebuild", step) for rank in others)]


def _victims(run: Run, chance: random.Random, count: int) -> list[int]:
    """Ranks of any roles, as far as a whole copy, a data rank and a worker are left."""
    layout = run.layout
    servers = chance.sample(layout.servers, min(run.copies, run.servers) - 1)
    able = [*servers[:2], *chance.sample(layout.data, 1), *chance.sample(layout.workers, 2)]
    return chance.sample(able, count)


def _strike(run: Run, chance: random.Random, rank: int, step: int) -> Strike:
    """At a moment of one of its roles, about the `step`-th."""
    return Strike(rank, chance.choice(MOMENTS[run.layout.places[rank].roles[0]]), step + chance.randrange(8))


def _one(run: Run, chance: random.Random) -> list[Strike]:
    return [_strike(run, chance, rank, chance.choice(STEPS)) for rank in _victims(run, chance, 1)]


def _at_once(run: Run, chance: random.Random) -> list[Strike]:
    """Two that are the same in role, at the same moment, and sometimes one more later."""
    layout = run.layout
    pair = chance.choice([chance.sample(layout.servers, 2), chance.sample(layout.workers, 2), list(layout.data)])
    both = _strike(run, chance, pair[0], STEPS[0])
    later = [rank for rank in _victims(run, chance, 3) if rank not in pair and rank not in layout.servers]
    third = [_strike(run, chance, rank, STEPS[2]) for rank in later[: chance.randint(0, 1)]]
    return [both, replace(both, rank=pair[1]), *third]


def _recovering(run: Run, chance: random.Random) -> list[Strike]:
    """One, another while the others find together, and one that is left without any windows yet when they have."""
    first, *others = _victims(run, chance, chance.choice((2, 3)))
    # Everybody recovers twice then.
    return [_strike(run, chance, first, STEPS[0]), *(Strike(rank, "recover", n) for n, rank in enumerate(others, 1))]


def _one_after_another(run: Run, chance: random.Random) -> list[Strike]:
    victims = _victims(run, chance, chance.choice((2, 3)))
    return [_strike(run, chance, rank, step) for rank, step in zip(victims, STEPS, strict=False)]


def _rebuilding(run: Run, chance: random.Random) -> list[Strike]:
    """A server, then one that sends copies of what was lost with it, then perhaps a worker."""
    first, second = chance.sample(run.layout.servers, 2)
    strikes = [_strike(run, chance, first, STEPS[0]), Strike(second, "rebuild", chance.randint(1, 3))]
    return strikes + [_strike(run, chance, run.layout.workers[0], STEPS[2])] * chance.randint(0, 1)


def _every_server(run: Run, chance: random.Random) -> list[Strike]:
    """The last of them has nobody to prepare anything for, but applies."""
    return [Strike(rank, chance.choice(("apply", "applied")), chance.choice(STEPS)) for rank in run.layout.servers]


def draw(seed: int, kind: str = "") -> Run:
    """The training run of a seed: 8 to 10 ranks, one to three kills of anybody, as far as the job survives them."""
    chance, kind = random.Random(seed), kind or list(KINDS)[seed % len(KINDS)]
    servers, data = chance.choice((2, 3)), chance.choice((2, 3))
    ranks = chance.randint(max(8, servers + data + (4 if STRIPS in KINDS[kind] else 3)), 10)
    workers = ranks - servers - data
    victims = [("server", place) for place in range(min(3, servers) - 1)]
    victims += [("data", place) for place in range(data - 1)] + [("worker", place) for place in range(workers - 2)]
    chosen = chance.sample(victims, chance.randint(1, 3))
    moments = sorted(chance.randint(500, 6000) for _ in chosen)
    return Run(seed, kind, ranks, data, servers, tuple((*who, when) for who, when in zip(chosen, moments, strict=True)))


def point(name: str, seed: int, hosts: int = results.HOSTS) -> Run:
    """A conservation run with a kill at a named point; of four servers, one that is lost leaves copies to rebuild."""
    servers = 4 if name in ("rebuild", "lagging") else 3
    copies = 4 if name == "lagging" else 3
    return Run(seed, "conservation", 5 + servers, 2, servers, point=name, hosts=hosts, copies=copies)


PLANS = dict(zip(PATTERNS, (_one, _at_once, _one_after_another, _recovering, _rebuilding, _every_server), strict=True))


def wide(seed: int, pattern: str = "") -> Run:
    """The conservation run of a seed: codec, servers and staleness in turn, and how ranks die as evenly as can be."""
    block, place = divmod(seed, len(PACKED) * len(STALENESS))
    servers = SERVERS[(place + block) % len(SERVERS)]
    copies = servers if (place // 2 + block) % 2 else 3
    fitting = [name for name in PATTERNS if _fits(name, servers, copies)]
    pattern = pattern or fitting[(place + place // len(PACKED) + 2 * block) % len(fitting)]
    return Run(
        seed,
        "conservation",
        5 + servers,
        2,
        servers,
        point="wide",
        codec=PACKED[seed % len(PACKED)],
        staleness=STALENESS[seed % len(STALENESS)],
        copies=copies,
        pattern=pattern,
    )


def _fits(pattern: str, servers: int, copies: int) -> bool:
    """Copies are rebuilt where a server is left that has none; three kills take every server where there are three."""
    return servers > copies if pattern == "while rebuilding" else servers == 3 if pattern == "every server" else True


def design(runs: Sequence[Run]) -> str:
    """How often each value of each dimension, and each combination, is among these runs."""
    said = {
        "codec": Counter(run.codec for run in runs),
        "servers": Counter(run.servers for run in runs),
        "copies": Counter(run.copies for run in runs),
        "staleness": Counter(str(run.staleness) for run in runs),
        "killed": Counter(run.pattern for run in runs),
    }
    combinations = Counter((run.codec, run.servers, run.staleness) for run in runs)
    counts = f"{len(combinations)} of {len(PACKED) * len(SERVERS) * len(STALENESS)} combinations"
    told = [f"{name}: {', '.join(f'{key} {count}' for key, count in of.items())}" for name, of in said.items()]
    return "; ".join([f"wide runs: {counts}", *told])


def play(run: Run, mpi: Mpi, folder: Path, environment: dict[str, str] | None = None) -> tuple[Job, dict[int, float]]:
    """Runs it with its kills, until it has ended; and who was killed when."""
    job, killed = start(mpi, run.ranks, "train", *run.keys, folder=folder, environment=environment), {}
    try:
        for role, place, images in run.kills:
            job.until(lambda images=images: _images(job) >= images, f"{images} images", SECONDS)
            rank = run.layout.ranks_with(role)[place]
            killed[rank] = time.time()
            job.rank(rank).kill()
        return job.wait(SECONDS), killed | job.struck()
    finally:
        # Whoever interrupts us wants the job to end too.
        job.end()


def undisturbed(run: Run, mpi: Mpi, folder: Path) -> Job:
    """A run in step comes to the same weights on any layout: one rank alone, which nobody can disturb, says which."""
    return play(Run(run.seed, "sync", 1, 1, 1, hosts=1), mpi, folder)[0]


def _images(job: Job) -> int:
    """Trained on so far."""
    return max((line["images_trained"] for line in job.metrics()), default=0)


def check(run: Run, job: Job, killed: dict[int, float]) -> dict:
    """Everything that must be true; returns the figures of the run."""
    assert job.left_over() == [], job.said()
    outcome = _outcome(job)
    assert outcome in run.expected, f"{outcome}, not {' or '.join(run.expected)}\n{job.said()}"
    if outcome != "survived":
        return _told(run) | {"outcome": outcome, "to_next_push": [], "to_all": [], "job_seconds": round(job.seconds, 1)}
    summary, pushes = job.summary, job.summary["pushes"]
    assert pushes["acknowledged"] <= pushes["applied"] and pushes["short"] == 0, pushes
    if run.strikes:
        dead = {member for recovery in summary["recoveries"] for member in recovery["members"]}
        wanted = {strike.rank for strike in run.strikes}
        assert dead == wanted, f"{', '.join(map(str, run.strikes))}, and dead are {dead}"
        conserved(job.run, summary)
    elif run.kind.startswith("async"):
        assert summary["stopped_by"] == "target", summary["validation_accuracy"]
    return _told(run) | {
        "outcome": outcome,
        "recoveries": len(summary["recoveries"]),
        "accuracy": summary["test_accuracy"],
        "to_next_push": _since_kill(summary, killed, "seconds"),
        "to_all": _since_kill(summary, killed, "seconds_all"),
        "unacknowledged_of_dead": pushes["unacknowledged_of_dead"],
        "job_seconds": round(job.seconds, 1),
    }


def _told(run: Run) -> dict:
    """What a line of results says of a run before it is played."""
    said = {"seed": run.seed, "kind": run.kind, "point": run.point, "ranks": run.ranks, "kills": run.kills}
    if run.pattern:
        said |= {key: getattr(run, key) for key in ("codec", "servers", "copies", "pattern")}
        said |= {"staleness": str(run.staleness), "strikes": [str(strike) for strike in run.strikes]}
    return said


def _outcome(job: Job) -> str:
    """How a job has ended."""
    if (job.run / "DONE").exists():
        return "survived"
    failure = (job.summary or {}).get("failure", "")
    return "named end" if NAMED_END.search(failure) and job.returncode not in (0, 2) else f"failed: {failure}"


def _since_kill(summary: dict, killed: dict[int, float], key: str) -> list[float]:
    """Seconds from each loss, the first of several at once, until pushes were applied again."""
    losses = [loss for loss in summary["recoveries"] if loss[key] is not None and loss["members"]]
    return [round(loss["detected"] + loss[key] - min(killed[m] for m in loss["members"]), 3) for loss in losses]


def distance(job: Job, undisturbed: Job) -> float:
    """How far the weights of a run are from those of one in which nobody died."""
    return float(np.abs(weights(job.run / "weights.h5") - weights(undisturbed.run / "weights.h5")).max())


def wanted(options: argparse.Namespace) -> list[Run]:
    """The runs of all kinds, each from number `first` on; seeds of points and of wide runs count from 0."""
    before = options.first - 1
    runs = [draw(seed) for seed in range(options.first, options.first + options.runs)]
    runs += [point(name, seed) for name in options.point for seed in range(before, before + options.points)]
    return runs + [wide(seed) for seed in range(before, before + options.wide)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="training runs")
    parser.add_argument("--first", type=int, default=1, help="number of the first run of each kind, from 1")
    parser.add_argument("--points", type=int, default=5, help="conservation runs per named point")
    parser.add_argument("--point", choices=POINTS, nargs="*", default=list(POINTS), help="only these points")
    parser.add_argument("--wide", type=int, default=40, help="conservation runs over codecs, servers and staleness")
    parser.add_argument("--marathon", action="store_true", help="only one long run, through many kills")
    parser.add_argument("--kills", type=int, default=marathon.KILLS, help="of the marathon")
    parser.add_argument("--results", type=Path, help="file of results: runs that passed are not repeated")
    parser.add_argument(
        "--page", action="store_true", help="play nothing; write the tables in docs/explanation/failures.md"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    options = parser.parse_args()
    until, lines = time.monotonic() + 60 * options.minutes, results.read(options.results)
    if options.page:
        results.write(lines)
        return 0
    # Whoever ends us from outside wants the jobs and hosts to end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.marathon:
        line = marathon.run(_openmpi(), options.kills, options.first)
        results.add(options.results, line)
        return int("error" in line)
    runs = wanted(options)
    if options.wide:
        print(design(runs[-options.wide :]), flush=True)
    missing = [run for run in runs if not results.passed(lines, run.seed, run.kind, run.point)]
    for run in missing:
        if time.monotonic() < until:
            lines.append(_line(run, available()[0]))
            results.add(options.results, lines[-1])
    print(results.summary(lines), flush=True)
    return int(any(not results.passed(lines, run.seed, run.kind, run.point) for run in runs))


def _openmpi() -> Mpi:
    return next(mpi for mpi in available() if mpi.name == "openmpi")


def _line(run: Run, mpi: Mpi) -> dict:
    """Plays a run, prints its figures or what was wrong, and keeps the folder of one that failed."""
    folder = Path(tempfile.mkdtemp(prefix="adam_mpi-chaos-"))
    hosts = {"ADAM_MPI_HOSTS": os.environ["ADAM_MPI_HOSTS"]} if "ADAM_MPI_HOSTS" in os.environ else None
    try:
        job, killed = play(run, mpi, folder / "job", hosts)
        line = check(run, job, killed)
        if run.kind.startswith("sync"):
            line["distance"] = distance(job, undisturbed(run, mpi, folder / "undisturbed"))
            assert line["distance"] < 1e-4, line
        shutil.rmtree(folder)
    except (AssertionError, pytest.fail.Exception, LookupError) as error:
        line = _told(run) | {"error": str(error)[:2000], "kept": str(folder)}
    line["hosts"] = results.HOSTS
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
