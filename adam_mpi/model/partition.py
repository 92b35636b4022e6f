"""A model cut into vertical strips: what each rank owns of every layer, and what it needs of the others. Pure.

Spatial layers are cut by columns, dense layers by units. Between layers there is one kind of exchange: along one axis
every strip owns a part and needs another. Around a convolution that is its own part and a border (halo) of its
neighbors, before a dense layer everything.

In a hybrid replica ranks share out images instead of columns: each has whole layers up to the first dense one, for its
own images; before that layer all are put together (`Assembly`), and dense layers are cut by units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from adam_mpi.base.errors import UserError
from adam_mpi.model import parameters
from adam_mpi.model.exchange import Assembly, Exchange, Span, ranks_of
from adam_mpi.model.layers import Conv, Dense, Extent, LayerShape, MaxPool


@dataclass(frozen=True)
class Piece:
    """A run of the flat parameter vector, and where it begins in the shorter one of a strip."""

    start: int
    size: int
    local: int


@dataclass(frozen=True)
class Strip:
    """One rank's part of the model."""

    number: int
    shapes: tuple[LayerShape, ...]
    """The layers as this strip has them."""
    stack: tuple[LayerShape, ...]
    """The same with the exchanges between them."""
    columns: Span
    """Of the image."""
    pieces: tuple[Piece, ...]

    @property
    def ranks(self) -> int:
        """Among which the images are shared out, up to the first dense layer."""
        return ranks_of(shape.layer for shape in self.stack)

    @property
    def flops(self) -> int:
        """Of one image in training: forward, to the weights, and to the data of all but the first layer."""
        connections = [shape.connections // self._sharing(shape) for shape in self.shapes if shape.weight]
        return 6 * sum(connections) - 2 * connections[0]

    @property
    def values(self) -> int:
        """Of one image: all inputs and outputs of layers."""
        sizes = ((math.prod(shape.input) + math.prod(shape.output), self._sharing(shape)) for shape in self.shapes)
        return sum(-(-size // sharing) for size, sharing in sizes)

    def _sharing(self, shape: LayerShape) -> int:
        """Ranks that take turns with the images of a layer: those of a whole one in a hybrid replica."""
        return self.ranks if shape.extent is None else 1

    @property
    def parameters(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def bytes(self, images: int) -> int:
        """What a batch goes through: weights, their gradient, and the values of all images."""
        return 4 * (2 * self.parameters + images * self.values)

    def local(self, start: int) -> int:
        """Where a place of the flat vector lies in this strip's own."""
        for piece in self.pieces:
            if piece.start <= start < piece.start + piece.size:
                return piece.local + start - piece.start
        raise LookupError(f"strip {self.number} does not hold parameter {start}")

    def holds(self, start: int) -> bool:
        return any(piece.start <= start < piece.start + piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Partition:
    shapes: tuple[LayerShape, ...]
    owned: tuple[tuple[Span, ...], ...]
    """Of each layer's output: the columns or units of every strip."""
    exchanges: dict[int, Exchange]
    """By the index of the layer that needs it; after the last layer that of the loss."""

    def __len__(self) -> int:
        return len(self.owned[0])

    @property
    def hybrid(self) -> bool:
        return ranks_of(self.exchanges.values()) > 1

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        return tuple(self._strip(number) for number in range(len(self)))

    def traffic(self, strip: int) -> tuple[int, int]:
        """Values of an image that a strip sends and receives, forward and backward."""
        found = self.exchanges.values()
        back = [exchange for exchange in found if exchange.summed]
        sent = sum(e.sent(strip) for e in found) + sum(e.received(strip) for e in back)
        return sent, sum(e.received(strip) for e in found) + sum(e.sent(strip) for e in back)

    @cached_property
    def common(self) -> tuple[tuple[Span, ...], ...]:
        """Runs of the flat vector that every strip holds, each cut evenly: who sums up and pushes which part."""
        found = []
        for shape in self.shapes:
            if isinstance(shape.layer, Conv):
                start, stop = parameters.spans(self.shapes)[shape.name]
                found.append(_even(stop - start, len(self), start))
        return tuple(found)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Places of the flat vector where what one strip pushes ends."""
        if len(self) == 1:
            return ()
        found = {place for spans in self.common for span in spans for place in span}
        dense = {shape.name for shape in self.shapes if isinstance(shape.layer, Dense)}
        starts = {tensor.offset for tensor in parameters.tensors(self.shapes) if tensor.layer not in dense}
        for piece in (piece for strip in self.strips for piece in strip.pieces if piece.start not in starts):
            found |= {piece.start, piece.start + piece.size}
        return tuple(sorted(found))

    def owner(self, start: int) -> int:
        """The strip that pushes this place of the flat vector."""
        for spans in self.common:
            for number, (a, b) in enumerate(spans):
                if a <= start < b:
                    return number
        return next(strip.number for strip in self.strips if strip.holds(start))

    def _strip(self, number: int) -> Strip:
        if len(self) == 1:
            return Strip(number, self.shapes, self.shapes, (0, self.shapes[0].input[2]), self._pieces(number))
        shapes = tuple(self._local(index, number) for index in range(len(self.shapes)))
        columns = (0, self.shapes[0].input[2]) if self.hybrid else _needed(self.shapes[0], self.owned[0][number])
        return Strip(number, shapes, self._stack(shapes), columns, self._pieces(number))

    def _stack(self, shapes: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
        stack: list[LayerShape] = []
        for index in range(len(shapes) + 1):
            if index in self.exchanges:
                exchange, before = self.exchanges[index], shapes[index - 1].output
                after = shapes[index].input if index < len(shapes) else self.shapes[-1].output
                stack.append(LayerShape(f"{exchange.layer}/exchange", exchange, before, after))
            stack += shapes[index : index + 1]
        return tuple(stack)

    def _local(self, index: int, strip: int) -> LayerShape:
        whole, (a, b) = self.shapes[index], self.owned[index][strip]
        if isinstance(whole.layer, Dense):
            weight = (b - a, (whole.weight or ())[1])
            return replace(
                whole,
                layer=Dense(b - a),
                output=(b - a, 1, 1),
                weight=weight,
                bias=(b - a,),
                extent=Extent(a, b - a, whole.layer.units),
            )
        if _flat(self.shapes, index):
            return replace(whole, input=(b - a, 1, 1), output=(b - a, 1, 1), extent=Extent(a, b - a, whole.output[0]))
        if self.hybrid:
            return whole
        first, last = _needed(whole, (a, b))
        extent = Extent(a, b - a, whole.output[2])
        if isinstance(whole.layer, Conv):
            begin, end = a * whole.layer.stride, (b - 1) * whole.layer.stride + whole.layer.kernel
            extent = replace(extent, left=first - begin + whole.layer.pad, right=end - whole.layer.pad - last)
        return replace(whole, input=(*whole.input[:2], last - first), output=(*whole.output[:2], b - a), extent=extent)

    def _pieces(self, strip: int) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        local = 0
        layers = {shape.name: index for index, shape in enumerate(self.shapes)}
        for tensor in parameters.tensors(self.shapes):
            start, size = tensor.offset, tensor.size
            if isinstance(self.shapes[layers[tensor.layer]].layer, Dense):
                (a, b), row = self.owned[layers[tensor.layer]][strip], tensor.size // tensor.shape[0]
                start, size = start + a * row, (b - a) * row
            pieces.append(Piece(start, size, local))
            local += size
        return tuple(pieces)


def partition(shapes: Sequence[LayerShape], strips: int, scheme: str = "strips") -> Partition:
    """Cut a model into so many strips; an error names the layer that does not allow it, and how many would do."""
    shapes = tuple(shapes)
    if scheme == "hybrid" and not any(isinstance(shape.layer, Conv) for shape in shapes):
        raise UserError('layout.scheme = "hybrid": the model has no convolution to share out by images; set "strips"')
    trouble, found = _try(shapes, strips, scheme)
    if found is not None:
        return found
    most = next(count for count in range(strips - 1, 0, -1) if _try(shapes, count, scheme)[1] is not None)
    raise UserError(f"layout.partitions = {strips}: {trouble}; set at most {most}")


def most(shapes: Sequence[LayerShape], scheme: str = "strips") -> int:
    """The largest number of strips that the layers allow."""
    shapes = tuple(shapes)
    places = min(_places(shapes, group[-1]) for group in _cut_alike(shapes, scheme))
    return next(count for count in range(places, 0, -1) if _try(shapes, count, scheme)[1] is not None)


def fitting(shapes: Sequence[LayerShape], images: int, cache: int, most: int, scheme: str = "strips") -> Partition:
    """The smallest number of strips, up to `most`, whose working sets fit the cache; else as many as there can be."""
    best = partition(shapes, 1, scheme)
    for strips in range(2, most + 1):
        if max(strip.bytes(images) for strip in best.strips) <= cache:
            break
        best = _try(tuple(shapes), strips, scheme)[1] or best
    return best


def _try(shapes: tuple[LayerShape, ...], strips: int, scheme: str) -> tuple[str, Partition | None]:
    groups = _cut_alike(shapes, scheme)
    for group in groups:
        count = _places(shapes, group[-1])
        if count < strips:
            dense = isinstance(shapes[group[0]].layer, Dense)
            name, kind = (shapes[group[0]].name, "units") if dense else (shapes[group[-1]].name, "columns")
            return f"{name} has {count} {kind}", None
    owned = _own(shapes, strips, groups)
    if scheme == "hybrid":
        return "", Partition(shapes, owned, _assembled(shapes, owned))
    exchanges = _exchanges(shapes, owned)
    for index, exchange in exchanges.items():
        if index < len(shapes) and not isinstance(shapes[index].layer, Dense):
            trouble = _too_narrow(exchange)
            if trouble:
                return trouble, None
    return "", Partition(shapes, owned, exchanges)


def _too_narrow(exchange: Exchange) -> str:
    """A border must be the neighbor's own: strips exchange with their neighbors only."""
    owned = exchange.owned
    for number, (first, last) in enumerate(exchange.needed):
        lowest, highest = owned[max(0, number - 1)][0], owned[min(len(owned) - 1, number + 1)][1]
        if first < lowest or last > highest:
            narrowest = min(b - a for a, b in owned)
            return f"{exchange.layer} needs a border wider than its input's narrowest strip of {narrowest} columns"
    return ""


def _groups(shapes: tuple[LayerShape, ...]) -> list[list[int]]:
    """Layers cut alike: a convolution with the layers that follow it; a dense layer with its activations.

    Without any window the layers before the first dense one are whole on every strip: they are in no group.
    """
    groups: list[list[int]] = []
    windows = any(isinstance(shape.layer, Conv | MaxPool) for shape in shapes)
    for index, shape in enumerate(shapes):
        begins = isinstance(shape.layer, Conv | Dense) or index == 0
        if begins and not (index == 0 and not windows and not isinstance(shape.layer, Dense)):
            groups.append([index])
        elif groups:
            groups[-1].append(index)
    return groups


def _cut_alike(shapes: tuple[LayerShape, ...], scheme: str) -> list[list[int]]:
    """Those groups that are cut: in a hybrid replica nothing is cut by columns."""
    return [group for group in _groups(shapes) if scheme == "strips" or isinstance(shapes[group[0]].layer, Dense)]


def _own(shapes: tuple[LayerShape, ...], strips: int, groups: list[list[int]]) -> tuple[tuple[Span, ...], ...]:
    """Columns and units of every strip: those that cannot be shared out evenly go to whoever has least to do."""
    owned: list[tuple[Span, ...]] = [((0, _places(shapes, index)),) * strips for index in range(len(shapes))]
    work = [0.0] * strips
    weighed = [(sum(shapes[i].connections for i in group) / _places(shapes, group[-1]), group) for group in groups]
    for weight, group in sorted(weighed, key=lambda pair: (-pair[0], pair[1])):
        count = _places(shapes, group[-1])
        sizes = [count // strips] * strips
        for number in sorted(range(strips), key=lambda number: (work[number], number))[: count % strips]:
            sizes[number] += 1
        work = [done + weight * size for done, size in zip(work, sizes, strict=True)]
        edges = [sum(sizes[:number]) for number in range(strips + 1)]
        for index in reversed(group):
            owned[index] = tuple(pairwise(edges))
            edges = _before(shapes[index], edges)
    return tuple(owned)


def _before(shape: LayerShape, edges: list[int]) -> list[int]:
    """Edges of a layer's input that go best with those of its output."""
    if not isinstance(shape.layer, MaxPool):
        return edges
    size, stride = shape.layer.size, shape.layer.stride
    inner = [edge * stride + max(0, (size - stride) // 2) for edge in edges[1:-1]]
    return [0, *inner, shape.input[2]]


def _exchanges(shapes: tuple[LayerShape, ...], owned: tuple[tuple[Span, ...], ...]) -> dict[int, Exchange]:
    found: dict[int, Exchange] = {}
    if len(owned[0]) == 1:
        return found
    for index, shape in enumerate(shapes[1:], 1):
        flat, before = _flat(shapes, index - 1), shapes[index - 1]
        whole = (0, before.output[0] if flat else before.output[2])
        if isinstance(shape.layer, Dense):
            needed = (whole,) * len(owned[0])
        else:
            needed = owned[index] if flat else tuple(_needed(shape, span) for span in owned[index])
        if needed != owned[index - 1]:
            lines = 1 if flat else math.prod(before.output[:2])
            found[index] = Exchange(shape.name, owned[index - 1], needed, lines)
    logits = ((0, shapes[-1].output[0]),) * len(owned[0])
    found[len(shapes)] = Exchange("loss", owned[-1], logits, 1, summed=False)
    return found


def _assembled(shapes: tuple[LayerShape, ...], owned: tuple[tuple[Span, ...], ...]) -> dict[int, Exchange]:
    """The exchanges of a hybrid replica: those of dense layers, the first one for images."""
    found = {index: exchange for index, exchange in _exchanges(shapes, owned).items() if _flat(shapes, index - 1)}
    if not found:
        return {}
    first = next(index for index, shape in enumerate(shapes) if isinstance(shape.layer, Dense))
    values = ((0, math.prod(shapes[first].input)),) * len(owned[0])
    return {first: Assembly(shapes[first].name, values, values, 1), **found}


def _needed(shape: LayerShape, span: Span) -> Span:
    """Columns of a layer's input that some columns of its output are computed from."""
    a, b = span
    layer, width = shape.layer, shape.input[2]
    if isinstance(layer, Dense):
        return 0, width
    if isinstance(layer, Conv):
        return max(0, a * layer.stride - layer.pad), min(width, (b - 1) * layer.stride - layer.pad + layer.kernel)
    if isinstance(layer, MaxPool):
        return a * layer.stride, (b - 1) * layer.stride + layer.size
    return span


def _flat(shapes: Sequence[LayerShape], index: int) -> bool:
    """Whether a layer's output is units, not columns."""
    return any(isinstance(shape.layer, Dense) for shape in shapes[: index + 1])


def _places(shapes: Sequence[LayerShape], index: int) -> int:
    """Columns, or units, of a layer's output."""
    return shapes[index].output[0 if _flat(shapes, index) else 2]


def _even(size: int, parts: int, start: int) -> tuple[Span, ...]:
    return tuple(pairwise(start + part * size // parts for part in range(parts + 1)))
