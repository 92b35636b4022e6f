"""A model partitioned into vertical strips: the layers, exchanges and parameters of each strip. Pure.

`model/strips.py` says what each strip owns of every layer, and what it needs of the others.

In a hybrid replica ranks share images instead of columns: each has whole layers up to the first dense one, for its
own images; before that layer all images are put together (`Assembly`), and dense layers are cut by units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from adam_mpi.base.errors import UserError
from adam_mpi.model import parameters
from adam_mpi.model.exchange import Exchange, Span, ranks_of
from adam_mpi.model.graph_layers import GraphLayers
from adam_mpi.model.layers import Conv, Dense, Extent, LayerShape
from adam_mpi.model.strips import (
    Owned,
    axis_length,
    even_spans,
    groups_to_cut,
    hybrid_exchanges,
    is_flat,
    needed_span,
    owned_spans,
    reaches_too_far,
    strip_exchanges,
)


@dataclass(frozen=True)
class Piece:
    """A span of the flat parameter vector, and where it begins in the shorter vector of a strip."""

    start: int
    size: int
    local: int


@dataclass(frozen=True)
class Strip:
    """One rank's part of the model."""

    number: int
    shapes: tuple[LayerShape, ...]
    """The layers with the shapes that they have on this strip."""
    stack: tuple[LayerShape, ...]
    """The same with the exchanges between them."""
    columns: Span
    """The columns of the image that it needs."""
    pieces: tuple[Piece, ...]

    @property
    def ranks(self) -> int:
        """Return how many ranks share the images up to the first dense layer: 1 except in a hybrid replica."""
        return ranks_of(shape.layer for shape in self.stack)

    @property
    def flops(self) -> int:
        """Return the operations of training on one image: forward, to the weights, to all inputs but the first."""
        connections = [shape.connections // self._sharing(shape) for shape in self.shapes if shape.weight]
        return 6 * sum(connections) - 2 * connections[0]

    @property
    def values(self) -> int:
        """Return the number of inputs and outputs of all layers of the strip, of one image."""
        sizes = ((math.prod(shape.input) + math.prod(shape.output), self._sharing(shape)) for shape in self.shapes)
        return sum(-(-size // sharing) for size, sharing in sizes)

    def _sharing(self, shape: LayerShape) -> int:
        """Return how many ranks share the images of a layer: those of a whole layer in a hybrid replica."""
        return self.ranks if shape.extent is None else 1

    @property
    def parameters(self) -> int:
        """Return the number of parameters of this strip."""
        return sum(piece.size for piece in self.pieces)

    def bytes(self, images: int) -> int:
        """Return the working set of a batch of `images` images: weights, gradient, and all inputs and outputs."""
        return 4 * (2 * self.parameters + images * self.values)

    def local(self, start: int) -> int:
        """Return where index `start` of the flat vector is in this strip's vector; raise LookupError if it is not."""
        for piece in self.pieces:
            if piece.start <= start < piece.start + piece.size:
                return piece.local + start - piece.start
        raise LookupError(f"strip {self.number} does not hold parameter {start}")

    def holds(self, start: int) -> bool:
        """Return whether index `start` of the flat vector is in this strip's vector."""
        return any(piece.start <= start < piece.start + piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Partition:
    """A model cut into strips; a partition of one strip is the whole model."""

    shapes: tuple[LayerShape, ...]
    owned: Owned
    """The columns or units of every strip, for each layer's output."""
    exchanges: dict[int, Exchange]
    """By the index of the layer that needs it; after the last layer that of the loss."""

    def __len__(self) -> int:
        return len(self.owned[0])

    @property
    def hybrid(self) -> bool:
        """Return whether ranks share images instead of columns."""
        return ranks_of(self.exchanges.values()) > 1

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """Return all strips of the partition, by number."""
        return tuple(self._strip(number) for number in range(len(self)))

    def traffic(self, strip: int) -> tuple[int, int]:
        """Return the values of an image that `strip` sends and receives, forward and backward."""
        forward = self.exchanges.values()
        backward = [exchange for exchange in forward if exchange.summed]
        sent = sum(e.mean_values_sent(strip) for e in forward) + sum(e.mean_values_received(strip) for e in backward)
        received = sum(e.mean_values_received(strip) for e in forward) + sum(
            e.mean_values_sent(strip) for e in backward
        )
        return sent, received

    @cached_property
    def common(self) -> tuple[tuple[Span, ...], ...]:
        """Return the spans that every strip holds, each cut evenly: strip r sums and pushes the r-th part."""
        found = []
        for shape in self.shapes:
            if isinstance(shape.layer, Conv):
                start, stop = parameters.spans(self.shapes)[shape.name]
                found.append(even_spans(stop - start, len(self), start))
        return tuple(found)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Return the indices of the flat vector at which the part that one strip pushes ends."""
        if len(self) == 1:
            return ()
        found = {edge for spans in self.common for span in spans for edge in span}
        dense = {shape.name for shape in self.shapes if isinstance(shape.layer, Dense)}
        starts = {tensor.offset for tensor in parameters.tensors(self.shapes) if tensor.layer not in dense}
        for piece in (piece for strip in self.strips for piece in strip.pieces if piece.start not in starts):
            found |= {piece.start, piece.start + piece.size}
        return tuple(sorted(found))

    def owner(self, start: int) -> int:
        """Return the strip that pushes index `start` of the flat vector."""
        for spans in self.common:
            for number, (first, last) in enumerate(spans):
                if first <= start < last:
                    return number
        return next(strip.number for strip in self.strips if strip.holds(start))

    def _strip(self, number: int) -> Strip:
        """Return strip `number`."""
        width = self.shapes[0].input[2]
        if len(self) == 1:
            return Strip(number, self.shapes, self.shapes, (0, width), self._pieces(number))
        shapes = tuple(self._local(index, number) for index in range(len(self.shapes)))
        columns = (0, width) if self.hybrid else needed_span(self.shapes[0], self.owned[0][number])
        return Strip(number, shapes, self._stack(shapes), columns, self._pieces(number))

    def _stack(self, shapes: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
        """Return the layers of a strip with the exchanges between them."""
        stack: list[LayerShape] = []
        for index in range(len(shapes) + 1):
            exchange = self.exchanges.get(index)
            if exchange is not None:
                after = shapes[index].input if index < len(shapes) else self.shapes[-1].output
                stack.append(LayerShape(f"{exchange.layer}/exchange", exchange, shapes[index - 1].output, after))
            stack += shapes[index : index + 1]
        return tuple(stack)

    def _local(self, index: int, strip: int) -> LayerShape:
        """Return the layer at `index` with the shapes that it has on `strip`."""
        whole = self.shapes[index]
        start, stop = self.owned[index][strip]
        size = stop - start
        if isinstance(whole.layer, Dense):
            return replace(
                whole,
                layer=Dense(size),
                output=(size, 1, 1),
                weight=(size, (whole.weight or ())[1]),
                bias=(size,),
                extent=Extent(start, size, whole.layer.units),
            )
        if is_flat(self.shapes, index):
            return replace(whole, input=(size, 1, 1), output=(size, 1, 1), extent=Extent(start, size, whole.output[0]))
        if self.hybrid:
            return whole
        first, last = needed_span(whole, (start, stop))
        extent = Extent(start, size, whole.output[2])
        if isinstance(whole.layer, Conv):
            window_start = start * whole.layer.stride - whole.layer.pad
            window_stop = (stop - 1) * whole.layer.stride - whole.layer.pad + whole.layer.kernel
            extent = replace(extent, left=first - window_start, right=window_stop - last)
        return replace(whole, input=(*whole.input[:2], last - first), output=(*whole.output[:2], size), extent=extent)

    def _pieces(self, strip: int) -> tuple[Piece, ...]:
        """Return the spans of the flat vector that `strip` holds: of dense layers its units, of others everything."""
        pieces: list[Piece] = []
        local = 0
        layers = {shape.name: index for index, shape in enumerate(self.shapes)}
        if len(self) == 1:
            return tuple(Piece(tensor.offset, tensor.size, tensor.offset) for tensor in parameters.tensors(self.shapes))
        for tensor in parameters.tensors(self.shapes):
            start = tensor.offset
            size = tensor.size
            if isinstance(self.shapes[layers[tensor.layer]].layer, Dense):
                first, last = self.owned[layers[tensor.layer]][strip]
                row = tensor.size // tensor.shape[0]
                start += first * row
                size = (last - first) * row
            pieces.append(Piece(start, size, local))
            local += size
        return tuple(pieces)


def partition(shapes: Sequence[LayerShape], strips: int, scheme: str = "strips") -> Partition:
    """Cut a model into `strips` strips.

    Raises a UserError that names the layer that is too small, and the most strips that the model allows.
    """
    if isinstance(shapes, GraphLayers):
        return _whole(shapes, strips)
    shapes = tuple(shapes)
    if scheme == "hybrid" and not any(isinstance(shape.layer, Conv) for shape in shapes):
        raise UserError('layout.scheme = "hybrid": the model has no convolution to share by images; set "strips"')
    trouble, found = _try(shapes, strips, scheme)
    if found is not None:
        return found
    most = next(count for count in range(strips - 1, 0, -1) if _try(shapes, count, scheme)[1] is not None)
    raise UserError(f"layout.partitions = {strips}: {trouble}; set at most {most}")


def _whole(layers: GraphLayers, strips: int) -> Partition:
    """Return a graph as one strip; raise UserError if it is to be cut."""
    if strips > 1:
        raise UserError(
            f"layout.partitions = {strips}: a model with named inputs, or operators beyond a stack of conv, pool, lrn, "
            "dense, dropout and activations, is computed whole; set layout.partitions = 1"
        )
    return Partition(layers, tuple(((0, shape.output[2]),) for shape in layers), {})


def largest_strip_count(shapes: Sequence[LayerShape], scheme: str = "strips") -> int:
    """Return the largest number of strips that a model can be cut into."""
    if isinstance(shapes, GraphLayers):
        return 1
    shapes = tuple(shapes)
    shortest = min(axis_length(shapes, group[-1]) for group in groups_to_cut(shapes, scheme))
    return next(count for count in range(shortest, 0, -1) if _try(shapes, count, scheme)[1] is not None)


def fitting(shapes: Sequence[LayerShape], images: int, cache: int, most: int, scheme: str = "strips") -> Partition:
    """Return the partition with the fewest strips, up to `most`, whose working sets fit in `cache` bytes each.

    Where none fits, return the one with the most strips.
    """
    best = partition(shapes, 1, scheme)
    most = 1 if isinstance(shapes, GraphLayers) else most
    for strips in range(2, most + 1):
        if max(strip.bytes(images) for strip in best.strips) <= cache:
            break
        best = _try(tuple(shapes), strips, scheme)[1] or best
    return best


def _try(shapes: tuple[LayerShape, ...], strips: int, scheme: str) -> tuple[str, Partition | None]:
    """Return ("", partition), or why the model cannot be cut into `strips` strips and None."""
    groups = groups_to_cut(shapes, scheme)
    for group in groups:
        count = axis_length(shapes, group[-1])
        if count < strips:
            dense = isinstance(shapes[group[0]].layer, Dense)
            name, kind = (shapes[group[0]].name, "units") if dense else (shapes[group[-1]].name, "columns")
            return f"{name} has {count} {kind}", None
    owned = owned_spans(shapes, strips, groups)
    if scheme == "hybrid":
        return "", Partition(shapes, owned, hybrid_exchanges(shapes, owned))
    exchanges = strip_exchanges(shapes, owned)
    for index, exchange in exchanges.items():
        if index < len(shapes) and not isinstance(shapes[index].layer, Dense):
            trouble = reaches_too_far(exchange)
            if trouble:
                return trouble, None
    return "", Partition(shapes, owned, exchanges)
