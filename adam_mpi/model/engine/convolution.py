"""Describe a convolution: its shape, the kernel to emit for it, and the taps of a tile.

A tap is (kernel column, column of the tile, shift): kernel column and tile column meet at the value `shift` pixels from
the start of the tile. Taps that would reach outside the image are left out, so padding costs nothing.
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
    """A convolution with a square kernel: channels, rows and columns of the input, and the layer's parameters."""

    channels: int
    height: int
    width: int
    maps: int
    kernel: int
    stride: int
    pad: int
    margins: tuple[int, int] | None = None
    """Columns of padding left and right where they differ from `pad`: a strip has none beside a neighbor."""

    @property
    def left(self) -> int:
        """Return the columns of padding on the left of a convolution."""
        return self.pad if self.margins is None else self.margins[0]

    @property
    def right(self) -> int:
        """Return the columns of padding on the right of a convolution."""
        return self.pad if self.margins is None else self.margins[1]

    @property
    def rows(self) -> int:
        """Return the rows of the output of a convolution."""
        return (self.height + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def columns(self) -> int:
        """Return the columns of the output of a convolution."""
        return (self.width + self.left + self.right - self.kernel) // self.stride + 1

    def __str__(self) -> str:
        return (
            f"{self.channels} x {self.height} x {self.width} -> {self.maps} x {self.rows} x {self.columns}, "
            f"kernel {self.kernel}, stride {self.stride}, pad {self.margins or self.pad}"
        )


@dataclass(frozen=True)
class ConvKernel:
    """A kernel to emit for a convolution; `weight` and `bias` are offsets in the flat vector; no bias: None."""

    name: str
    shape: Shape
    weight: int
    bias: int | None
    lanes: int


def shape_of(shape: LayerShape) -> Shape:
    """Return the convolution that the layer of `shape` computes."""
    layer = shape.layer
    assert isinstance(layer, Conv)
    channels, height, width = shape.input
    return Shape(
        channels=channels,
        height=height,
        width=width,
        maps=layer.channels,
        kernel=layer.kernel,
        stride=layer.stride,
        pad=layer.pad,
        margins=shape.margins if shape.extent else None,
    )


def forward_taps(shape: Shape, start: int, width: int) -> tuple[Tap, ...]:
    """Return the taps of `width` output columns from `start` on.

    An output column reads input column `column * stride + kernel column - left`.
    """
    return tuple(
        (tap, column, column * shape.stride + tap - shape.left)
        for tap in range(shape.kernel)
        for column in range(width)
        if 0 <= (start + column) * shape.stride + tap - shape.left < shape.width
    )


def data_taps(shape: Shape, start: int, width: int) -> tuple[Tap, ...]:
    """Return the taps of `width` input columns from `start` on, for the errors of the inputs.

    An input column was read by output column `(column + left - kernel column) / stride`.
    """
    taps = []
    for tap in range(shape.kernel):
        for column in range(width):
            place, rest = divmod(start + column + shape.left - tap, shape.stride)
            if rest == 0 and 0 <= place < shape.columns:
                taps.append((tap, column, place - start // shape.stride))
    return tuple(taps)


def multiply_add(source: Source, run: tiles.Run, planes: int, plane_stride: int, lanes: int) -> None:
    """Emit the products of each tap of `run.pattern` and each plane, with one sum per plane and column of the tile:

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
