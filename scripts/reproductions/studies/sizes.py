"""Figure 12: accuracy by the size of the model."""

from typing import Any

from _study import (
    POOL,
    Difference,
    Found,
    Points,
    Scale,
    Table,
    accuracy_table,
    bars,
    contrast,
    conv,
    dense,
    jobs,
    mean,
    toml,
)

TITLE = "Figure 12: accuracy by model size"
KIND = "measured, on Fashion-MNIST"
PAPER = "In the paper larger models are better at ImageNet's 22,000 classes, with the same data."
WIDTHS = {"half": (5, 10, 200), "the paper's MNIST network": (10, 20, 400), "double": (20, 40, 800)}
"""Maps of the two convolutions, and units of the two dense layers."""


def points(scale: Scale) -> Points:
    variants = {name: [f"model.layers={toml(_layers(*width))}"] for name, width in WIDTHS.items()}
    return jobs(scale, variants, ["data.set=fashion", "push.images=128", "pull.images=128"], epochs=8)


def _layers(first: int, second: int, units: int) -> list[Any]:
    convolutions = [[conv(maps, 5), "relu", POOL] for maps in (first, second)]
    return [*convolutions[0], *convolutions[1], dense(units), "relu", dense(units), "relu", dense(10)]


def paint(axes: Any, found: Found) -> None:
    bars(axes, found)


def table(found: Found) -> Table:
    """Return the accuracy of each size."""
    return accuracy_table(found)


def differences(found: Found) -> list[Difference]:
    """Return how neighboring sizes differ."""
    small, middle, large = WIDTHS
    return [contrast(found, large, middle), contrast(found, middle, small)]


def verdict(found: Found) -> str:
    values = [mean(found, name) for name in WIDTHS]
    if None in values:
        return "Not all sizes are there yet."
    return (
        "Larger is better here too, on average."
        if values == sorted(values)
        else "The sizes are not in that order here."
    )
