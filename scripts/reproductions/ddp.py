"""Against PyTorch DDP (gloo, two processes) on the same cores: time to 99.0 % on MNIST, and images per second."""

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import _others
import _recipes
import _results
from _others import others
from _results import Clock, Results, heading, not_run
from _training import Training

from adam_mpi.errors import UserError
from adam_mpi.observe.provenance import machine

TARGET, EPOCHS, PROCESSES, ROUNDS, WANTED = 0.99, 12, 2, 3, 2.5
STEPS, BATCHES, BOUND = ((0.05, 0.9), (0.2, 0.0)), (64, 128, 256), 2
"""What each side is searched over: rate and momentum, and batch. Momentum and the delay of pushes multiply, so adam_mpi
has a bound on staleness where there is momentum, and none elsewhere."""
AVERAGED = 32_000
"""Images that the weights which are evaluated are averaged over."""
PROGRAM = Path(__file__).with_name("_ddp_job.py")
SIDES = ("adam_mpi", "ddp", "ddp_compiled")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each side, in turns ({ROUNDS})")
    _results.arguments(parser)


def reproduce(options: argparse.Namespace) -> Iterator[str]:
    """First the search, then both sides in turns with the best of each."""
    kept, clock = _results.results(options, "ddp"), Clock.of(options)
    # A job that is timed is not cut.
    training = Training(options.folder, Clock(math.inf))
    for job in _planned(options.rounds):
        if kept.read(_name(job)):
            continue
        if clock.over:
            yield "time is up; the same command goes on"
            return
        settings = job["settings"] or best(kept, job["side"].removesuffix("_compiled"))
        result = kept.keep(_name(job), _measure(job["side"], settings, job["seed"], training, options.set))
        yield f"{_name(job)}: {_told(result)}"


def _planned(rounds: int) -> Iterator[dict[str, Any]]:
    """Jobs in order; those of the rounds take the best settings of the search, compiled DDP those of plain DDP."""
    for (rate, momentum), batch in itertools.product(STEPS, BATCHES):
        for side in SIDES[:2]:
            yield {"side": side, "seed": 0, "settings": {"rate": rate, "momentum": momentum, "batch": batch}}
    for number in range(1, rounds + 1):
        for side in SIDES:
            yield {"side": side, "seed": number, "settings": None}


def _name(job: Mapping[str, Any]) -> str:
    settings = job["settings"]
    if settings is None:
        return f"{job['side']}-{job['seed']}"
    return f"search-{job['side']}-" + "-".join(f"{name}{value}" for name, value in settings.items())


def best(kept: Results, side: str) -> dict[str, Any]:
    """The settings that reached the target first."""
    found = [json.loads(file.read_text()) for file in sorted(kept.folder.glob(f"search-{side}-*.json"))]
    reached = [result for result in found if result["seconds_to_target"] is not None]
    if not reached:
        raise UserError(f"no setting of {side} reached {TARGET:.1%} in {EPOCHS} epochs")
    return min(reached, key=lambda result: result["seconds_to_target"])["settings"]


def _measure(
    side: str, settings: dict[str, Any], seed: int, training: Training, more: list[str]
) -> dict[str, Any]:
    share = others()
    found = _ours(settings, seed, training, more) if side == "adam_mpi" else _torch(side, settings, seed)
    to_target = next((seconds for seconds, accuracy, *_ in found["curve"] if accuracy >= TARGET), None)
    return {"side": side, "seed": seed, "settings": settings, "seconds_to_target": to_target, **found} | {
        "others": share(), "machine": machine()
    }  # fmt: skip


def _ours(settings: dict[str, Any], seed: int, training: Training, more: list[str]) -> dict[str, Any]:
    batch, momentum = settings["batch"], settings["momentum"]
    recipe = {
        **_recipes.TOLD["sets"]["mnist"],
        "train": {"batch": batch, "epochs": EPOCHS, "target": TARGET, "test": False},
        "optimiser": {
            "rate": settings["rate"], "momentum": momentum, "schedule": "constant", "average": batch / AVERAGED,
        },
        "push": {"images": batch}, "pull": {"images": batch},
        "consistency": {"staleness": float(BOUND) if momentum else math.inf},
    }  # fmt: skip
    begun = time.perf_counter()
    run = training.run(recipe, [f"run.seed={seed}", *more])
    assert run is not None
    summary = run.summary
    start_up = max(0.0, time.perf_counter() - begun - summary["seconds"])
    return {"curve": run.curve, "images_per_second": summary["images_per_second"], "start_up": start_up, "compile": 0.0}


def _torch(side: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    mode = "compile" if side == "ddp_compiled" else "eager"
    how = settings["batch"], settings["rate"], settings["momentum"], settings["batch"] / AVERAGED
    words = [PROCESSES, *how, TARGET, EPOCHS, seed, mode]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"PyTorch DDP failed: {done.stderr.strip().splitlines()[-1]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return told | {"images_per_second": median(rate for *_, rate in told["curve"])}


def _told(result: Mapping[str, Any]) -> str:
    seconds = result["seconds_to_target"]
    reached = "did not get there" if seconds is None else f"{seconds:.1f} s to {TARGET:.1%}"
    return f"{reached}, {result['images_per_second']:,.0f} images/s, start-up {result['start_up']:.1f} s"


def page(folder: Path) -> Iterator[str]:
    kept = Results(folder / "ddp")
    yield from heading("Against PyTorch DDP", "ddp")
    found = {side: _rounds(kept, side) for side in SIDES}
    if not all(found.values()):
        yield from not_run()
        return
    yield (
        "The paper's MNIST network with the distortions of Table 1, SGD at a constant rate, until a running average of "
        f"the weights has {TARGET:.1%} of the held-out images right. Each side was searched over the same "
        f"{len(STEPS) * len(BATCHES)} choices of rate, momentum and batch; adam_mpi is asynchronous with two replicas, "
        f"with a bound of {BOUND} clocks where there is momentum. DDP: gloo, {PROCESSES} processes of one thread, "
        "channels-last, plain and by `torch.compile`; its images lie in memory as float32, distorted by adam_mpi's "
        "code ahead of time, which is not counted, while adam_mpi distorts on the same cores as it trains. Rounds are "
        "in turns; the medians:"
    )
    yield ""
    yield "| | seconds to 99.0 % | images/s | start-up, s | compile, s | rate, momentum, batch | rounds |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for side, rounds in found.items():
        yield f"| {side} | {_row(rounds)} |"
    yield ""
    ours, *theirs = (median(_seconds(rounds)) for rounds in found.values())
    yield (
        f"adam_mpi gets there {min(theirs) / ours:.1f} times as fast as the better of the two (wanted: {WANTED}); "
        f"{_others.told([told['others'] for rounds in found.values() for told in rounds])}."
    )
    yield ""


def _rounds(kept: Results, side: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(kept.folder.glob(f"{side}-[0-9]*.json"))]


def _seconds(rounds: list[dict[str, Any]]) -> list[float]:
    """A round that did not get there counts as all its time."""
    return [told["seconds_to_target"] or told["curve"][-1][0] for told in rounds]


def _row(rounds: list[dict[str, Any]]) -> str:
    middle = {name: median(told[name] for told in rounds) for name in ("images_per_second", "start_up", "compile")}
    settings = rounds[0]["settings"]
    return (
        f"{median(_seconds(rounds)):.1f} | {middle['images_per_second']:,.0f} | {middle['start_up']:.1f} | "
        f"{middle['compile']:.1f} | {', '.join(map(str, settings.values()))} | {len(rounds)}"
    )
