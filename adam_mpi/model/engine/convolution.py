"""What the three convolution kernels share: their shape, and which kernel column meets which column of a tile.

A tap is (kernel column, column of the tile, shift): kernel column and tile column meet at the value `shift` pixels from
where the tile begins. Taps that would reach outside the image are not there, so padding costs nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from adam_mpi.model.engine.source import Source

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

    @property
    def rows(self) -> int:
        """Of the output."""
        return (self.height + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def columns(self) -> int:
        """Of the output."""
        return (self.width + 2 * self.pad - self.kernel) // self.stride + 1

    def __str__(self) -> str:
        return (
            f"{self.channels} x {self.height} x {self.width} -> {self.maps} x {self.rows} x {self.columns}, "
            f"kernel {self.kernel}, stride {self.stride}, pad {self.pad}"
        )


def forward_taps(shape: Shape, start: int, width: int) -> tuple[Tap, ...]:
    """Output columns from `start` on read input column `column * stride + kernel column - pad`."""
    return tuple(
        (tap, column, column * shape.stride + tap - shape.pad)
        for tap in range(shape.kernel)
        for column in range(width)
        if 0 <= (start + column) * shape.stride + tap - shape.pad < shape.width
    )


def data_taps(shape: Shape, start: int, width: int) -> tuple[Tap, ...]:
    """Input columns from `start` on were read by output column `(column + pad - kernel column) / stride`."""
    taps = []
    for tap in range(shape.kernel):
        for column in range(width):
            place, rest = divmod(start + column + shape.pad - tap, shape.stride)
            if rest == 0 and 0 <= place < shape.columns:
                taps.append((tap, column, place - start // shape.stride))
    return tuple(taps)


def multiply_add(source: Source, taps: Iterable[Tap], planes: int, plane_stride: int, lanes: int) -> None:
    """Emit sum{plane}_{column} += weights[w + plane * plane_stride + kernel column] * memory[v + shift * lanes]."""
    met: dict[int, list[Tap]] = {}
    for tap in taps:
        met.setdefault(tap[0], []).append(tap)
    for kernel_column, found in met.items():
        for _, column, shift in found:
            source(f"value{column} = load(memory, v + {shift * lanes})")
        for plane in range(planes):
            source(f"weight = broadcast(weights, w + {plane * plane_stride + kernel_column})")
            for _, column, _ in found:
                source(f"sum{plane}_{column} = fma(weight, value{column}, sum{plane}_{column})")
