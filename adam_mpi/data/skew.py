"""Which replica owns which training image, when the shares shall be uneven. Pure."""

import numpy as np

# So that shares are drawn apart from everything else that is drawn by the seed.
KEY = 0x5EED


def owners(skew: str, labels: np.ndarray, replicas: int, seed: int) -> np.ndarray:
    """The replica of each image: "by_class" gives each a range of classes, "dirichlet:A" an uneven mix of all."""
    kind, _, alpha = skew.partition(":")
    random = np.random.Generator(np.random.Philox(key=[seed, KEY]))
    if kind == "by_class":
        return _cut(np.argsort(labels, kind="stable"), np.full(replicas, 1 / replicas))
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        images = random.permutation(np.flatnonzero(labels == label))
        owner[images] = _cut(np.arange(len(images)), random.dirichlet(np.full(replicas, float(alpha))))
    return owner


def _cut(order: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Owners when consecutive shares of an order are handed out."""
    edges = np.rint(np.cumsum(shares) * len(order)).astype(np.int64)
    owner = np.empty(len(order), np.int64)
    owner[order] = np.minimum(np.searchsorted(edges, np.arange(len(order)), side="right"), len(shares) - 1)
    return owner
