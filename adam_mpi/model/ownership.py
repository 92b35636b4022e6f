"""What is cut: which columns, or units, of every layer's output each strip owns. Pure.

Spatial layers are cut by columns, dense layers by units.
"""

from collections.abc import Sequence
from itertools import pairwise

from adam_mpi.model.exchange import Span
from adam_mpi.model.layers import Conv, Dense, LayerShape, MaxPool

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
