"""Emit a dense layer forward, for all blocks at once; and back to the data, which is the same with other strides.

    results = bias                                                or the sums, when there is one chunk only
    for each chunk of terms (the units that are summed over):     a chunk of their values stays in the cache
        for each tile of units, for each tile of blocks:
            sums = results
            for each term of the chunk:
                sums += weight * values
            results = sums
    relu, or the mask that relu left, over all results

Back to the data a tile reads a few weights of every row, and rows whose length is a power of two fall into the same
sets of the cache. Where there are many weights, those of a group of tiles are packed first:

        for each group of tiles of units:
            panel[term][unit] = weights                           a vector after the other; the next group is fetched
            for each tile of blocks, for each tile of units of the group: as above, with weights of the panel
"""

from dataclasses import dataclass

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.schedule import ALIGNMENT
from adam_mpi.model.engine.source import BROADCAST, Source

CHUNK = 128
PACKED_WEIGHTS = 2**19
"""Weights from which on packing them pays."""
ROWS = 8
"""Rows that a tile reads side by side of many weights: the ways of a first-level cache, whose sets rows may share."""


@dataclass(frozen=True)
class Product:
    """results[unit] = sum over terms of weights[weight + unit * unit_step + term * term_step] * values[term]."""

    units: int
    terms: int
    unit_step: int
    term_step: int
    bias: int | None = None
    relu: bool = False
    masked: bool = False
    """Whether there is no error where `mask`, an output of relu, is not above zero."""


@dataclass(frozen=True)
class ProductTiles:
    """`many` is used while there are blocks enough for it, `single` for those that remain, one at a time."""

    many: tiles.Tile
    single: tiles.Tile


def forward(units: int, features: int, bias: int | None = None, relu: bool = False) -> Product:
    """Return the product of a dense layer forward; `bias` is the bias's offset in the flat vector of parameters."""
    return Product(units=units, terms=features, unit_step=features, term_step=1, bias=bias, relu=relu)


def to_data(units: int, features: int, masked: bool = False) -> Product:
    """Return the product of a dense layer back to the errors of its inputs, which a relu made if `masked`."""
    return Product(units=features, terms=units, unit_step=1, term_step=features, masked=masked)


def choose(product: Product, blocks: int, registers: int) -> ProductTiles:
    """Return the cheapest tiles for `blocks` blocks."""
    units = min(product.units, ROWS) if _many(product) and product.term_step == 1 else product.units
    many, single = (tiles.choose(units, count, registers, overhead=1.0) for count in (blocks, 1))
    return ProductTiles(many, single)


def group(product: Product, lanes: int, tile: tiles.Tile) -> int:
    """Return how many units are packed together, whole tiles and whole vectors of them; 0: none are."""
    size = lanes * tile.planes
    return size if product.unit_step == 1 and _many(product) and product.units >= size else 0


def panel_floats(product: Product, lanes: int, tile: tiles.Tile) -> int:
    """Return the floats of the panel that packed weights take."""
    return CHUNK * group(product, lanes, tile)


def _many(product: Product) -> bool:
    return product.units * product.terms >= PACKED_WEIGHTS


def emit(source: Source, name: str, product: Product, lanes: int, chosen: ProductTiles) -> None:
    """Emit the kernel `name` that computes `product` in the `chosen` tiles; `panel` has room for packed weights."""
    tile = chosen.many
    single = chosen.single
    width = -(-product.terms // -(-product.terms // CHUNK))
    packed = group(product, lanes, tile)
    done = product.units // packed * packed if packed else 0
    head = f"{name}(memory, weights, weight, values, results, mask, panel, blocks)"
    with source.kernel(head, f"{product}, {tile}, {single}."):
        if width < product.terms:
            _start(source, product, lanes)
        source(f"whole = blocks // {tile.columns} * {tile.columns}")
        with source.inside(f"for chunk in range(0, {product.terms}, {width}):"):
            source(f"end = min(chunk + {width}, {product.terms})")
            if packed:
                with source.inside(f"for group in range(0, {done}, {packed}):"):
                    _pack(source, product, lanes, packed)
                    with source.inside(f"for block in range(0, whole, {tile.columns}):"):
                        with source.inside(f"for unit in range(group, group + {packed}, {tile.planes}):"):
                            _tile(source, product, lanes, tile, packed)
            for units in tiles.each(source, "unit", tiles.runs(product.units, tile.planes, first=done)):
                with source.inside(f"for block in range(0, whole, {tile.columns}):"):
                    _tile(source, product, lanes, tiles.Tile(units.width, tile.columns))
            if tile.columns > 1:
                for units in tiles.each(source, "unit", tiles.runs(product.units, single.planes)):
                    with source.inside("for block in range(whole, blocks):"):
                        _tile(source, product, lanes, tiles.Tile(units.width, 1))
        _finish(source, product, lanes)


def _start(source: Source, product: Product, lanes: int) -> None:
    with source.inside("for block in range(blocks):"), source.inside(f"for unit in range({product.units}):"):
        source(f"store(memory, results + (block * {product.units} + unit) * {lanes}, {_first(product, 'unit')})")


def _first(product: Product, unit: str) -> str:
    return "zero()" if product.bias is None else f"broadcast(weights, {product.bias} + {unit})"


def _pack(source: Source, product: Product, lanes: int, packed: int) -> None:
    with source.inside("for term in range(chunk, end):"):
        source(f"w = weight + group + term * {product.term_step}")
        source(f"to = panel + (term - chunk) * {packed}")
        for unit in range(0, packed, lanes):
            source(f"store(memory, to + {unit}, load(weights, w + {unit}))")
        source(f"{source.make('prefetches', False, *range(packed, 2 * packed, ALIGNMENT))}(weights, w)")


def _tile(source: Source, product: Product, lanes: int, tile: tiles.Tile, packed: int = 0) -> None:
    """Emit the sums of a tile of units x blocks; `packed`: units in a row of the panel, 0 if it is not used."""
    source(f"to = results + (block * {product.units} + unit) * {lanes}")
    pairs = [(unit, block) for unit in range(tile.planes) for block in range(tile.columns)]
    places = [(block * product.units + unit) * lanes for unit, block in pairs]
    if product.terms > CHUNK:
        source(f"sums = {source.make('loads', *places)}(memory, to)")
    elif product.bias is None:
        source(f"sums = {source.make('zeros', len(pairs))}()")
    else:
        source(f"sums = {source.make('broadcasts', *(unit for unit, _ in pairs))}(weights, {product.bias} + unit)")
    if _many(product) and product.term_step == 1:
        _fetch_next(source, product, tile.planes)
    with source.inside("for term in range(chunk, end):"):
        source(f"v = values + (block * {product.terms} + term) * {lanes}")
        if packed:
            source(f"w = panel + (term - chunk) * {packed} + unit - group")
        else:
            source(f"w = weight + unit * {product.unit_step} + term * {product.term_step}")
        array = "memory" if packed else "weights"
        step = 1 if packed else product.unit_step
        products = [(number, unit * step, block * product.terms * lanes) for number, (unit, block) in enumerate(pairs)]
        source(f"sums = {source.make('multiply_adds', len(pairs), BROADCAST, *products)}(sums, {array}, w, memory, v)")
    source(f"{source.make('stores', *places)}(memory, to, sums)")


def _fetch_next(source: Source, product: Product, units: int) -> None:
    """Emit the prefetch of the weights of the next tile, a chunk of each of its rows."""
    places = [row * product.unit_step + term for row in range(units, 2 * units) for term in range(0, CHUNK, ALIGNMENT)]
    source(f"{source.make('prefetches', False, *places)}(weights, weight + unit * {product.unit_step} + chunk)")


def _finish(source: Source, product: Product, lanes: int) -> None:
    if not (product.relu or product.masked):
        return
    with source.inside(f"for place in range(0, blocks * {product.units * lanes}, {lanes}):"):
        source("result = load(memory, results + place)")
        if product.relu:
            source("result = maximum(zero(), result)")
        else:
            source("result = greater(load(memory, mask + place), zero(), result, zero())")
        source("store(memory, results + place, result)")
