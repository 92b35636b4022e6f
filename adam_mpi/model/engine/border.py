"""Choose the columns of a strip's convolution that are computed first, as neighbors wait for them. Pure.

The exchange begins when they are complete, and the other columns are computed while it is under way. Narrow kernels
cost a little more than one wide one, so that is done only where the other columns take longer than the exchange.
"""

from collections.abc import Sequence

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.exchange import Exchange, Span
from adam_mpi.model.layers import LayerShape

SECONDS = 1e-4
"""Latency of an exchange."""
BYTES_PER_SECOND = 2e9
"""Bandwidth of an exchange."""
FLOPS_PER_SECOND = 6e10
"""Speed of a core."""
STEPS = {"direct": 1, "winograd2d": 2}
"""Columns that a kernel can begin at; others compute all columns at once."""


def spans(following: Sequence[LayerShape], conv: Shape, window: int, algorithm: str, images: int) -> tuple[Span, ...]:
    """Return the columns that neighbors need, then all others; nothing where all are computed at once.

    `following`: the last of the layers that are fused with the convolution, pooling of `window` among them, and what
    comes behind.
    """
    last = following[0]
    exchange = following[1].layer
    if not isinstance(exchange, Exchange) or last.extent is None or algorithm not in STEPS:
        return ()
    strip = exchange.owned.index((last.extent.first, last.extent.first + last.extent.width))
    columns = conv.columns // window * window
    left, right = _interior(exchange, strip, columns, window, max(window, STEPS[algorithm]))
    if left >= right or not _pays(conv, right - left, exchange.sent(strip), images):
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
    return flops / FLOPS_PER_SECOND > SECONDS + 4 * sent * images / BYTES_PER_SECOND
