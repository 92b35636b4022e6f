"""Rings of slots in a server's memory, each with one writer, and the lines where the server acknowledges. Pure."""

from dataclasses import dataclass

LINE = 64  # bytes of a cache line: each ring has one of its own, so that pushers do not slow each other down
STEPPED = 5  # of a ring's line: the number of the word with the position up to which the server has taken steps


@dataclass(frozen=True)
class Rings:
    """Rings in a server's memory, one for each rank that writes into it, and the lines where it acknowledges."""

    count: int
    slots: int
    slot_bytes: int
    first_line: int

    @property
    def ring_bytes(self) -> int:
        """Return the bytes of one ring of slots."""
        return self.slots * self.slot_bytes

    @property
    def bytes(self) -> int:
        """Return the bytes of all rings of slots."""
        return self.count * self.ring_bytes

    def line_offset(self, ring: int) -> int:
        """Return the byte offset of the acknowledgement line of `ring` in the weights window."""
        return LINE * (1 + self.first_line + ring)


def lined(size: int) -> int:
    """Return `size` of a ring's slot rounded up to whole cache lines."""
    return -(-size // LINE) * LINE
