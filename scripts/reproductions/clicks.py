"""The click model: sparse logistic regression with the parameter server as a library, against the best possible."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _results
from _jobs import under_mpi
from _results import ROOT, Results, heading, not_run

from adam_mpi.base.machine import host_provenance

CLIENTS = (1, 2, 4)


def arguments(parser: argparse.ArgumentParser) -> None:
    _results.arguments(parser)


def reproduce(options: argparse.Namespace) -> Iterator[str]:
    kept = _results.results(options, "clicks")
    clock = _results.Clock.of(options)
    for clients in CLIENTS:
        if kept.read(f"clients-{clients}"):
            continue
        if clock.over:
            yield "time is up; the same command goes on"
            return
        result = kept.keep(f"clients-{clients}", _measure(clients))
        yield f"{clients} clients: log-loss {result['losses'][-1]:.4f}, best possible {result['best_possible']:.4f}"


def _measure(clients: int) -> dict[str, Any]:
    said = under_mpi(clients + 1, ROOT / "scripts" / "clicks.py")
    losses = [float(loss) for loss in re.findall(r"log-loss ([\d.]+)", said)]
    (best,) = re.findall(r"best possible: ([\d.]+)", said)
    return {"clients": clients, "losses": losses, "best_possible": float(best), "machine": host_provenance()}


def page(folder: Path) -> Iterator[str]:
    kept = Results(folder / "clicks")
    found = [told for clients in CLIENTS if (told := kept.read(f"clients-{clients}"))]
    yield from heading("Clicks", "clicks")
    if not found:
        yield from not_run()
        return
    best = found[0]["best_possible"]
    yield (
        "Sparse logistic regression on generated clicks (`scripts/clicks.py`), every client with clicks of its own. "
        f"The weights that the clicks were drawn by have a log-loss of {best:.4f} on unseen clicks: none is better."
    )
    yield ""
    yield "| clients | log-loss before training | after it | above the best possible |"
    yield "| --- | --- | --- | --- |"
    for told in found:
        first, last = told["losses"][0], told["losses"][-1]
        yield f"| {told['clients']} | {first:.4f} | {last:.4f} | {last - best:.4f} |"
    yield ""
    last = ", ".join(f"{told['losses'][-2] - told['losses'][-1]:.4f}" for told in found)
    yield (
        "Every client brings as many clicks as the model has weights: the loss is "
        f"{found[0]['losses'][-1] - found[-1]['losses'][-1]:.4f} lower with {found[-1]['clients']} clients than with "
        f"{found[0]['clients']}. Training was not at its end: the last pass still took {last} off."
    )
    yield ""
