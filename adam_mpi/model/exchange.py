"""An exchange between the strips of a replica: which part of an axis each strip owns, and which it needs. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class Exchange:
    """Strip r owns `owned[r]` of an axis and needs `needed[r]`; an index on the axis is `lines` values of an image."""

    layer: str
    """The layer that needs it."""
    owned: tuple[Span, ...]
    needed: tuple[Span, ...]
    lines: int
    summed: bool = True
    """Whether errors come back and are summed; every strip computes those of the loss itself."""

    def piece(self, source: int, target: int) -> Span:
        """Return the span of the axis that `source` sends to `target`; an empty one begins where it ends."""
        owned_start, owned_stop = self.owned[source]
        needed_start, needed_stop = self.needed[target]
        start = max(owned_start, needed_start)
        return start, max(start, min(owned_stop, needed_stop))

    def floats(self, source: int, target: int, images: int, own: int) -> int:
        """Return the most float32 values that `source` sends to `target` for `images` images, `own` of them its own."""
        a, b = self.piece(source, target)
        return self.lines * images * (b - a)

    def sent(self, strip: int) -> int:
        """Return the values of an image that `strip` sends forward, or receives back."""
        others = [other for other in range(len(self.owned)) if other != strip]
        return self.lines * sum(b - a for a, b in (self.piece(strip, other) for other in others))

    def received(self, strip: int) -> int:
        """Return the values of an image that `strip` receives forward, or sends back."""
        others = [other for other in range(len(self.owned)) if other != strip]
        return self.lines * sum(b - a for a, b in (self.piece(other, strip) for other in others))


@dataclass(frozen=True)
class Assembly(Exchange):
    """The exchange before the dense layers of a hybrid replica: each rank owns all values of its own images and needs
    those of all images. On the way back, the errors of an image are summed by the rank that owns it."""

    def floats(self, source: int, target: int, images: int, own: int) -> int:
        """Return the values that `source` sends for its `own` images."""
        return self.needed[source][1] * own

    def sent(self, strip: int) -> int:
        """Return the values that `strip` sends, averaged over the images: one in `len(owned)` is its own."""
        return -(-super().sent(strip) // len(self.owned))

    def received(self, strip: int) -> int:
        """Return the values that `strip` receives, averaged over the images."""
        return -(-super().received(strip) // len(self.owned))


def ranks_of(layers: Iterable[object]) -> int:
    """Return how many ranks share the images of a batch before the dense layers: 1 except in hybrid replicas."""
    return next((len(layer.owned) for layer in layers if isinstance(layer, Assembly)), 1)


def assembled_at(layers: Iterable[object]) -> int:
    """Return the index of the assembly among the layers, or -1."""
    return next((index for index, layer in enumerate(layers) if isinstance(layer, Assembly)), -1)
