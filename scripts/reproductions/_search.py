"""The search for a recipe: every candidate in every mode for a few epochs, judged by images of the training set that
are held out. The test set is not evaluated."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import _recipes
import tomli_w
from _results import Results
from _training import Run, Training

MODES = {"async": "inf", "sync": "0"}
"""Of training: how stale it may be, unless an asynchronous recipe sets a bound."""
NAMES = {"async": "asynchronous", "sync": "synchronous"}
EPOCHS, HELD_OUT, LAST = 12, 1 / 6, 3
"""Epochs of a candidate, the part of the training set that judges it, and the epochs that count."""


def search(options: argparse.Namespace, results: Results, training: Training) -> Iterator[str]:
    """Modes alternate, so that both have had the same budget wherever the search is cut."""
    candidates = _recipes.candidates(options.data)
    if options.only:
        candidates = {name: candidates[name] for name in options.only}
    settings = [f"train.epochs={options.epochs or EPOCHS}", f"data.validation={HELD_OUT}", "train.test=false"]
    log = results.read("search")
    for name, recipe in candidates.items():
        for mode in MODES:
            if f"{mode} {name}" in log:
                continue
            run = training.run(recipe, [f"consistency.staleness={staleness(recipe, mode)}", *settings, *options.set])
            if run is None:
                yield "time is up; the same command goes on"
                return
            log[f"{mode} {name}"] = _entry(mode, name, run)
            results.keep("search", log)
            yield f"{mode} {name}: {log[f'{mode} {name}']['score']:.4f} of the held-out images"
    for mode in MODES:
        file = results.folder / f"{mode}.toml"
        best = choose(log, mode)
        _write(file, candidates[best], mode, log[f"{mode} {best}"]["score"], best)
        yield f"{mode}: {best}, written to {file}"
    yield "commit both recipes before `scripts/reproduce table1`"


def staleness(recipe: Mapping[str, Any], mode: str) -> str:
    """A recipe may bound asynchronous training; synchronous training stays what it is."""
    bound = recipe.get("consistency", {}).get("staleness")
    return MODES[mode] if mode == "sync" or bound is None else str(bound)


def _entry(mode: str, name: str, run: Run) -> dict[str, Any]:
    summary, accuracies = run.summary, [round(accuracy, 6) for _, accuracy in run.curve]
    figures = ("epochs", "images", "images_per_second", "seconds", "validation_loss")
    return {
        "mode": mode,
        "candidate": name,
        "score": fmean(accuracies[-LAST:]),
        "accuracies": accuracies,
        **{figure: summary[figure] for figure in figures},
        "delay": summary["delay"]["mean"],
        "test_evaluated": "test_accuracy" in summary,
        "provenance": summary["provenance"],
    }


def choose(log: Mapping[str, dict[str, Any]], mode: str) -> str:
    """The candidate with the best mean accuracy over its last epochs; of equals the one with the smaller loss."""
    found = [entry for entry in log.values() if entry["mode"] == mode]
    return max(found, key=lambda entry: (entry["score"], -entry["validation_loss"]))["candidate"]


def _write(file: Path, recipe: Mapping[str, Any], mode: str, score: float, name: str) -> None:
    head = f"# Chosen by `scripts/reproduce table1 search`: candidate {name}, {score:.4f} of the held-out images.\n"
    whole = _recipes.merged(recipe, {"consistency": {"staleness": float(staleness(recipe, mode))}})
    file.write_text(f"{head}\n{tomli_w.dumps(whole)}")


def told(data: str, log: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """For people, as Markdown."""
    yield (
        f"Recipes were chosen among the same candidates for both modes by the accuracy on {HELD_OUT:.0%} of the "
        "training "
        f"set, held out, over the last {LAST} of {next(iter(log.values()))['epochs']} epochs; the test set was "
        "not looked at. "
        f"The log is [search.json](../results/{data}/search.json)."
    )
    yield ""
    yield "| candidate | rate, momentum, batch | bound | " + ", % | ".join(NAMES.values()) + ", % | delay |"
    yield "| --- | --- | --- | --- | --- | --- |"
    candidates = _recipes.candidates(data)
    for name in dict.fromkeys(entry["candidate"] for entry in log.values()):
        recipe, cells = candidates[name], [log.get(f"{mode} {name}") for mode in MODES]
        step = f"{recipe['optimizer']['learning_rate']}, {recipe['optimizer']['momentum']}, {recipe['train']['batch']}"
        scores = " | ".join(f"{100 * cell['score']:.3f}" if cell else "" for cell in cells)
        delay = f"{cells[0]['delay']:.1f}" if cells[0] else ""
        yield f"| {name} | {step} | {recipe.get('consistency', {}).get('staleness', 'none')} | {scores} | {delay} |"
    yield ""
