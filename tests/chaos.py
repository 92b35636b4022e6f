"""Chaos: whole jobs whose ranks are killed at seeded moments, and what must be true of them afterwards.

Two kinds of runs. In a *training* run ranks are killed from outside at random moments; it must reach its accuracy, and
a synchronous one the weights of an undisturbed run. In a *conservation* run every push adds exactly 1 to every
parameter, and ranks are killed at named points of the program; in the end every weight is the number of acknowledged
pushes.

    scripts/chaos                 # all of it; see there
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import chaos_results as results
import h5py
import numpy as np
import pytest
from launch import Job, Mpi, available, given, start
from test_train import SMOOTH

from adam_mpi.cluster.layout import Layout, arrange
from adam_mpi.config import load
from adam_mpi.durable import slots
from adam_mpi.worker.conservation import counted, left_copies

SECONDS = 200
# Ten ranks on two loaded cores have long delays: at the default rate such a run may diverge.
TARGET = ["train.epochs=20", "train.target=0.85", "optimiser.rate=0.01"]
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
    "data.images=3200", "train.epochs=3", "server.shard=12000", "observe.interval=0.5", "inject.conserve=true",
    "optimiser.rate=1", "optimiser.schedule=constant", "store.interval=0.5",
]  # fmt: skip
# Where a rank is killed, whose it is, and what has to happen first for the point to be reached.
POINTS = {
    "prepare": "server",
    "applied": "server",
    "rename": "data",
    "rebuild": "server",
    "recover": "worker",
}


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

    @property
    def expected(self) -> str:
        """Up to two of three servers and anybody else may die; a run that loses more begins again from its store."""
        lost = sum(role == "server" for role, _, _ in self.kills)
        return "survived" if lost < min(3, self.servers) else "restarted"

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
        if self.point:
            return [*CONSERVATION, *common, f"push.protocol={'factor' if self.factors else 'delta'}"]
        return [*TRAINING, *common, *KINDS[self.kind]]

    @property
    def keys(self) -> list[str]:
        faults = [f"inject.faults=[{', '.join(self.faults)}]"] if self.point else []
        return given(*self.settings, *faults)

    @property
    def faults(self) -> list[str]:
        """Copies are only rebuilt, and ranks only recover, after somebody else has died, early on."""
        chance = random.Random(self.seed)
        visits = {"rename": (1, 1), "recover": (1, 1), "rebuild": (1, 3)}
        step = chance.randint(*visits.get(self.point, (5, 60)))
        victim, other, *_ = self.layout.having(POINTS[self.point])
        faults = [f'"kill rank={victim} at={self.point} step={step}"']
        if self.point in ("rebuild", "recover"):
            faults.append(f'"kill rank={other} at={"apply" if self.point == "rebuild" else "compute"} step=40"')
        return faults


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
    servers = 4 if name == "rebuild" else 3
    return Run(seed, "conservation", 5 + servers, 2, servers, point=name, hosts=hosts)


def play(run: Run, mpi: Mpi, folder: Path, environment: dict[str, str] | None = None) -> tuple[Job, dict[int, float]]:
    """Runs it with its kills, until it has ended; and who was killed when."""
    job, killed = start(mpi, run.ranks, "train", *run.keys, folder=folder, environment=environment), {}
    try:
        for role, place, images in run.kills:
            job.until(lambda images=images: _images(job) >= images, f"{images} images", SECONDS)
            rank = run.layout.having(role)[place]
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
    assert (job.run / "DONE").exists() and job.left_over() == [], job.said()
    summary, pushes = job.summary, job.summary["pushes"]
    assert pushes["acknowledged"] <= pushes["applied"] and pushes["short"] == 0, pushes
    if run.point:
        dead = {member for recovery in summary["recoveries"] for member in recovery["members"]}
        assert len(dead) == len(run.faults), f"{run.faults}, and dead are {dead}"
        conserved(job.run, summary)
    elif run.kind.startswith("async"):
        assert summary["stopped_by"] == "target", summary["validation_accuracy"]
    return {
        "seed": run.seed, "kind": run.kind, "point": run.point, "ranks": run.ranks, "expected": run.expected,
        "kills": run.kills, "recoveries": len(summary["recoveries"]), "accuracy": summary["test_accuracy"],
        "to_next_push": _since_kill(summary, killed, "seconds"), "to_all": _since_kill(summary, killed, "seconds_all"),
        "unacknowledged_of_dead": pushes["unacknowledged_of_dead"], "job_seconds": round(job.seconds, 1),
    }  # fmt: skip


def _since_kill(summary: dict, killed: dict[int, float], key: str) -> list[float]:
    """Seconds from each loss, the first of several at once, until pushes were applied again."""
    losses = [loss for loss in summary["recoveries"] if loss[key] is not None and loss["members"]]
    return [round(loss["detected"] + loss[key] - min(killed[m] for m in loss["members"]), 3) for loss in losses]


def conserved(directory: Path, summary: dict) -> None:
    """The oracle: the weights of every copy, in the end and in the store, against acknowledgements counted outside.

    Pushes that a dead pusher had under way may be in some shards and not in others.
    """
    dead = {member for recovery in summary["recoveries"] for member in recovery["members"]}
    told = counted(directory)
    least = sum(acknowledged for _, acknowledged in told.values())
    most = least + sum(pushed - acknowledged for member, (pushed, acknowledged) in told.items() if member in dead)
    assert all(pushed == acknowledged for member, (pushed, acknowledged) in told.items() if member not in dead), told
    copies = left_copies(directory)
    held = {"weights": weights(directory / "weights.h5"), "store": stored(directory)}
    held |= {f"shard {shard}": np.concatenate(same) for shard, same in copies.items()}
    for name, values in held.items():
        assert least <= values.min() and values.max() <= most, (name, values.min(), values.max(), least, most)
        assert np.array_equal(values, np.round(values)), f"{name}: something else than whole pushes was added"
    assert sum(same[0].size for same in copies.values()) == held["weights"].size
    for shard, same in copies.items():
        assert len(same) >= min(2, summary["ranks"]["server"]), f"shard {shard} has {len(same)} copies"
        assert all(np.array_equal(other, same[0]) for other in same[1:]), f"shard {shard}: its copies differ"


def weights(path: Path) -> np.ndarray:
    with h5py.File(path) as file:
        found: list[np.ndarray] = []
        file.visititems(lambda _, item: found.append(item[()].ravel()) if _is_tensor(item) else None)
    return np.concatenate(found)


def _is_tensor(item: h5py.HLObject) -> bool:
    return isinstance(item, h5py.Dataset) and item.dtype == np.float32


def stored(directory: Path) -> np.ndarray:
    """The weights in the newest store."""
    folder = max((directory / "store").glob("[0-9]*"))
    pieces = [piece for path in sorted(folder.glob("server-*.h5")) for piece in slots.read(path).written]
    return np.concatenate([piece.values["weights"] for piece in pieces])


def distance(job: Job, undisturbed: Job) -> float:
    """How far the weights of a run are from those of one in which nobody died."""
    return float(np.abs(weights(job.run / "weights.h5") - weights(undisturbed.run / "weights.h5")).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="training runs")
    parser.add_argument("--first", type=int, default=1, help="seed of the first")
    parser.add_argument("--points", type=int, default=5, help="conservation runs per named point")
    parser.add_argument("--point", choices=POINTS, nargs="*", default=list(POINTS), help="only these points")
    parser.add_argument("--results", type=Path, help="file of results: runs that passed are not repeated")
    parser.add_argument("--page", action="store_true", help="play nothing; write the tables in docs/FAILURES.md")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    options = parser.parse_args()
    until, lines = time.monotonic() + 60 * options.minutes, results.read(options.results)
    if options.page:
        results.write(lines)
        return 0
    # Whoever ends us from outside wants the jobs and hosts to end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs = [draw(seed) for seed in range(options.first, options.first + options.runs)]
    runs += [point(name, seed) for name in options.point for seed in range(options.points)]
    missing = [run for run in runs if not results.passed(lines, run.seed, run.kind, run.point)]
    for run in missing:
        if time.monotonic() < until:
            lines.append(_line(run, available()[0]))
            results.add(options.results, lines[-1])
    print(results.summary(lines), flush=True)
    return int(any(not results.passed(lines, run.seed, run.kind, run.point) for run in runs))


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
        line = {"seed": run.seed, "kind": run.kind, "point": run.point, "error": str(error)[:2000], "kept": str(folder)}
    line["hosts"] = results.HOSTS
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main())
