"""Figure 10: how large a model may be, by the number of strips it is cut into."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from _study import POOL, Found, Points, Scale, Table, conv, dense, job, toml

from adam_mpi.model import layers
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.partition import partition

TITLE = "Figure 10: model size by strips"
KIND = "measured for 1 and 2 strips, the others by arithmetic"
PAPER = (
    "In the paper the largest model that is trained efficiently grows more than linearly with the machines it is cut "
    "over; 16 machines train one of 36 billion connections."
)
MEASURED, PREDICTED, WIDTHS, BATCH, WITHIN = (1, 2), (1, 2, 4, 8, 16), (16, 32, 64, 128), 16, 0.9
SIDE, CLASSES, MANY = 64, 10, 16
"""Of images; classes, and as many as there are to be for 16 strips."""


def stack(width: int, classes: int = CLASSES) -> list[Any]:
    blocks = [conv(width, 3, 1), "relu", POOL, conv(2 * width, 3, 1), "relu", POOL]
    return [*blocks, dense(16 * width), "relu", dense(classes)]


def shapes(width: int, classes: int = CLASSES) -> tuple[LayerShape, ...]:
    return layers.infer(layers.parse(stack(width, classes)), (3, SIDE, SIDE), classes)


def connections(width: int, classes: int = CLASSES) -> int:
    return sum(shape.connections for shape in shapes(width, classes))


def points(scale: Scale) -> Points:
    real: Points = {
        f"measured, {count} strips, width {width}": partial(_measured, scale, count, width)
        for width in WIDTHS
        for count in MEASURED
    }
    return real | {f"predicted, {count} strips": partial(_predicted, count) for count in PREDICTED}


def _measured(scale: Scale, count: int, width: int) -> dict[str, Any] | None:
    """Connections trained per second by one replica of so many ranks."""
    settings = [
        f"data.set=noise:3x{SIDE}x{SIDE}:{CLASSES}",
        f"model.layers={toml(stack(width))}",
        f"layout.partitions={count}",
        "layout.data=1",
        "layout.servers=1",
        "worker.threads=1",
        f"train.batch={BATCH}",
        "data.images=256",
        "data.validation=0.002",
        "optimizer.learning_rate=0.0001",
    ]
    found = job(scale, settings, epochs=2, ranks=2 + count)
    if found is None:
        return None
    rate = found["images_per_second"] * connections(width)
    return {
        "kind": "measured",
        "strips": count,
        "connections": connections(width),
        "connections_per_second": rate,
        "per_strip": rate / count,
    }


def _predicted(count: int) -> dict[str, Any]:
    """The widest model whose strips fit this machine's memory: as if each strip had such a machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def fits(width: int) -> bool:
        return max(strip.bytes(BATCH) for strip in partition(shapes(width, MANY), count).strips) <= memory

    size = connections(_largest(fits), MANY)
    return {"kind": "predicted", "strips": count, "memory": memory, "connections": size}


def _largest(fits: Callable[[int], bool]) -> int:
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def efficient(found: Found) -> dict[int, int]:
    """Strips -> connections of the largest model that is trained within 10 % of the best speed."""
    largest = {}
    for count in MEASURED:
        own = [point for point in found.values() if point["kind"] == "measured" and point["strips"] == count]
        best = max((point["connections_per_second"] for point in own), default=0.0)
        good = [point["connections"] for point in own if point["connections_per_second"] >= WITHIN * best]
        largest |= {count: max(good)} if good else {}
    return largest


def paint(axes: Any, found: Found) -> None:
    measured = efficient(found)
    axes.plot(measured.keys(), measured.values(), "o-", label="measured: within 10 % of the best speed")
    predicted = {p["strips"]: p["connections"] for p in found.values() if p["kind"] == "predicted"}
    axes.plot(predicted.keys(), predicted.values(), "s--", label="by arithmetic: fits this memory per strip")
    axes.set(xlabel="strips", ylabel="connections of the model", yscale="log")
    axes.set_xticks(sorted({*measured, *predicted}))
    axes.legend()


def table(found: Found) -> Table:
    """Return the largest efficient model by strips, measured and by arithmetic."""
    measured = efficient(found)
    predicted = {point["strips"]: point["connections"] for point in found.values() if point["kind"] == "predicted"}
    rows = [
        [
            str(count),
            f"{measured[count] / 1e6:,.0f} million" if count in measured else "",
            f"{predicted[count] / 1e9:,.1f} billion" if count in predicted else "",
        ]
        for count in sorted({*measured, *predicted})
    ]
    return [["strips", "connections, measured", "connections, by arithmetic"], *rows]


def verdict(found: Found) -> str:
    return (
        "Measured is the largest model tried that trains within 10 % of the best connections/s of its kind; by "
        "arithmetic, "
        f"what fits when each strip has this machine's memory. {_growth(found)}"
    )


def _growth(found: Found) -> str:
    """Of both lines, beside the paper's."""
    predicted = {point["strips"]: point["connections"] for point in found.values() if point["kind"] == "predicted"}
    told = []
    for name, sizes in {"measured": efficient(found), "by arithmetic": predicted}.items():
        if len(sizes) > 1:
            strips, more = max(sizes) / min(sizes), sizes[max(sizes)] / sizes[min(sizes)]
            kind = "more than linear, as in the paper" if more > strips else "no more than linear"
            told.append(f"{name} {more:.1f} times as large with {strips:.0f} times the strips, {kind}")
    return f"So it is {'; '.join(told)}." if told else "There is nothing to compare yet."
