"""An exchange between the strips of a replica: who owns which part of an axis, and who needs which. Pure."""

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

    def sent(self, strip: int) -> int:
        """Values of an image that a strip sends forward, or gets back."""
        others = [other for other in range(len(self.owned)) if other != strip]
        return self.lines * sum(b - a for a, b in (self.piece(strip, other) for other in others))

    def received(self, strip: int) -> int:
        others = [other for other in range(len(self.owned)) if other != strip]
        return self.lines * sum(b - a for a, b in (self.piece(other, strip) for other in others))
