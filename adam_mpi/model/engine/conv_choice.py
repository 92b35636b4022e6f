"""Choose how a convolution is computed: algorithms that fit it, their tiles, and the columns that neighbors wait for.

The exchange begins when they are complete, and the other columns are computed while it is under way. Narrow kernels
cost a little more than one wide one, so that is done only where the other columns take longer than the exchange.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from adam_mpi.model.engine import conv_kernels, tiles, winograd1d, winograd1d_step, winograd2d_kernels, winograd2d_step
from adam_mpi.model.engine.conv_step import ConvSpec, direct
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.engine.schedule import Step
from adam_mpi.model.exchange import Exchange, Span
from adam_mpi.model.layers import LayerShape

MESSAGE_SECONDS = 1e-4
"""Latency of an exchange."""
BYTES_PER_SECOND = 2e9
"""Bandwidth of an exchange."""
FLOPS_PER_SECOND = 6e10
"""Speed of a core."""
BORDER_STEPS = {"direct": 1, "winograd2d": 2}
"""Columns that a kernel can begin at; others compute all columns at once."""


def border_spans(
    following: Sequence[LayerShape], conv: Shape, window: int, algorithm: str, images: int
) -> tuple[Span, ...]:
    """Return the columns that neighbors need, then all others; nothing where all are computed at once.

    `following`: the last of the layers that are fused with the convolution, pooling of `window` among them, and what
    comes behind.
    """
    last = following[0]
    exchange = following[1].layer
    if not isinstance(exchange, Exchange) or last.extent is None or algorithm not in BORDER_STEPS:
        return ()
    strip = exchange.owned.index((last.extent.first, last.extent.first + last.extent.width))
    columns = conv.columns // window * window
    left, right = _interior(exchange, strip, columns, window, max(window, BORDER_STEPS[algorithm]))
    if left >= right or not _pays(conv, right - left, exchange.mean_values_sent(strip), images):
        return ()
    return (*((a, b) for a, b in ((0, left), (right, columns)) if a < b), (left, right))


def _interior(exchange: Exchange, strip: int, columns: int, window: int, step: int) -> Span:
    """Return the columns that no other strip needs, in whole steps of `step`."""
    left = 0
    right = columns
    begin = exchange.owned[strip][0]
    for other in range(len(exchange.owned)):
        a, b = exchange.piece(strip, other)
        if other < strip and a < b:
            left = max(left, tiles.up((b - begin) * window, step))
        elif other > strip and a < b:
            right = min(right, (a - begin) * window // step * step)
    return left, right


def _pays(conv: Shape, columns: int, sent: int, images: int) -> bool:
    """Return whether `columns` columns take longer to compute than an exchange of `sent` values per image takes."""
    flops = 2 * conv.maps * conv.channels * conv.kernel**2 * conv.rows * columns * images
    return flops / FLOPS_PER_SECOND > MESSAGE_SECONDS + 4 * sent * images / BYTES_PER_SECOND


Choice = dict[str, Any]
"""How a convolution is computed; JSON, as it is kept with the run: equal bits need equal choices."""
TRANSFORMED: dict[str, Callable[[ConvSpec], Step]] = {
    "winograd2d": winograd2d_step.emit_winograd2d_step,
    "winograd1d": winograd1d_step.emit_winograd1d_step,
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
        weights_tile=conv_kernels.WeightsTile(*choice["weights"]),
    )


def choices(shape: Shape, window: int, registers: int, wanted: int = 1) -> list[Choice]:
    """Return the ways to compute a convolution that max-pooling of `window` follows.

    The first is what arithmetic says; the others, up to `wanted` tiles of each kind, are worth a measurement.
    """
    columns = shape.columns // window * window
    forward = tiles.ranked(shape.maps, columns, registers, slide=2)[:wanted]
    data = tiles.ranked(shape.channels, shape.width, registers, slide=2, step=shape.stride)[:wanted]
    sums = conv_kernels.choose_weights_tile(shape, registers)
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
    return {
        "direct": True,
        "winograd2d": winograd2d_kernels.winograd2d_fits(shape, window),
        "winograd1d": winograd1d.winograd1d_fits(shape),
    }


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
