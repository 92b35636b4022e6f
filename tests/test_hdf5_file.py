"""The writes under our HDF5 files: bytes at an offset, past the page cache where the file system can."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from adam_mpi.checkpoint.hdf5_file import BLOCK, aligned_memory, write_past_cache

FOLDERS = [None, *(["/dev/shm"] if Path("/dev/shm").is_dir() else [])]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("size", [4, BLOCK, 3 * BLOCK, 5 * BLOCK + 12])
@pytest.mark.parametrize("memory, offset", [(0, BLOCK), (0, BLOCK + 8), (4, BLOCK)])
def test_bytes_go_where_they_belong_and_nowhere_else(folder, size, memory, offset):
    values = aligned_memory(size + memory)[memory:]
    values[:] = np.arange(size) % 250
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "file"
        path.write_bytes(bytes([251]) * 10 * BLOCK)
        write_past_cache(path, values.view(np.float32), offset)
        found = np.frombuffer(path.read_bytes(), np.uint8)
    assert found.size == 10 * BLOCK and (found[offset : offset + size] == values).all()
    assert (np.delete(found, np.arange(offset, offset + size)) == 251).all()


def test_memory_begins_at_a_block():
    for size in (1, BLOCK, BLOCK + 1):
        memory = aligned_memory(size)
        assert memory.size == size and memory.ctypes.data % BLOCK == 0
