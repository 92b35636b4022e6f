"""The paper's Table 1: its MNIST network, asynchronous and synchronous, several seeds of each."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import _recipes
import _results
from _results import ROOT, Clock, Results, heading
from _results import table as markdown_table
from _search import EPOCHS, MODES, NAMES, search, told
from _spread import compared, spread
from _training import Run, Training

from adam_mpi.base.errors import UserError

SEEDS = 5
PAPER = {"Goodfellow et al.": 99.55, "Adam": 99.63, "Adam, synchronous": 99.39}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "step",
        nargs="?",
        choices=("search", "seeds"),
        default="seeds",
        help="search: choose the recipes; seeds (default): train with them, and look at the test set",
    )
    parser.add_argument("--data", choices=_recipes.SETS, default="mnist")
    parser.add_argument("--epochs", type=int, help=f"other than the recipe's (in a search {EPOCHS}); needs -o")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many ({SEEDS})")
    parser.add_argument("--mode", choices=MODES, help="train seeds of this one only (both)")
    parser.add_argument("--only", action="append", metavar="CANDIDATE", help="search among these only; needs -o")
    _results.arguments(parser)


def reproduce(options: argparse.Namespace) -> Iterator[str]:
    kept = _results.results(options, options.data, changed=bool(options.epochs or options.only))
    training = Training(options.folder, Clock.of(options))
    if options.step == "search":
        yield from search(options, kept, training)
        return
    yield from _seeds(options, kept, training)
    yield from table(kept)


def _seeds(options: argparse.Namespace, kept: Results, training: Training) -> Iterator[str]:
    """Modes alternate, so that both are there when it is cut."""
    for seed in range(1, options.seeds + 1):
        for mode in [options.mode] if options.mode else MODES:
            if kept.read(f"{mode}-{seed}"):
                continue
            file = kept.folder / f"{mode}.toml"
            if not file.exists():
                raise UserError(f"{file} is not there; first: scripts/reproduce table1 search --data {options.data}")
            commit = _results.commit_of(file) if file.is_relative_to(ROOT) else ""
            settings = ["data.validation=0", f"run.seed={seed}"]
            settings += [f"train.epochs={options.epochs}"] if options.epochs else []
            run = training.run(_recipes.read(file), [*settings, *options.set])
            if run is None:
                yield "time is up; the same command goes on"
                return
            result = kept.keep(f"{mode}-{seed}", _result(mode, seed, commit, run))
            yield f"{mode} seed {seed}: {result['test_accuracy']:.4f} in {result['seconds']:.0f} s"


def _result(mode: str, seed: int, commit: str, run: Run) -> dict[str, Any]:
    summary = run.summary
    figures = (
        "test_accuracy",
        "test_loss",
        "train_loss",
        "epochs",
        "images",
        "images_per_second",
        "seconds",
        "resumed",
        "ranks",
    )
    return {
        "mode": mode,
        "seed": seed,
        "recipe": f"{mode}.toml",
        "recipe_commit": commit,
        **{figure: summary[figure] for figure in figures},
        "delay": summary["delay"],
        "staleness": summary["staleness"]["mean"],
        "cpu_seconds": round(sum(summary["cpu_seconds"].values()), 1),
        "provenance": summary["provenance"],
    }


def table(kept: Results) -> Iterator[str]:
    """As Markdown; the paper's rows are about MNIST."""
    found = {mode: _read(kept, mode) for mode in MODES}
    if not any(found.values()):
        return
    yield "| | test accuracy, % | seeds | epochs | seconds | images/s | delay of a push, mean (most) | lead |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    if _is_the_papers(kept):
        yield from (f"| {name}, paper | {accuracy} | | | | | | |" for name, accuracy in PAPER.items())
    for mode, seeds in found.items():
        if seeds:
            yield f"| {NAMES[mode]}, {seeds[0]['ranks']['replicas']} replicas | {_row(seeds)} |"
    yield ""
    accuracies = [[100 * seed["test_accuracy"] for seed in found[mode]] for mode in MODES]
    paper = f" The paper's is {PAPER['Adam'] - PAPER['Adam, synchronous']:+.2f} %." if _is_the_papers(kept) else ""
    yield compared(*NAMES.values(), *accuracies) + paper


def _is_the_papers(kept: Results) -> bool:
    return kept.folder.name == "mnist"


def _row(seeds: list[dict[str, Any]]) -> str:
    def column(name: str) -> list[float]:
        return [seed[name] for seed in seeds]

    delays = [seed["delay"] for seed in seeds]
    # The seconds of a run that was cut are those since then.
    whole = [seed for seed in seeds if not seed.get("resumed")] or seeds
    return " | ".join(
        [
            spread(column("test_accuracy"), 3, 100),
            str(len(seeds)),
            str(seeds[0]["epochs"]),
            spread([seed["seconds"] for seed in whole], 0),
            f"{fmean(seed['images_per_second'] for seed in whole):,.0f}",
            f"{fmean(delay['mean'] for delay in delays):.2f} ({max(delay['max'] for delay in delays)})",
            f"{fmean(column('staleness')):.2f}",
        ]
    )


def _read(kept: Results, mode: str) -> list[dict[str, Any]]:
    files = sorted(kept.folder.glob(f"{mode}-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
    return [kept.read(file.stem) for file in files]


def page(folder: Path) -> Iterator[str]:
    for data in _recipes.SETS:
        kept = Results(folder / data)
        if (kept.folder / "async.toml").exists():
            yield from _page(data, kept)


def _page(data: str, kept: Results) -> Iterator[str]:
    option = "" if data == "mnist" else f" --data {data}"
    title = f"Table 1{'' if data == 'mnist' else f', on {data}'}"
    log = kept.read("search")
    yield from heading(title, *([f"table1 search{option}"] if log else []), f"table1{option}")
    yield from told(data, log) if log else ["Recipes as chosen on MNIST, with distortions for this data set.", ""]
    rows = list(table(kept))
    yield from rows or ["No seed has been trained with the chosen recipes yet: the test set has not been looked at."]
    yield ""
    if rows:
        yield from _agreement(kept) if _is_the_papers(kept) else ()
        yield from _about(kept)


def _agreement(kept: Results) -> Iterator[str]:
    """With the paper's rows, as far as both modes are there."""
    means = {mode: [100 * seed["test_accuracy"] for seed in _read(kept, mode)] for mode in MODES}
    if not all(means.values()):
        return
    ours = {mode: fmean(values) for mode, values in means.items()}
    paper = {"async": PAPER["Adam"], "sync": PAPER["Adam, synchronous"]}
    away = ", ".join(f"{NAMES[mode]} {ours[mode] - paper[mode]:+.2f} %" for mode in MODES)
    agreement = (
        "The order is the paper's: asynchronous training is the more accurate one."
        if ours["async"] > ours["sync"]
        else "The order is not the paper's: synchronous training with a recipe of its own is as accurate or better."
    )
    yield f"Beside the paper's rows: {away}. {agreement}"
    yield ""


def _cut(seeds: list[dict[str, Any]]) -> str:
    cut = [f"{seed['mode']} {seed['seed']}" for seed in seeds if seed.get("resumed")]
    return f"Cut and resumed, and not in the times: {', '.join(cut)}. " if cut else ""


def _about(kept: Results) -> Iterator[str]:
    """Where the rows come from."""
    seeds = [seed for mode in MODES for seed in _read(kept, mode)]
    where = seeds[0]["provenance"]
    cores = where.get("cores") or 1
    shares = [seed["cpu_seconds"] / seed["seconds"] / cores for seed in seeds]
    yield (
        f"Each run looked at the test set once, with its last weights. {_cut(seeds)}The delay of a push counts "
        "the optimizer "
        "steps between the weights it was computed on and those it was applied to; the lead counts the clocks that a "
        "replica is ahead of the slowest."
    )
    yield ""
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    yield from markdown_table(
        [
            ["machine", "MPI, Python", "packages", "share of the CPU time"],
            [
                f"{cores} x {where['cpu']}",
                f"{where['mpi']}, {where['python']}",
                packages,
                f"{min(shares):.0%} to {max(shares):.0%}",
            ],
        ]
    )
