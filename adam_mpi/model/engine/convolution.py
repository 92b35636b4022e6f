"""What the three convolution kernels share: their shape, and which kernel column meets which column of a tile.

A tap is (kernel column, column of the tile, shift): kernel column and tile column meet at the value `shift` pixels from
where the tile begins. Taps that would reach outside the image are not there, so padding costs nothing.
"""

from dataclasses import dataclass
from itertools import groupby, product
from operator import itemgetter

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.source import BROADCAST, Source
from adam_mpi.model.layers import Conv, LayerShape

Tap = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """A convolution with square kernel: channels, rows and columns of the input, and what is done to them."""

    channels: int
    height: int
    width: int
    maps: int
    kernel: int
    stride: int
    pad: int
    margins: tuple[int, int] | None = None
    """Columns of padding left and right where they are not `pad`: a strip has none beside a neighbor."""

    @property
    def left(self) -> int:
        return self.pad if self.margins is None else self.margins[0]

    @property
    def right(self) -> int:
        return self.pad if self.margins is None else self.margins[1]

    @property
    def rows(self) -> int:
        """Of the output."""
        return (self.height + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def columns(self) -> int:
        """Of the output."""
        return (self.width + self.left + self.right - self.kernel) // self.stride + 1

    def __str__(self) -> str:
        return (
            f"{self.channels} x {self.height} x {self.width} -> {self.maps} x {self.rows} x {self.columns}, "
            f"kernel {self.kernel}, stride {self.stride}, pad {self.margins or self.pad}"
        )


def shape_of(shape: LayerShape) -> Shape:
    layer = shape.layer
    assert isinstance(layer, Conv)
    margins = shape.margins if shape.extent else None
    return Shape(*shape.input, layer.channels, layer.kernel, layer.stride, layer.pad, margins)


def forward_taps(shape: Shape, start: int, width: int) -> tuple[Tap, ...]:
    """Output columns from `start` on read input column `column * stride + kernel column - left`."""
    return tuple(
        (tap, column, column * shape.stride + tap - shape.left)
        for tap in range(shape.kernel)
        for column in range(width)
        if 0 <= (start + column) * shape.stride + tap - shape.left < shape.width
    )


def data_taps(shape: Shape, start: int, width: int) -> tuple[Tap, ...]:
    """Input columns from `start` on were read by output column `(column + left - kernel column) / stride`."""
    taps = []
    for tap in range(shape.kernel):
        for column in range(width):
            place, rest = divmod(start + column + shape.left - tap, shape.stride)
            if rest == 0 and 0 <= place < shape.columns:
                taps.append((tap, column, place - start // shape.stride))
    return tuple(taps)


def multiply_add(source: Source, run: tiles.Run, planes: int, plane_stride: int, lanes: int) -> None:
    """Emit, for each tap of the run's pattern and each plane, with a sum per plane and column of the tile:

    sum += weights[w + plane * plane_stride + kernel column] * memory[v + shift * lanes]
    """
    products = [
        (plane * run.width + column, plane * plane_stride + kernel_column, shift * lanes)
        for kernel_column, taps in groupby(run.pattern, key=itemgetter(0))
        for plane, (_, column, shift) in product(range(planes), list(taps))
    ]
    if products:
        step = source.make("multiply_adds", planes * run.width, BROADCAST, *products)
        source(f"sums = {step}(sums, weights, w, memory, v)")
