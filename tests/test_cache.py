"""What is kept in memory, and how much memory that takes."""

import h5py
import numpy as np
import psutil
import pytest

from adam_mpi.config import Data
from adam_mpi.data.batch_loader import BatchLoader
from adam_mpi.data.cache import Cache
from adam_mpi.data.formats.source import BadImages, Source
from adam_mpi.data.sets import open_set
from adam_mpi.sharding.training_state import Phase


class Reads:
    """A source of 100 images whose pixels are their index, that notes what is read from it."""

    def __init__(self, in_memory=False, bad=()):
        self.asked, self.bad = [], set(bad)
        self.source = Source(str, (1, 2, 2), np.dtype(np.uint8), np.arange(100), self.rows, in_memory=in_memory)

    def rows(self, indices):
        assert (np.diff(indices) > 0).all()
        self.asked += indices.tolist()
        if bad := [position for position, index in enumerate(indices) if index in self.bad]:
            raise BadImages(bad, "bad")
        return np.broadcast_to(indices.astype(np.uint8)[:, None, None, None], (len(indices), 1, 2, 2))


def read(cache, indices):
    images = cache.read(np.array(indices))
    assert images.shape == (len(indices), 1, 2, 2) and (images[:, 0, 1, 1] == indices).all()


def test_all_is_read_once_when_there_is_room():
    reads = Reads()
    cache = Cache(reads.source, 400)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(100)
        for first in range(0, 100, 7):
            read(cache, order[first : first + 7])
    assert sorted(reads.asked) == list(range(100))


def test_what_does_not_fit_is_read_again():
    reads = Reads()
    cache = Cache(reads.source, 4 * 30 + 3)
    for _ in range(2):
        for first in range(0, 100, 10):
            read(cache, np.arange(first, first + 10)[::-1])
    assert len(reads.asked) == 100 + 70 and cache.kept.nbytes == 120


def test_images_in_memory_are_not_kept_twice():
    assert Cache(Reads(in_memory=True).source, 400).kept.nbytes == 0


def test_bad_images_are_named_by_their_positions_in_the_request():
    cache = Cache(Reads(bad={7, 40}).source, 400)
    read(cache, [50, 3])
    with pytest.raises(BadImages) as caught:
        cache.read(np.array([40, 3, 9, 7, 50]))
    assert sorted(caught.value.positions) == [0, 3]


COUNT, CACHE = 32_000, 9 << 20


def write_npy(path, images, labels):
    np.save(path / "images.npy", images)
    np.save(path / "labels.npy", labels)
    return path


def write_npz(path, images, labels):
    np.savez(path / "set.npz", images=images, labels=labels)
    return path / "set.npz"


def write_hdf5(path, images, labels):
    with h5py.File(path / "set.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(5, 3, 32, 32))
        file["labels"] = labels
    return path / "set.h5"


@pytest.mark.parametrize("write", [write_npy, write_npz, write_hdf5])
def test_a_set_ten_times_the_cache_stays_out_of_memory(write, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 32, 32), np.uint8)
    path = write(tmp_path, images, np.arange(COUNT) % 10)
    sums = images.reshape(COUNT, -1).sum(axis=1)
    assert images.nbytes > 9 * CACHE
    del images
    data = open_set(Data(set=str(path), validation=0.0, cache=CACHE))
    loader = BatchLoader(data, seed=1)
    phase = Phase(0, "train", 1)
    process = psutil.Process()
    before, most, seen = process.memory_info().rss, 0, []
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(data.description.train)
        for first in range(0, len(order), 256):
            batch = loader.start(phase, [order[first : first + 256]]).result()[0]
            most = max(most, process.memory_info().rss)
            seen.append(batch.pixels.reshape(len(batch.ids), -1).sum(axis=1))
    assert np.isin(np.concatenate(seen), sums).all()
    # Some more for the batches in flight, and for HDF5 itself.
    assert most - before < CACHE + (16 << 20), f"grown by {(most - before) >> 20} MB"
