"""Border first: which columns of a strip's convolution are computed before the others, as neighbours wait for them. Pure.

The exchange begins when they are there, and the other columns are computed while it is under way. Narrow kernels cost a
little more than one wide one, so that is done only where what is left to compute takes longer than the exchange.
"""

from collections.abc import Sequence

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.convolution import Shape
from adam_mpi.model.exchange import Exchange, Span
from adam_mpi.model.layers import LayerShape

SECONDS, BYTES_PER_SECOND = 1e-4, 2e9
"""What an exchange takes at least, and what goes through it."""
FLOPS_PER_SECOND = 6e10
"""Of a core."""


def order(following: Sequence[LayerShape], conv: Shape, window: int, step: int, images: int) -> list[Span]:
    """Columns that neighbours need, in whole steps, then all others; one span where it does not pay.

    `following`: the last of the layers that are computed with the convolution, pooling of `window` among them, and what
    comes behind.
    """
    columns = conv.columns // window * window
    last, exchange = following[0], following[1].layer
    if not isinstance(exchange, Exchange) or last.extent is None:
        return [(0, columns)]
    begin, strip = last.extent.first, exchange.owned.index((last.extent.first, last.extent.first + last.extent.width))
    left, right = 0, columns
    for other in range(len(exchange.owned)):
        a, b = exchange.piece(strip, other)
        if other < strip and a < b:
            left = max(left, tiles.up((b - begin) * window, step))
        elif other > strip and a < b:
            right = min(right, (a - begin) * window // step * step)
    if left >= right or not _pays(conv, right - left, exchange.sent(strip), images):
        return [(0, columns)]
    return [*((a, b) for a, b in ((0, left), (right, columns)) if a < b), (left, right)]


def _pays(conv: Shape, columns: int, sent: int, images: int) -> bool:
    """Whether so many columns take longer to compute than the exchange of so many values per image takes."""
    flops = 2 * conv.maps * conv.channels * conv.kernel**2 * conv.rows * columns * images
    return flops / FLOPS_PER_SECOND > SECONDS + 4 * sent * images / BYTES_PER_SECOND
