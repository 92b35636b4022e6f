"""Choose how a convolution is computed: the algorithms that fit it, their tiles, and the step of a choice."""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from adam_mpi.model.engine import conv_weights, tiles, winograd1d, winograd1d_step, winograd2d, winograd2d_step
from adam_mpi.model.engine.conv_step import ConvSpec, direct
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.memory import Step

Choice = dict[str, Any]
"""How a convolution is computed; JSON, as it is kept with the run: equal bits need equal choices."""
TRANSFORMED: dict[str, Callable[[ConvSpec], Step]] = {
    "winograd2d": winograd2d_step.step,
    "winograd1d": winograd1d_step.step,
}
"""Algorithms that transform the inputs first, best first."""
LARGEST_TILE = 1024
TILES = {"forward": 2, "data": 2, "weights": 3}
"""Tiles that a choice of the direct algorithm has, and how many numbers each has."""


def step(spec: ConvSpec, choice: Choice) -> Step:
    """Return the step of the convolution `spec`, computed as `choice` says."""
    if choice["algorithm"] in TRANSFORMED:
        return TRANSFORMED[choice["algorithm"]](spec)
    return direct(
        spec,
        forward_tile=tiles.Tile(*choice["forward"]),
        data_tile=tiles.Tile(*choice["data"]),
        weights_tile=conv_weights.Tile(*choice["weights"]),
    )


def choices(shape: Shape, window: int, registers: int, wanted: int = 1) -> list[Choice]:
    """Return the ways to compute a convolution that max-pooling of `window` follows.

    The first is what arithmetic says; the others, up to `wanted` tiles of each kind, are worth a measurement.
    """
    columns = shape.columns // window * window
    forward = tiles.ranked(shape.maps, columns, registers, slide=2)[:wanted]
    data = tiles.ranked(shape.channels, shape.width, registers, slide=2, step=shape.stride)[:wanted]
    sums = conv_weights.choose(shape, registers)
    found: list[Choice] = [
        {
            "algorithm": "direct",
            "forward": [one.planes, one.columns],
            "data": [other.planes, other.columns],
            "weights": [sums.maps, sums.channels, sums.taps],
        }
        for one, other in zip_longest(forward, data, fillvalue=(forward if len(forward) < len(data) else data)[-1])
    ]
    fitting = _fitting(shape, window)
    return [*({"algorithm": name} for name in TRANSFORMED if fitting[name]), *found]


def _fitting(shape: Shape, window: int) -> dict[str, bool]:
    """Return for each algorithm whether it can compute the convolution."""
    return {"direct": True, "winograd2d": winograd2d.fits(shape, window), "winograd1d": winograd1d.fits(shape)}


def check(choice: object, shape: Shape, window: int) -> str:
    """Return what is wrong with a choice that was read from a file, before it becomes source; "" if nothing is.

    Tiles may be those of another machine, with other registers.
    """
    fitting = _fitting(shape, window)
    algorithm = choice.get("algorithm") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(algorithm, str) or not fitting.get(algorithm):
        return f"algorithm is none of {', '.join(name for name, fits in fitting.items() if fits)}"
    wanted = TILES if algorithm == "direct" else {}
    if set(choice) != {"algorithm", *wanted}:
        return f"{algorithm} has the keys {', '.join(['algorithm', *wanted])} and no others"
    wrong = [name for name, count in wanted.items() if not _is_tile(choice[name], count)]
    return f"{wrong[0]} must be {wanted[wrong[0]]} whole numbers from 1 to {LARGEST_TILE}" if wrong else ""


def _is_tile(sizes: object, count: int) -> bool:
    """Return whether `sizes` is a list of `count` whole numbers that a tile may have."""
    return (
        isinstance(sizes, list)
        and len(sizes) == count
        and all(type(size) is int and 1 <= size <= LARGEST_TILE for size in sizes)
    )
