"""Fully-connected layer forward, for all blocks at once; and back to the data, which is the same with other strides.

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
from adam_mpi.model.engine.memory import ALIGNMENT
from adam_mpi.model.engine.source import BROADCAST, Source

CHUNK = 128
PACKED_WEIGHTS = 2**19
"""So many weights are worth packing."""
ROWS = 8
"""Of many weights that a tile reads side by side: the ways of a first-level cache, whose sets rows may share."""


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
    """No error where `mask`, an output of relu, is not above zero."""


def forward(units: int, features: int, bias: int | None = None, relu: bool = False) -> Product:
    return Product(units, features, features, 1, bias, relu)


def to_data(units: int, features: int, masked: bool = False) -> Product:
    return Product(features, units, 1, features, masked=masked)


def choose(product: Product, blocks: int, registers: int) -> tuple[tiles.Tile, tiles.Tile]:
    """A tile for many blocks, and one for a single one."""
    units = min(product.units, ROWS) if _many(product) and product.term_step == 1 else product.units
    many, single = (tiles.choose(units, count, registers, overhead=1.0) for count in (blocks, 1))
    return many, single


def group(product: Product, lanes: int, tile: tiles.Tile) -> int:
    """Units that are packed together, whole tiles and whole vectors of them; 0: none are."""
    size = lanes * tile.planes
    return size if product.unit_step == 1 and _many(product) and product.units >= size else 0


def _many(product: Product) -> bool:
    return product.units * product.terms >= PACKED_WEIGHTS


def emit(source: Source, name: str, product: Product, lanes: int, tile: tiles.Tile, single: tiles.Tile) -> None:
    """`tile` is used while there are blocks enough for it, `single` for those that remain, one at a time.

    `panel` is room for CHUNK times a group of weights.
    """
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
                            _tile(source, product, lanes, tile.planes, tile.columns, packed)
            for units in tiles.each(source, "unit", tiles.runs(product.units, tile.planes, first=done)):
                with source.inside(f"for block in range(0, whole, {tile.columns}):"):
                    _tile(source, product, lanes, units.width, tile.columns)
            if tile.columns > 1:
                for units in tiles.each(source, "unit", tiles.runs(product.units, single.planes)):
                    with source.inside("for block in range(whole, blocks):"):
                        _tile(source, product, lanes, units.width, 1)
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


def _tile(source: Source, product: Product, lanes: int, units: int, blocks: int, packed: int = 0) -> None:
    """`packed`: units in a row of the panel; 0: the weights are not packed."""
    source(f"to = results + (block * {product.units} + unit) * {lanes}")
    pairs = [(unit, block) for unit in range(units) for block in range(blocks)]
    places = [(block * product.units + unit) * lanes for unit, block in pairs]
    if product.terms > CHUNK:
        source(f"sums = {source.make('loads', *places)}(memory, to)")
    elif product.bias is None:
        source(f"sums = {source.make('zeros', len(pairs))}()")
    else:
        source(f"sums = {source.make('broadcasts', *(unit for unit, _ in pairs))}(weights, {product.bias} + unit)")
    if _many(product) and product.term_step == 1:
        _fetch_next(source, product, units)
    with source.inside("for term in range(chunk, end):"):
        source(f"v = values + (block * {product.terms} + term) * {lanes}")
        if packed:
            array, step, origin = "memory", 1, f"panel + (term - chunk) * {packed} + unit - group"
        else:
            array, step = "weights", product.unit_step
            origin = f"weight + unit * {product.unit_step} + term * {product.term_step}"
        source(f"w = {origin}")
        products = [(number, unit * step, block * product.terms * lanes) for number, (unit, block) in enumerate(pairs)]
        source(f"sums = {source.make('multiply_adds', len(pairs), BROADCAST, *products)}(sums, {array}, w, memory, v)")
    source(f"{source.make('stores', *places)}(memory, to, sums)")


def _fetch_next(source: Source, product: Product, units: int) -> None:
    """Emit: fetch the weights of the next tile, a chunk of each of its rows."""
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
