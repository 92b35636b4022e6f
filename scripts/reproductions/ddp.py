"""Against PyTorch DDP (gloo, two processes) on the same cores: time to 99.0 % on MNIST, and images per second."""

import argparse
import json
import math
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import IO, Any

import _child
import _first
import _others
import _recipes
import _results
from _others import others
from _results import Clock, Results, heading, not_run, table
from _training import Training

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.base.machine import host_provenance

TARGET, EPOCHS, PROCESSES, RANKS, ROUNDS, WANTED = 0.99, 8, 2, 4, 10, 2.5
FINALISTS, TRIES = 6, (0, 11, 12, 13, 14)
"""Settings of each side that are tried with more seeds than the first: one that gets there by luck is not chosen."""
CANDIDATES = tomllib.loads(Path(__file__).with_name("ddp.toml").read_text())
"""Settings that each side is searched over, as many for one as for the other."""
PROGRAM = Path(__file__).with_name("_ddp_job.py")
SIDES = ("adam_mpi", "ddp", "ddp_compiled")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each side, in turns ({ROUNDS})")
    _results.arguments(parser)


def reproduce(options: argparse.Namespace) -> Iterator[str]:
    """First the search, then both sides in turns with the best of each."""
    kept, clock = _results.results(options, "ddp"), Clock.of(options)
    for job in _planned(kept, options.rounds):
        if kept.read(_name(job)):
            continue
        if clock.over:
            yield "time is up; the same command goes on"
            return
        settings = job["settings"] or best(kept, job["side"].removesuffix("_compiled"))
        result = kept.keep(_name(job), _measure(job["side"], settings, job["seed"], options.set))
        yield f"{_name(job)}: {_told(result)}"


def _planned(kept: Results, rounds: int) -> Iterator[dict[str, Any]]:
    """Jobs in order; those of the rounds take the best settings of the search, compiled DDP those of plain DDP."""
    for pair in zip(*(CANDIDATES[side] for side in SIDES[:2]), strict=True):
        for side, settings in zip(SIDES, pair, strict=False):
            yield {"side": side, "seed": TRIES[0], "settings": settings}
    for seed in TRIES[1:]:
        for pair in zip(*(finalists(kept, side) for side in SIDES[:2]), strict=True):
            for side, settings in zip(SIDES, pair, strict=False):
                yield {"side": side, "seed": seed, "settings": settings}
    for number in range(1, rounds + 1):
        for side in SIDES:
            yield {"side": side, "seed": number, "settings": None}


def _name(job: Mapping[str, Any]) -> str:
    settings = job["settings"]
    if settings is None:
        return f"{job['side']}-{job['seed']}"
    again = f"-seed{job['seed']}" if job["seed"] != TRIES[0] else ""
    return f"search-{job['side']}-" + "-".join(f"{name}{value}" for name, value in settings.items()) + again


def _tries(kept: Results, side: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = (kept.read(_name({"side": side, "seed": seed, "settings": settings})) for seed in TRIES)
    return [result for result in found if result]


def finalists(kept: Results, side: str) -> list[dict[str, Any]]:
    """The settings that get to the target first with the first seed, and are tried with others."""
    tried = [_tries(kept, side, settings) for settings in CANDIDATES[side]]
    reached = [results[0] for results in tried if results and results[0]["seconds_to_target"] is not None]
    if len(reached) < FINALISTS:
        raise UserError(f"{len(reached)} settings of {side} reached {TARGET:.1%} in {EPOCHS} epochs, of {FINALISTS}")
    return [result["settings"] for result in sorted(reached, key=estimate)[:FINALISTS]]


def best(kept: Results, side: str) -> dict[str, Any]:
    """The settings that get to the target first on average, by an estimate that other programs disturb little."""
    return min(finalists(kept, side), key=lambda settings: fmean(map(estimate, _tries(kept, side, settings))))


def estimate(result: Mapping[str, Any]) -> float:
    """Seconds to the target, or to the end without it, if every epoch had been as quick as the quickest."""
    ends = [0.0, *(seconds for seconds, *_ in result["curve"])]
    return (len(ends) - 1) * min(end - begin for begin, end in zip(ends, ends[1:], strict=False))


def _measure(side: str, settings: dict[str, Any], seed: int, more: list[str]) -> dict[str, Any]:
    share = others()
    found = _ours(settings, seed, more) if side == "adam_mpi" else _torch(side, settings, seed)
    to_target = next((seconds for seconds, accuracy, *_ in found["curve"] if accuracy >= TARGET), None)
    return {"side": side, "seed": seed, "settings": settings, "seconds_to_target": to_target, **found} | {
        "others": share(),
        "machine": host_provenance(),
    }


def _ours(settings: dict[str, Any], seed: int, more: list[str]) -> dict[str, Any]:
    """A job that is timed is neither cut nor kept: every call is one of its own."""
    with tempfile.TemporaryDirectory() as folder:
        first = _first.settings(settings["first"], seed, config.load(recipe(settings)), Path(folder))
        training, begun = Training(Path(folder), Clock(math.inf)), time.perf_counter()
        run = training.run(recipe(settings), [f"run.seed={seed}", *first, *more], settings.get("ranks", RANKS))
        assert run is not None
        summary, curve = run.summary, run.curve
    start_up = time.perf_counter() - begun - summary["seconds"]
    figures = {"images_per_second": summary["images_per_second"], "delay": summary["delay"]["mean"]}
    return {"curve": curve, "start_up": start_up, "compile": 0.0, **figures}


def recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a job; a step of an asynchronous server is a push."""
    batch, bound = settings["batch"], settings.get("bound", math.inf)
    images = settings.get("push", batch)
    return {
        **_recipes.TOLD["sets"]["mnist"],
        "train": {"batch": batch, "epochs": EPOCHS, "target": TARGET, "test": False},
        "optimizer": {
            "learning_rate": settings["rate"],
            "momentum": settings["momentum"],
            "schedule": "constant",
            "ema": (images if math.isinf(bound) else batch) / settings["averaged"],
        },
        "push": {"images": images},
        "pull": {"images": images},
        "consistency": {"staleness": float(bound)},
    }


def _torch(side: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    mode = "compile" if side == "ddp_compiled" else "eager"
    how = settings["batch"], settings["rate"], settings["momentum"], settings["batch"] / settings["averaged"]
    words = [PROCESSES, *how, settings["first"], TARGET, EPOCHS, seed, mode]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        status = _child.run([sys.executable, PROGRAM, *map(str, words)], 900, stdout=output, stderr=errors)
        if status:
            raise UserError(f"PyTorch DDP failed ({status}): {_last_line(errors)}")
        told = json.loads(_last_line(output))
    return told | {"images_per_second": median(rate for *_, rate in told["curve"])}


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    return (file.read().strip().splitlines() or [""])[-1]


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
    yield from _about()
    yield "| | seconds to 99.0 % | of them distorting | images/s | start-up, s | compile, s | settings | rounds |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for side, rounds in found.items():
        yield f"| {side} | {_row(rounds)} |"
    yield ""
    yield from _verdict(found, fmean(map(estimate, _tries(kept, "ddp", found["ddp"][0]["settings"]))))
    yield ""
    yield from _search(kept)
    yield from _in_step(kept)


def _in_step(kept: Results) -> Iterator[str]:
    """With bound 0 adam_mpi trains as DDP does: the same settings on both sides, from either side's first weights."""
    rows = []
    for settings in CANDIDATES["adam_mpi"]:
        other = {name: settings[name] for name in CANDIDATES["ddp"][0]}
        pair = [_tries(kept, side, same) for side, same in (("adam_mpi", settings), ("ddp", other))]
        if settings.get("bound") == 0 and all(pair):
            curves = [", ".join(f"{accuracy:.2%}" for _, accuracy, *_ in tried[0]["curve"]) for tried in pair]
            rows.append([f"{settings['first']}, {settings['rate']}, {settings['batch']}", *curves])
    if rows:
        yield (
            "With bound 0 adam_mpi takes the steps that DDP takes, in an order of images of its own. Held-out "
            "accuracy, epoch "
            "by epoch:"
        )
        yield ""
        yield from table([["first weights of, rate, batch", "adam_mpi", "DDP"], *rows])


def _about() -> Iterator[str]:
    yield (
        "The paper's MNIST network with the distortions of Table 1, SGD at a constant rate, until a running "
        "average of the "
        f"weights has {TARGET:.1%} of the held-out images right. Each side was searched over "
        f"{len(CANDIDATES['ddp'])} settings, "
        f"the {FINALISTS} quickest of each with {len(TRIES)} seeds; DDP is gloo with {PROCESSES} processes of one "
        "thread, "
        "channels-last. Rounds are in turns; medians:"
    )
    yield ""


def _verdict(found: Mapping[str, list[dict[str, Any]]], searched: float) -> Iterator[str]:
    """Yield how many times as fast adam_mpi is, by several ways to count; `searched`: seconds that DDP's "
    "settings took."""
    ours, *theirs = (median(_seconds(rounds)) for rounds in found.values())
    means = [fmean(_seconds(rounds)) for rounds in found.values()]
    for_nothing = [
        median(seconds - told["distorting"] for seconds, told in zip(_seconds(rounds), rounds, strict=True))
        for side, rounds in found.items()
        if side != "adam_mpi"
    ]
    rates = {side: median(told["images_per_second"] for told in rounds) for side, rounds in found.items()}
    faster = rates["adam_mpi"] / max(rate for side, rate in rates.items() if side != "adam_mpi")
    yield from table(
        [
            ["adam_mpi against the better of the two", "times as fast"],
            [f"seconds to the target, medians (wanted: {WANTED})", f"{min(theirs) / ours:.1f}"],
            ["by means instead of medians", f"{min(means[1:]) / means[0]:.1f}"],
            ["if DDP's images were distorted for nothing", f"{min(for_nothing) / ours:.1f}"],
            [f"against the {searched:.1f} s of the search, its quickest epoch for all", f"{searched / means[0]:.1f}"],
            ["images per second", f"{faster:.1f}"],
        ]
    )
    epochs = ", ".join(f"{side} {_epochs(rounds)}" for side, rounds in found.items())
    others = _others.told([told["others"] for rounds in found.values() for told in rounds])
    yield f"Epochs to the target, round by round: {epochs}; {others}."


def _search(kept: Results) -> Iterator[str]:
    """The log: what was tried."""
    yield "The search; the estimate takes the quickest epoch for all, the mean of it is over all seeds that were tried:"
    yield ""
    yield "| settings | epochs to 99.0 %, by seed | mean estimate, s | images/s |"
    yield "| --- | --- | --- | --- |"
    for side, candidates in CANDIDATES.items():
        for settings in candidates:
            if tried := _tries(kept, side, settings):
                rate = median(result["images_per_second"] for result in tried)
                told = f"{_epochs(tried)} | {fmean(map(estimate, tried)):.1f}"
                yield f"| {side}: {_listed(settings)} | {told} | {rate:,.0f} |"
    yield ""


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _epochs(rounds: list[dict[str, Any]]) -> str:
    """A dash: not reached in as many as there were."""
    return "/".join(str(len(told["curve"])) if told["seconds_to_target"] else "-" for told in rounds)


def _rounds(kept: Results, side: str) -> list[dict[str, Any]]:
    found = [json.loads(file.read_text()) for file in kept.folder.glob(f"{side}-[0-9]*.json")]
    return sorted(found, key=lambda told: told["seed"])


def _seconds(rounds: list[dict[str, Any]]) -> list[float]:
    """A round that did not get there counts as all its time."""
    return [told["seconds_to_target"] or told["curve"][-1][0] for told in rounds]


def _row(rounds: list[dict[str, Any]]) -> str:
    def middle(name: str) -> float:
        return median(told[name] for told in rounds)

    distorting = f"{middle('distorting'):.1f}" if "distorting" in rounds[0] else "beside training"
    return (
        f"{median(_seconds(rounds)):.1f} | {distorting} | {middle('images_per_second'):,.0f} | "
        f"{middle('start_up'):.1f} | {middle('compile'):.1f} | {_listed(rounds[0]['settings'])} | {len(rounds)}"
    )
