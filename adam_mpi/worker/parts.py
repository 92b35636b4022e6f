"""A batch on strips is cut into parts, so that threads have others to compute while one waits for a neighbour. Pure."""

LEAST_IMAGES = 16
"""Of a part: fewer would leave vectors empty."""


def count(images: int, in_flight: int) -> int:
    """Parts of a batch of so many images."""
    return max(1, min(in_flight, -(-images // LEAST_IMAGES)))


def largest(batch: int, in_flight: int) -> int:
    """Images of the largest part of any batch up to this one: the room of a context."""
    return min(batch, max(LEAST_IMAGES, -(-batch // in_flight)))
