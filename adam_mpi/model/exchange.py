"""An exchange between the strips of a replica: who owns which part of an axis, and who needs which. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class Exchange:
    """Strip r owns `owned[r]` of an axis and needs `needed[r]`; a place on the axis is `lines` values of an image."""

    layer: str
    """The layer that needs it."""
    owned: tuple[Span, ...]
    needed: tuple[Span, ...]
    lines: int
    summed: bool = True
    """Whether errors come back and are summed up; those of the loss are known to everybody."""

    def piece(self, source: int, target: int) -> Span:
        """The part of the axis that goes from one strip to another; empty ones begin where they end."""
        (a, b), (first, last) = self.owned[source], self.needed[target]
        return max(a, first), max(max(a, first), min(b, last))

    def floats(self, source: int, target: int, images: int, own: int) -> int:
        """That go from one strip to another at the most, with so many images, `own` of them of one strip."""
        a, b = self.piece(source, target)
        return self.lines * images * (b - a)

    def sent(self, strip: int) -> int:
        """Values of an image that a strip sends forward, or gets back."""
        others = [other for other in range(len(self.owned)) if other != strip]
        return self.lines * sum(b - a for a, b in (self.piece(strip, other) for other in others))

    def received(self, strip: int) -> int:
        others = [other for other in range(len(self.owned)) if other != strip]
        return self.lines * sum(b - a for a, b in (self.piece(other, strip) for other in others))


@dataclass(frozen=True)
class Assembly(Exchange):
    """The exchange before the dense layers of a hybrid replica: each rank has all values of its own images, and needs
    those of all images. On the way back, errors of an image are summed up by the rank whose it is."""

    def floats(self, source: int, target: int, images: int, own: int) -> int:
        return self.needed[source][1] * own

    def sent(self, strip: int) -> int:
        """Of an image on average: one of as many as there are ranks is our own."""
        return -(-super().sent(strip) // len(self.owned))

    def received(self, strip: int) -> int:
        return -(-super().received(strip) // len(self.owned))


def ranks_of(layers: Iterable[object]) -> int:
    """Among how many ranks the images of a batch are shared out before the dense layers: 1 but for hybrid replicas."""
    return next((len(layer.owned) for layer in layers if isinstance(layer, Assembly)), 1)


def assembled_at(layers: Iterable[object]) -> int:
    """Which of the layers is the assembly; -1: none."""
    return next((index for index, layer in enumerate(layers) if isinstance(layer, Assembly)), -1)
