"""The cache of a data rank: images that were read before."""

import numpy as np

from adam_mpi.data.formats.source import BadImages, Source


class Cache:
    """Keeps the first images that it reads and never evicts one: each epoch reads each image once, in a new random
    order, so eviction never pays. One thread at a time may read.
    """

    def __init__(self, source: Source, limit: int) -> None:
        """Make room in the image cache for `limit` bytes of `source`; for none if they are in memory anyway."""
        self.source = source
        room = 0 if source.in_memory else min(len(source), limit // source.image_bytes)
        # Pages that are never written take no memory.
        self.kept = np.empty((room, *source.shape), source.dtype)
        self.place = np.full(len(source), -1, np.int64)
        self.used = 0

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the images at `indices` through the cache; raise BadImages for those that the source cannot read."""
        place = self.place[indices]
        hits = place >= 0
        if hits.all():
            return self.kept[place]
        images = np.empty((len(indices), *self.source.shape), self.source.dtype)
        images[hits] = self.kept[place[hits]]
        positions = np.flatnonzero(~hits)
        positions = positions[np.argsort(indices[positions])]
        images[positions] = fresh = self._fetch(indices, positions)
        self._keep(indices[positions], fresh)
        return images

    def _fetch(self, indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return images that the cache lacks, indices[positions]; positions in a BadImages are those in `indices`."""
        try:
            return self.source.read(indices[positions])[0]
        except BadImages as error:
            error.positions = positions[error.positions].tolist()
            raise

    def _keep(self, indices: np.ndarray, images: np.ndarray) -> None:
        """Keep as many of the `images` in the cache as there is room for."""
        count = min(len(indices), len(self.kept) - self.used)
        self.kept[self.used : self.used + count] = images[:count]
        self.place[indices[:count]] = np.arange(self.used, self.used + count)
        self.used += count
