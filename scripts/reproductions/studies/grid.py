"""Asynchronous training with the recipe of synchronous training: learning rates, momenta and numbers of ranks."""

from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from _study import Found, Points, Scale, Table, job, mean

TITLE = "The recipe of synchronous training, asynchronously"
KIND = "measured; ranks share the cores of this machine"
PAPER = "The paper trains asynchronously and does not say how the learning rate was found."
RATES = (0.01, 0.03, 0.05, 0.1)
MOMENTA = (0.0, 0.5, 0.9)
RANKS = (4, 8, 16)
EPOCHS = 2
GOOD = 0.985
CHANCE = 0.2
NO_MEASURES = [
    "optimizer.momentum_where=server",
    "optimizer.clip_norm=none",
    "optimizer.stale=keep",
    "push.in_flight=64",
]
MODES: dict[str, list[str]] = {
    "synchronous": ["consistency.staleness=0"],
    "asynchronous": [],
    "one velocity on the servers": NO_MEASURES,
}


def points(scale: Scale) -> Points:
    """Return a job for each cell; the results of synchronous training do not depend on the ranks, so it has one."""
    found: Points = {}
    for seed, (rate, momentum), mode in product(range(1, scale.seeds + 1), product(RATES, MOMENTA), MODES):
        settings = [
            "data.set=mnist",
            f"optimizer.learning_rate={rate}",
            f"optimizer.momentum={momentum}",
            f"run.seed={seed}",
            *MODES[mode],
        ]
        for ranks in RANKS if mode != "synchronous" else RANKS[:1]:
            name = f"{_variant(mode, rate, momentum, ranks)}, seed {seed}"
            found[name] = partial(job, scale, settings, EPOCHS, ranks)
    return found


def _variant(mode: str, rate: float, momentum: float, ranks: int = RANKS[0]) -> str:
    return f"{mode}, rate {rate}, momentum {momentum}, {ranks} ranks"


def paint(axes: Any, found: Found) -> None:
    """Draw what each asynchronous cell lacks against synchronous training, at most five points."""
    rows = list(product(MOMENTA, RATES))
    columns = [(mode, ranks) for mode in MODES if mode != "synchronous" for ranks in RANKS]
    for y, (momentum, rate) in enumerate(rows):
        aim = mean(found, _variant("synchronous", rate, momentum))
        for x, (mode, ranks) in enumerate(columns):
            reached = mean(found, _variant(mode, rate, momentum, ranks))
            if aim is None or reached is None:
                continue
            lack = 100 * (aim - reached)
            axes.add_patch(_square(x, y, min(max(lack, 0.0), 5.0) / 5.0))
            axes.text(x, y, f"{lack:.2f}", ha="center", va="center", fontsize=6)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(columns)), [f"{ranks}" for _, ranks in columns])
    axes.set_yticks(range(len(rows)), [f"{rate:g}, {momentum:g}" for momentum, rate in rows], fontsize=7)
    axes.set(xlabel="ranks: with the defaults, and with one velocity on the servers", ylabel="rate, momentum")


def _square(x: int, y: int, lack: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, color=(0.4 + 0.6 * lack, 1 - 0.6 * lack, 0.5))


def _cells(found: Found, mode: str) -> list[tuple[float, float]]:
    """Return (accuracy of synchronous training, of `mode`) of the cells where the first is good."""
    cells = []
    for rate, momentum, ranks in product(RATES, MOMENTA, RANKS):
        aim = mean(found, _variant("synchronous", rate, momentum))
        reached = mean(found, _variant(mode, rate, momentum, ranks))
        if aim is not None and reached is not None and aim >= GOOD:
            cells.append((aim, reached))
    return cells


def table(found: Found) -> Table:
    """Return the accuracies of each cell, and the delay of its pushes."""
    rows = []
    for momentum, rate, ranks in product(MOMENTA, RATES, RANKS):
        row = [f"{rate:g}", f"{momentum:g}", str(ranks)]
        for mode in MODES:
            reached = mean(found, _variant(mode, rate, momentum, RANKS[0] if mode == "synchronous" else ranks))
            row.append("" if reached is None else f"{100 * reached:.2f}")
        delay = mean(found, _variant("asynchronous", rate, momentum, ranks), "delay")
        rows.append([*row, "" if delay is None else f"{delay:.1f}"])
    return [["rate", "momentum", "ranks", *(f"{mode}, %" for mode in MODES), "delay, gradients"], *rows]


def verdict(found: Found) -> str:
    texts = [text for mode in MODES if mode != "synchronous" and (text := _text(mode, _cells(found, mode)))]
    return " ".join(texts) or "No cell has both kinds of training yet."


def _text(mode: str, cells: list[tuple[float, float]]) -> str:
    if not cells:
        return ""
    lacks = [100 * (aim - reached) for aim, reached in cells]
    chance = sum(reached < CHANCE for _, reached in cells)
    return (
        f"Where synchronous training reaches {GOOD:.1%}, {mode} lacks {fmean(lacks):.2f} points in the mean of "
        f"{len(cells)} cells, at most {max(lacks):.2f}, and is at chance in {chance}."
    )
