import gzip

import numpy as np
import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats import idx

ARRAY = np.random.default_rng(0).integers(0, 256, (50, 7, 5), dtype=np.uint8)
HEADER = bytes([0, 0, 8, 3]) + np.array(ARRAY.shape, ">u4").tobytes()
BYTES = HEADER + ARRAY.tobytes()


def write(path, content):
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


@pytest.fixture(params=["images", "images.gz"])
def path(tmp_path, request):
    return tmp_path / request.param


def test_read_gives_what_was_written(path):
    write(path, BYTES)
    assert idx.shape(path) == ARRAY.shape
    array = idx.read_idx_file(path)
    assert array.dtype == np.uint8 and np.array_equal(array, ARRAY)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not an idx file"),
        (b"\x89PNG" + BYTES, "not an idx file"),
        (b"\0\0\x08\0", "not an idx file"),
        (b"\0\0\x0d\x03" + BYTES[4:], "type 0x0d"),
        (BYTES[:9], "inside its header"),
        (BYTES[:-1], "cut short"),
        (BYTES + b"\0", "cut short"),
        # A header that promises half the address space must not be believed.
        (HEADER[:4] + b"\xff" * 12 + ARRAY.tobytes(), "cut short"),
    ],
)
def test_wrong_content_is_one_line_that_names_the_file(path, content, message):
    write(path, content)
    with pytest.raises(UserError, match=message) as caught:
        idx.read_idx_file(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 3, 12, 60, -9, -4, -1])
def test_truncated_gzip(tmp_path, kept):
    path = write(tmp_path / "images.gz", BYTES)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="images.gz"):
        idx.read_idx_file(path)


def test_damaged_gzip_with_a_good_length(tmp_path):
    path = write(tmp_path / "images.gz", BYTES)
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # a byte of the checksum
    path.write_bytes(content)
    with pytest.raises(UserError, match="images.gz"):
        idx.read_idx_file(path)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        idx.read_idx_file(tmp_path / "nowhere.gz")
