"""The acoustic model of the DistBelief paper, scaled down: four sigmoid layers, features with a known least error."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import _frames
import _results
from _results import Clock, Results, heading, not_run
from _search import MODES, NAMES
from _spread import compared, spread
from _training import Training

UNITS, LAYERS, EPOCHS, SEEDS = 256, 4, 8, 3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, help=f"instead of {EPOCHS}; needs -o")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many ({SEEDS})")
    _results.arguments(parser)


def reproduce(options: argparse.Namespace) -> Iterator[str]:
    kept = _results.results(options, "speech", changed=bool(options.epochs))
    training = Training(options.folder, Clock.of(options))
    file = training.runs / "speech.npz"
    least = _frames.write(file)
    for seed in range(1, options.seeds + 1):
        for mode, staleness in MODES.items():
            if kept.read(f"{mode}-{seed}"):
                continue
            settings = [f"consistency.staleness={staleness}", f"run.seed={seed}"]
            run = training.run(recipe(file, options.epochs or EPOCHS), [*settings, *options.set])
            if run is None:
                yield "time is up; the same command goes on"
                return
            summary = run.summary
            result = {"mode": mode, "seed": seed, "least_error": least, "error": 1 - summary["test_accuracy"]}
            figures = ("epochs", "images_per_second", "seconds", "provenance")
            kept.keep(f"{mode}-{seed}", result | {figure: summary[figure] for figure in figures})
            yield f"{mode} seed {seed}: error {result['error']:.4f}, least possible {least:.4f}"


def recipe(file: Path, epochs: int) -> dict[str, Any]:
    """Plain descent: Adagrad, as in that paper, is much slower here at any rate that learns."""
    layers = [entry for _ in range(LAYERS) for entry in ({"kind": "dense", "units": UNITS}, "sigmoid")]
    return {
        "data": {"set": str(file), "transform": {"normalize": True}},
        "model": {"layers": [*layers, {"kind": "dense", "units": _frames.CLASSES}]},
        "train": {"epochs": epochs},
        "optimizer": {"learning_rate": 0.5, "warmup": 0.1},
    }


def page(folder: Path) -> Iterator[str]:
    kept = Results(folder / "speech")
    yield from heading("Speech-like features", "speech")
    found = {mode: [kept.read(file.stem) for file in sorted(kept.folder.glob(f"{mode}-*.json"))] for mode in MODES}
    if not any(found.values()):
        yield from not_run()
        return
    yield (
        f"{LAYERS} sigmoid layers of {UNITS} units on {_frames.FEATURES} generated features of {_frames.CLASSES} "
        "states, trained by plain descent. How the features were drawn is known, so the least error that anything can "
        "have on these test frames is known too."
    )
    yield ""
    yield "| | error on the test part, % | least possible, % | seeds | epochs | images/s |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for mode, seeds in found.items():
        if seeds:
            errors, first = [seed["error"] for seed in seeds], seeds[0]
            told = f"{spread(errors, 2, 100)} | {100 * first['least_error']:.2f} | {len(seeds)} | {first['epochs']}"
            yield f"| {NAMES[mode]} | {told} | {first['images_per_second']:,.0f} |"
    yield ""
    errors = {mode: [100 * seed["error"] for seed in seeds] for mode, seeds in found.items()}
    if all(errors.values()):
        least = 100 * found["async"][0]["least_error"]
        above = ", ".join(f"{NAMES[mode]} {fmean(values) - least:.1f} %" for mode, values in errors.items())
        yield f"Above the least possible error: {above}. {compared(*NAMES.values(), *errors.values(), _frames.TEST)}"
        yield ""
