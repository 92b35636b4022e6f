"""What is exchanged: before which layers strips need what other strips own, and how much of it. Pure.

Around a convolution a strip needs its own columns and a border (halo) of its neighbors; before a dense layer it needs
everything.
"""

import math

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
from adam_mpi.model.ownership import Owned, is_flat


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
        raise missing_rule(layer, "partition rule for units (needed_span in model/exchange_plan.py)")
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
    raise missing_rule(layer, "partition rule (needed_span in model/exchange_plan.py)")


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
