"""How a model is cut into strips: what each strip owns of every layer, and what it needs from other strips. Pure.

Spatial layers are cut by columns, dense layers by units.

Around a convolution a strip needs its own columns and a border (halo) of its neighbors; before a dense layer it needs
everything.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from adam_mpi.model.exchange import Assembly, Exchange, Span
from adam_mpi.model.layers import (
    Activation,
    Conv,
    Dense,
    Dropout,
    LayerShape,
    LocalResponseNorm,
    MaxPool,
    missing_rule,
)

Owned = tuple[tuple[Span, ...], ...]
"""The span of every strip, for each layer's output."""


def groups_to_cut(shapes: tuple[LayerShape, ...], scheme: str) -> list[list[int]]:
    """Return the groups of layers that are cut alike; in a hybrid replica nothing is cut by columns."""
    return [group for group in _groups(shapes) if scheme == "strips" or isinstance(shapes[group[0]].layer, Dense)]


def owned_spans(shapes: tuple[LayerShape, ...], strips: int, groups: list[list[int]]) -> Owned:
    """Return the columns or units of every strip; a remainder goes to the strips with the least work so far."""
    owned: list[tuple[Span, ...]] = [((0, axis_length(shapes, index)),) * strips for index in range(len(shapes))]
    work = [0.0] * strips
    weighed = [(sum(shapes[i].connections for i in group) / axis_length(shapes, group[-1]), group) for group in groups]
    for weight, group in sorted(weighed, key=lambda pair: (-pair[0], pair[1])):
        count = axis_length(shapes, group[-1])
        sizes = [count // strips] * strips
        for number in sorted(range(strips), key=lambda number: (work[number], number))[: count % strips]:
            sizes[number] += 1
        work = [done + weight * size for done, size in zip(work, sizes, strict=True)]
        edges = [sum(sizes[:number]) for number in range(strips + 1)]
        for index in reversed(group):
            owned[index] = tuple(pairwise(edges))
            edges = _input_edges(shapes[index], edges)
    return tuple(owned)


def is_flat(shapes: Sequence[LayerShape], index: int) -> bool:
    """Return whether the output of the layer at `index` is units, not columns."""
    return any(isinstance(shape.layer, Dense) for shape in shapes[: index + 1])


def axis_length(shapes: Sequence[LayerShape], index: int) -> int:
    """Return the number of columns, or units, of the output of the layer at `index`."""
    return shapes[index].output[0 if is_flat(shapes, index) else 2]


def even_spans(size: int, parts: int, start: int) -> tuple[Span, ...]:
    """Return `size` values from `start` on as `parts` consecutive spans of nearly equal length."""
    return tuple(pairwise(start + part * size // parts for part in range(parts + 1)))


def _groups(shapes: tuple[LayerShape, ...]) -> list[list[int]]:
    """Return the layers that are cut alike: each convolution or dense layer with those that follow it.

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


def _input_edges(shape: LayerShape, edges: list[int]) -> list[int]:
    """Return the edges of a layer's input that fit the `edges` of its output best."""
    if not isinstance(shape.layer, MaxPool):
        return edges
    size = shape.layer.size
    stride = shape.layer.stride
    inner = [edge * stride + max(0, (size - stride) // 2) for edge in edges[1:-1]]
    return [0, *inner, shape.input[2]]


def strip_exchanges(shapes: tuple[LayerShape, ...], owned: Owned) -> dict[int, Exchange]:
    """Return the exchanges by the index of the layer that needs each; after the last layer that of the loss."""
    found: dict[int, Exchange] = {}
    strips = len(owned[0])
    if strips == 1:
        return found
    for index, shape in enumerate(shapes[1:], 1):
        flat = is_flat(shapes, index - 1)
        before = shapes[index - 1].output
        if isinstance(shape.layer, Dense):
            needed = ((0, before[0] if flat else before[2]),) * strips
        else:
            needed = tuple(needed_span(shape, span, flat) for span in owned[index])
        if needed != owned[index - 1]:
            lines = 1 if flat else math.prod(before[:2])
            found[index] = Exchange(shape.name, owned[index - 1], needed, lines)
    logits = ((0, shapes[-1].output[0]),) * strips
    found[len(shapes)] = Exchange("loss", owned[-1], logits, 1, summed=False)
    return found


def hybrid_exchanges(shapes: tuple[LayerShape, ...], owned: Owned) -> dict[int, Exchange]:
    """Return the exchanges of a hybrid replica: an assembly of images, then those between dense layers."""
    exchanges = strip_exchanges(shapes, owned)
    found = {index: exchange for index, exchange in exchanges.items() if is_flat(shapes, index - 1)}
    if not found:
        return {}
    first = next(index for index, shape in enumerate(shapes) if isinstance(shape.layer, Dense))
    values = ((0, math.prod(shapes[first].input)),) * len(owned[0])
    return {first: Assembly(shapes[first].name, values, values, 1), **found}


def needed_span(shape: LayerShape, span: Span, flat: bool = False) -> Span:
    """Return the columns of a layer's input that the columns `span` of its output are computed from.

    With `flat` these are units. Raises NotImplementedError for a layer without a partition rule.
    """
    start, stop = span
    layer = shape.layer
    width = shape.input[2]
    if isinstance(layer, Activation | Dropout):
        return span
    if flat:
        raise missing_rule(layer, "partition rule for units (needed_span in model/strips.py)")
    if isinstance(layer, LocalResponseNorm):
        return span
    if isinstance(layer, Dense):
        return 0, width
    if isinstance(layer, Conv):
        first = start * layer.stride - layer.pad
        last = (stop - 1) * layer.stride - layer.pad + layer.kernel
        return max(0, first), min(width, last)
    if isinstance(layer, MaxPool):
        return start * layer.stride, (stop - 1) * layer.stride + layer.size
    raise missing_rule(layer, "partition rule (needed_span in model/strips.py)")


def reaches_too_far(exchange: Exchange) -> str:
    """Return what is wrong when a strip needs columns beyond its neighbors; an empty text when nothing is."""
    owned = exchange.owned
    for number, (first, last) in enumerate(exchange.needed):
        lowest = owned[max(0, number - 1)][0]
        highest = owned[min(len(owned) - 1, number + 1)][1]
        if first < lowest or last > highest:
            narrowest = min(stop - start for start, stop in owned)
            return f"{exchange.layer} needs a border wider than its input's narrowest strip of {narrowest} columns"
    return ""
