"""Figure 8: one training node, by its threads."""

import time
from typing import Any

from _models import MODELS
from _study import Found, Points, Scale, Table, by_threads
from node import crew

TITLE = "Figure 8: training node by threads"
KIND = "measured"
PAPER = "The paper's training node scales super-linearly up to 4 cores, because of caches, and linearly from there."
NAMES, SECONDS = {"mnist": 64, "mlp": 64}, 3.0
"""Batch of each model; time for a point."""


def points(scale: Scale) -> Points:
    return by_threads(measure, NAMES)


def measure(name: str, threads: int) -> dict[str, Any]:
    """A connection of an image counts once for its forward pass, its backward pass and its update together."""
    model, batch = MODELS[name], NAMES[name]
    run = crew(model, batch, threads)
    run(threads, 8)
    steps, rates = max(8, int(0.5 * 8 / run(threads, 8).wall)), []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        rates.append(threads * steps * batch / run(threads, steps).wall)
    connections = sum(shape.connections for shape in model.shapes)
    best = max(rates)
    return {"model": name, "threads": threads, "images_per_second": best, "connections_per_second": best * connections}


def paint(axes: Any, found: Found) -> None:
    for name, own in _models(found).items():
        axes.plot(own.keys(), [value / 1e9 for value in own.values()], "o-", label=name)
        first = own[min(own)] / min(own) / 1e9
        axes.plot(own.keys(), [first * threads for threads in own], "k:", linewidth=0.8)
    axes.set(xlabel="threads (dotted: linear)", ylabel="billion connections/s", xticks=sorted({1, *_threads(found)}))
    axes.legend()


def table(found: Found) -> Table:
    """Return the rate of each model by threads."""
    rows = []
    for name, own in _models(found).items():
        for threads, rate in own.items():
            gain = f"{rate / own[1]:.2f} x" if 1 in own and threads > 1 else ""
            rows.append([name, str(threads), f"{rate / 1e9:.1f}", gain])
    return [["model", "threads", "billion connections/s", "gained over one thread"], *rows]


def verdict(found: Found) -> str:
    gains = [own[max(own)] / own[1] / max(own) for own in _models(found).values() if 1 in own]
    least = min(gains, default=1.0)
    agreement = "More than linear, as in the paper" if least > 1 else f"At least {least:.0%} of linear, not more"
    return f"{agreement}. This machine has too few cores to say anything about more."


def _models(found: Found) -> dict[str, dict[int, float]]:
    return {
        name: {point["threads"]: point["connections_per_second"] for point in found.values() if point["model"] == name}
        for name in dict.fromkeys(point["model"] for point in found.values())
    }


def _threads(found: Found) -> set[int]:
    return {point["threads"] for point in found.values()}
