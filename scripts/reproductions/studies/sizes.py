"""Figure 12: accuracy by the size of the model."""

from typing import Any

from _study import POOL, Found, Points, Scale, accuracies, bars, contrast, conv, dense, jobs, mean, toml

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


def verdict(found: Found) -> str:
    small, middle, large = WIDTHS
    values = [mean(found, name) for name in WIDTHS]
    rising = None not in values and values == sorted(values)
    agreement = "Larger is better here too, on average" if rising else "The sizes are not in that order here"
    return (
        f"{accuracies(found)} {contrast(found, large, middle)} {contrast(found, middle, small)} "
        f"{agreement if None not in values else 'Not all sizes are there yet'}."
    )
