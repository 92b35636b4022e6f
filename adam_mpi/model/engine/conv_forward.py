"""Convolution forward, with what may follow it: bias, relu, max-pooling without overlap.

for each row of windows:
    for each tile of maps:
        for each row of the window:                           one row when nothing is pooled
            for each tile of columns:
                sums = bias
                for each channel, for each kernel row inside the image:
                    sums += weights * inputs                  convolution.multiply_add
                store them: as outputs, or in a strip of rows to be pooled
        for each column of windows:
            pool the strip                                    pool.window
"""

from adam_mpi.model.engine import pool, tiles
from adam_mpi.model.engine.convolution import Shape, forward_taps, multiply_add
from adam_mpi.model.engine.source import Source
from adam_mpi.model.exchange import Span


def strip_floats(shape: Shape, window: int, tile: tiles.Tile, lanes: int) -> int:
    """Of the strip that holds a tile of maps' rows until they are pooled."""
    return tile.planes * window * shape.columns * lanes


def emit(
    source: Source,
    name: str,
    shape: Shape,
    weight: int,
    bias: int,
    lanes: int,
    tile: tiles.Tile,
    relu: bool = False,
    window: int = 1,
    span: Span | None = None,
) -> None:
    """`weight`, `bias`: places in the weights. Arguments: places in the memory of one block's inputs, outputs, ...

    `span`: only these columns, whole windows of them.
    """
    span = span or (0, shape.columns // window * window)
    arguments = "inputs, outputs" if window == 1 else "inputs, outputs, winners, strip"
    with source.kernel(f"{name}(memory, weights, {arguments})", f"Forward: {shape}, {tile}."):
        with source.inside(f"for top in range({shape.rows // window}):"):
            for maps in tiles.each(source, "plane", tiles.runs(shape.maps, tile.planes)):
                with source.inside(f"for step in range({window}):"):
                    source(f"row = top * {window} + step")
                    _rows(source, shape, weight, bias, lanes, tile, maps.width, relu, window, span)
                if window > 1:
                    pool_strip(source, shape, lanes, maps.width, relu, window, span)


def _rows(
    source: Source,
    shape: Shape,
    weight: int,
    bias: int,
    lanes: int,
    tile: tiles.Tile,
    planes: int,
    relu: bool,
    window: int,
    span: Span,
) -> None:
    source(f"first = max(0, {shape.pad} - row * {shape.stride})")
    source(f"last = min({shape.kernel}, {shape.height + shape.pad} - row * {shape.stride})")
    cut = tiles.runs(span[1], tile.columns, lambda *at: forward_taps(shape, *at), span[0])
    for run in tiles.each(source, "column", cut):
        starts = [plane for plane in range(planes) for _ in range(run.width)]
        source(f"sums = {source.make('broadcasts', *starts)}(weights, {bias} + plane)")
        _sum(source, shape, weight, lanes, planes, run)
        if relu and window == 1:
            source(f"sums = {source.make('positives', planes * run.width)}(sums)")
        line = f"outputs + (plane * {shape.rows} + row" if window == 1 else "strip + (step"
        source(f"to = {line}) * {shape.columns * lanes} + column * {lanes}")
        apart = (shape.rows if window == 1 else window) * shape.columns
        places = [(plane * apart + column) * lanes for plane in range(planes) for column in range(run.width)]
        source(f"{source.make('stores', *places)}(memory, to, sums)")


def _sum(source: Source, shape: Shape, weight: int, lanes: int, planes: int, run: tiles.Run) -> None:
    area = shape.kernel * shape.kernel
    with source.inside(f"for channel in range({shape.channels}):"), source.inside("for tap in range(first, last):"):
        source(f"line = channel * {shape.height} + row * {shape.stride} + tap - {shape.pad}")
        source(f"v = inputs + (line * {shape.width} + column * {shape.stride}) * {lanes}")
        source(f"w = {weight} + (plane * {shape.channels} + channel) * {area} + tap * {shape.kernel}")
        multiply_add(source, run, planes, shape.channels * area, lanes)


def pool_strip(
    source: Source, shape: Shape, lanes: int, planes: int, relu: bool, window: int, span: Span | None = None
) -> None:
    across = shape.columns // window
    first, last = (edge // window for edge in span or (0, shape.columns))
    with source.inside(f"for column in range({first}, {last}):"):
        with source.inside(f"for line in range({planes}):"):
            source(f"v = strip + (line * {window * shape.columns} + column * {window}) * {lanes}")
            pool.window(source, window, shape.columns, lanes, relu)
            source(f"to = (((plane + line) * {shape.rows // window} + top) * {across} + column) * {lanes}")
            source("store(memory, outputs + to, best)")
            source("store(memory, winners + to, winner)")
