"""A batch on strips is cut into parts, so that threads have others to compute while one waits for a neighbor. Pure."""

LEAST_IMAGES = 16
"""Of a part, and of each rank of a hybrid replica: fewer would leave vectors empty."""


def most(in_flight: int, ranks: int) -> tuple[int, int]:
    """Parts of a batch, and ranks that share out its images: a hybrid replica has as many rounds as ranks."""
    return (ranks, ranks) if ranks > 1 else (in_flight, 1)


def count(images: int, most: int, ranks: int = 1) -> int:
    """Parts of a batch of so many images."""
    return max(1, min(most, -(-images // (LEAST_IMAGES * ranks))))


def largest(batch: int, most: int, ranks: int = 1) -> int:
    """Images of the largest part of any batch up to this one: the room of a context.

    Shares and rounds are cut evenly one after the other: that may make an image more for each rank but one.
    """
    return min(batch, max(LEAST_IMAGES * ranks, -(-batch // most)) + ranks - 1)
