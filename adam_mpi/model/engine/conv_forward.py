"""Emit a convolution forward, with what may follow it: bias, relu, max-pooling without overlap.

for each row of windows:
    for each tile of maps:
        for each row of the window:                           one row when nothing is pooled
            for each tile of columns:
                sums = bias
                for each channel, for each kernel row inside the image:
                    sums += weights * inputs                  convolution.multiply_add
                store them: as outputs, or in a buffer of rows to be pooled
        for each column of windows:
            pool the rows                                     pool.window
"""

from dataclasses import dataclass

from adam_mpi.model.engine import pool, tiles
from adam_mpi.model.engine.convolution import ConvKernel, Shape, forward_taps, multiply_add
from adam_mpi.model.engine.source import Source
from adam_mpi.model.exchange import Span


@dataclass(frozen=True)
class ForwardKernel(ConvKernel):
    """A convolution in tiles of `tile`, followed by relu if `relu`, then max-pooling in windows of `window` pixels."""

    tile: tiles.Tile
    relu: bool = False
    window: int = 1
    span: Span | None = None
    """The columns to compute, whole windows of them; None: all."""

    @property
    def columns(self) -> Span:
        """First and last + 1 of the columns to compute."""
        return self.span or (0, self.shape.columns // self.window * self.window)


def pooled_rows_floats(shape: Shape, window: int, tile: tiles.Tile, lanes: int) -> int:
    """Return the floats of the buffer that holds the rows of a tile of maps until they are pooled."""
    return tile.planes * window * shape.columns * lanes


def emit(source: Source, kernel: ForwardKernel) -> None:
    """Emit `kernel`; its arguments are offsets in memory of one block's inputs, outputs, winners and rows to pool."""
    shape = kernel.shape
    window = kernel.window
    arguments = "inputs, outputs" if window == 1 else "inputs, outputs, winners, unpooled"
    with source.kernel(f"{kernel.name}(memory, weights, {arguments})", f"Forward: {shape}, {kernel.tile}."):
        with source.inside(f"for top in range({shape.rows // window}):"):
            for maps in tiles.each(source, "plane", tiles.runs(shape.maps, kernel.tile.planes)):
                with source.inside(f"for step in range({window}):"):
                    source(f"row = top * {window} + step")
                    _rows(source, kernel, maps.width)
                if window > 1:
                    emit_pool(source, kernel, maps.width)


def _rows(source: Source, kernel: ForwardKernel, planes: int) -> None:
    shape = kernel.shape
    lanes = kernel.lanes
    window = kernel.window
    first, last = kernel.columns
    source(f"first = max(0, {shape.pad} - row * {shape.stride})")
    source(f"last = min({shape.kernel}, {shape.height + shape.pad} - row * {shape.stride})")
    cut = tiles.runs(last, kernel.tile.columns, lambda *at: forward_taps(shape, *at), first)
    for run in tiles.each(source, "column", cut):
        starts = [plane for plane in range(planes) for _ in range(run.width)]
        source(f"sums = {source.make('broadcasts', *starts)}(weights, {kernel.bias} + plane)")
        _sum(source, kernel, planes, run)
        if kernel.relu and window == 1:
            source(f"sums = {source.make('positives', planes * run.width)}(sums)")
        line = f"outputs + (plane * {shape.rows} + row" if window == 1 else "unpooled + (step"
        source(f"to = {line}) * {shape.columns * lanes} + column * {lanes}")
        plane_pixels = (shape.rows if window == 1 else window) * shape.columns
        places = [(plane * plane_pixels + column) * lanes for plane in range(planes) for column in range(run.width)]
        source(f"{source.make('stores', *places)}(memory, to, sums)")


def _sum(source: Source, kernel: ForwardKernel, planes: int, run: tiles.Run) -> None:
    shape = kernel.shape
    area = shape.kernel * shape.kernel
    with source.inside(f"for channel in range({shape.channels}):"), source.inside("for tap in range(first, last):"):
        source(f"line = channel * {shape.height} + row * {shape.stride} + tap - {shape.pad}")
        source(f"v = inputs + (line * {shape.width} + column * {shape.stride}) * {kernel.lanes}")
        source(f"w = {kernel.weight} + (plane * {shape.channels} + channel) * {area} + tap * {shape.kernel}")
        multiply_add(source, run, planes, shape.channels * area, kernel.lanes)


def emit_pool(source: Source, kernel: ForwardKernel, planes: int) -> None:
    """Emit the max-pooling of the rows of `planes` maps, from the buffer of rows into the outputs."""
    shape = kernel.shape
    lanes = kernel.lanes
    window = kernel.window
    across = shape.columns // window
    first, last = (edge // window for edge in kernel.columns)
    with source.inside(f"for column in range({first}, {last}):"):
        with source.inside(f"for line in range({planes}):"):
            source(f"v = unpooled + (line * {window * shape.columns} + column * {window}) * {lanes}")
            pool.window(source, window, shape.columns, lanes, kernel.relu)
            source(f"to = (((plane + line) * {shape.rows // window} + top) * {across} + column) * {lanes}")
            source("store(memory, outputs + to, best)")
            source("store(memory, winners + to, winner)")
