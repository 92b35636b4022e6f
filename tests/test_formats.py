"""Every format gives the same images by index, and says what is wrong with path and index."""

import gzip
import io
import struct
import zipfile

import h5py
import numpy as np
import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.config import Data
from adam_mpi.data import formats, sets
from adam_mpi.data.fetch_and_pack import pack_data_set

RANDOM = np.random.default_rng(5)
COLORED = {
    "train": RANDOM.integers(0, 256, (12, 3, 32, 32), np.uint8),
    "test": RANDOM.integers(0, 256, (6, 3, 32, 32), np.uint8),
}
GRAY = {part: images[:, 0, :5, :7].copy() for part, images in COLORED.items()}
FEATURES = {
    "train": RANDOM.standard_normal((12, 9)).astype(np.float32),
    "test": RANDOM.standard_normal((6, 9)).astype(np.float32),
}
LABELS = {"train": np.arange(12) % 3, "test": np.arange(6) % 3}


def write_idx(path, ending=""):
    for part, names in formats.idx.FILES.items():
        for name, array in zip(names, (GRAY[part], LABELS[part]), strict=True):
            content = (
                bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()
            )
            (path / (name + ending)).write_bytes(gzip.compress(content) if ending else content)
    return path, GRAY


def write_npz(path, arrays=COLORED, save=np.savez):
    named = {f"{part}_images": images for part, images in arrays.items()}
    save(path / "set.npz", **named, **{f"{part}_labels": labels for part, labels in LABELS.items()})
    return path / "set.npz", arrays


def write_npy(path):
    for part in LABELS:
        np.save(path / f"x_{part}.npy", FEATURES[part].astype(np.float64))
        np.save(path / f"y_{part}.npy", LABELS[part])
    return path, FEATURES


def write_hdf5(path, arrays=COLORED, **options):
    with h5py.File(path / "set.h5", "w") as file:
        for part, images in arrays.items():
            file.create_dataset(f"{part}/images", data=images, **options)
            file[f"{part}/labels"] = LABELS[part]
    return path / "set.h5", arrays


def write_channels_last(path):
    return write_npz(path, {part: images.transpose(0, 2, 3, 1) for part, images in COLORED.items()})[0], COLORED


def write_cifar(path, files=None, labels=1):
    files = files or {
        "data_batch_1.bin": ("train", 0, 5),
        "data_batch_2.bin": ("train", 5, 12),
        "test_batch.bin": ("test", 0, 6),
    }
    for name, (part, first, last) in files.items():
        fine = np.repeat(LABELS[part][first:last, None], labels, axis=1).astype(np.uint8)
        fine[:, :-1] = 77
        records = np.concatenate([fine, COLORED[part][first:last].reshape(last - first, -1)], axis=1)
        (path / name).write_bytes(records.tobytes())
    return path, COLORED


def write_folder(path, arrays=COLORED):
    image = pytest.importorskip("PIL.Image")
    for part, images in arrays.items():
        for index, (pixels, label) in enumerate(zip(images, LABELS[part], strict=True)):
            folder = path / part / f"class-{label}"
            folder.mkdir(parents=True, exist_ok=True)
            image.fromarray(pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels).save(folder / f"{index:03}.png")
    by_class = {part: np.argsort(labels, kind="stable") for part, labels in LABELS.items()}
    return path, {part: images[by_class[part]] for part, images in arrays.items()}


WRITERS = {
    "idx": write_idx,
    "idx.gz": lambda path: write_idx(path, ".gz"),
    "npz": write_npz,
    "compressed npz": lambda path: write_npz(path, save=np.savez_compressed),
    "npz of features": lambda path: write_npz(path, FEATURES),
    "npz with channels last": write_channels_last,
    "npy": write_npy,
    "hdf5": write_hdf5,
    "chunked hdf5": lambda path: write_hdf5(path, chunks=(5, 3, 32, 32)),
    "compressed hdf5": lambda path: write_hdf5(path, chunks=(5, 3, 32, 32), compression="gzip"),
    "hdf5 of features": lambda path: write_hdf5(path, FEATURES),
    "cifar-10": write_cifar,
    "cifar-100": lambda path: write_cifar(path, {"train.bin": ("train", 0, 12), "test.bin": ("test", 0, 6)}, 2),
    "folder": write_folder,
    "folder of gray images": lambda path: write_folder(path, GRAY),
}


@pytest.fixture(params=WRITERS)
def written(request, tmp_path):
    return WRITERS[request.param](tmp_path)


def expected(images):
    return images.reshape(len(images), *{2: (-1, 1, 1), 3: (1, *images.shape[1:]), 4: images.shape[1:]}[images.ndim])


def check(sources, arrays):
    for part, images in arrays.items():
        source, wanted = sources[part], expected(images)
        assert len(source) == len(wanted) and source.shape == wanted.shape[1:] and source.dtype == wanted.dtype
        for indices in (np.arange(len(wanted)), np.array([1, 3, 5]), np.array([0]), np.array([], int)):
            read, labels = source.read(indices)
            assert read.dtype == wanted.dtype and read.flags.c_contiguous
            np.testing.assert_array_equal(read, wanted[indices])
            np.testing.assert_array_equal(labels, source.labels[indices])


def test_every_format_gives_what_was_written(written):
    path, arrays = written
    sources = formats.open_parts(path)
    check(sources, arrays)
    for part, source in sources.items():
        np.testing.assert_array_equal(np.sort(source.labels), np.sort(LABELS[part]))


def test_every_format_can_be_packed(written, tmp_path):
    path, arrays = written
    before = formats.open_parts(path)
    message = pack_data_set(str(path), tmp_path / "packed.h5", size=0, on_bad="stop")
    assert "12 train images and 6 test images" in message and not list(tmp_path.glob("*.part"))
    after = formats.open_parts(tmp_path / "packed.h5")
    check(after, arrays)
    for part in before:
        np.testing.assert_array_equal(before[part].labels, after[part].labels)


def test_a_set_without_a_test_part_is_split(tmp_path):
    np.savez(tmp_path / "set.npz", images=np.arange(60, dtype=np.uint8).reshape(60, 1, 1), labels=np.arange(60) % 4)
    data = sets.open_set(Data(set=str(tmp_path / "set.npz"), validation=0.2))
    assert (data.description.train, data.description.validation, data.description.test) == (40, 10, 10)
    read = [data.read(part, np.arange(getattr(data.description, part)))[0] for part in ("train", "validation", "test")]
    assert sorted(np.concatenate(read).ravel()) == list(range(60))


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def test_pickles_are_refused(tmp_path):
    np.savez(tmp_path / "set.npz", images=np.array([Evil(), Evil()], object), labels=np.arange(2))
    with pytest.raises(UserError, match=f"{tmp_path}/set.npz:images.npy.*never unpickled"):
        formats.open_parts(tmp_path / "set.npz")
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02}q")
    with pytest.raises(UserError, match="pickled CIFAR.*binary version"):
        formats.open_parts(tmp_path)


def npy_header(sizes, dtype="|u1"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": sizes})
    return file.getvalue()


HUGE = (10**6, 10**6)


def test_headers_that_promise_too_much_are_not_believed(tmp_path):
    np.save(tmp_path / "labels.npy", np.arange(3))
    (tmp_path / "images.npy").write_bytes(npy_header(HUGE) + bytes(100))
    with pytest.raises(UserError, match="images.npy.*announces 1000000000"):
        formats.open_parts(tmp_path)
    with zipfile.ZipFile(tmp_path / "set.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", npy_header(HUGE) + bytes(100))
        archive.writestr("labels.npy", npy_header((3,)) + bytes(3))
    with pytest.raises(UserError, match="set.npz:images.npy.*announces 1000000000"):
        formats.open_parts(tmp_path / "set.npz")
    with h5py.File(tmp_path / "set.h5", "w") as file:
        file.create_dataset("images", HUGE, "u1", chunks=(1, 1000))
        file["labels"] = np.arange(3)
    with pytest.raises(UserError, match="set.h5:/images.*1000000000.* announced, 0 are in"):
        formats.open_parts(tmp_path / "set.h5")


def test_a_gz_bomb_is_not_believed(tmp_path):
    path, _ = write_idx(tmp_path, ".gz")
    images = path / "train-images-idx3-ubyte.gz"
    header = bytes([0, 0, 8, 3]) + np.array([12, 1 << 13, 1 << 14], ">u4").tobytes()
    content = gzip.compress(header)
    images.write_bytes(content[:-4] + struct.pack("<I", (12 << 27) + 16))
    with pytest.raises(UserError, match="train-images.*announces 1610612752"):
        formats.open_parts(path)["train"].read(np.arange(2))


@pytest.mark.parametrize(
    "writer", ["npz", "compressed npz", "hdf5", "compressed hdf5", "npy", "cifar-10", "idx", "idx.gz"]
)
def test_files_cut_short_are_named(writer, tmp_path):
    path, _ = WRITERS[writer](tmp_path)
    victim = path if path.is_file() else sorted(file for file in path.iterdir() if file.stat().st_size > 200)[0]
    whole = victim.read_bytes()
    for kept in (len(whole) // 2, len(whole) - 1, 1):
        victim.write_bytes(whole[:kept])
        with pytest.raises(UserError, match=str(victim.name)):
            for source in formats.open_parts(path).values():
                source.read(np.arange(len(source)))


@pytest.mark.parametrize("content", [b"", b"what is this?"])
def test_unknown_content(tmp_path, content):
    (tmp_path / "set").write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}/set.*no format known.*HDF5"):
        formats.open_parts(tmp_path / "set")
    (tmp_path / "set").unlink()
    with pytest.raises(UserError, match="no format known.*class/name.png"):
        formats.open_parts(tmp_path)


def test_arrays_without_the_right_names(tmp_path):
    np.savez(tmp_path / "set.npz", pictures=np.zeros((3, 2, 2), np.uint8), labels=np.arange(3))
    with pytest.raises(UserError, match="train_images.*holds labels, pictures"):
        formats.open_parts(tmp_path / "set.npz")
    np.savez(tmp_path / "set.npz", images=np.zeros((3, 2, 2), np.uint8), labels=np.arange(4))
    with pytest.raises(UserError, match="4 labels for 3 images"):
        formats.open_parts(tmp_path / "set.npz")
    np.savez(tmp_path / "set.npz", images=np.zeros((3, 2, 2), np.int32), labels=np.arange(3))
    with pytest.raises(UserError, match="int32.*uint8"):
        formats.open_parts(tmp_path / "set.npz")


def usable(path, on_bad, **options):
    data = sets.open_set(Data(set=str(path), validation=0.0, on_bad=on_bad, **options))
    return data, *data.read_usable("train", np.arange(data.description.train))


def test_bad_features_stop_or_are_left_out(tmp_path):
    features = FEATURES["train"].copy()
    features[4, 2], features[7, 8] = np.nan, np.inf
    path, _ = write_npz(tmp_path, FEATURES | {"train": features})
    with pytest.raises(UserError, match=f"{path}:train_images.npy, image 4: holds NaN.*on_bad"):
        usable(path, "stop")
    data, ids, images, labels = usable(path, "skip")
    assert len(ids) == len(images) == len(labels) == 10 and np.isfinite(images).all()
    assert data.bad() == ["train 4", "train 7"]


def test_wrong_labels_stop_or_are_left_out(tmp_path):
    path, _ = write_cifar(tmp_path)
    records = np.frombuffer((path / "data_batch_2.bin").read_bytes(), np.uint8).reshape(7, -1).copy()
    records[3, 0] = 200
    (path / "data_batch_2.bin").write_bytes(records.tobytes())
    with pytest.raises(UserError, match="data_batch_2.bin, image 3: has the label 200; allowed are 0 to 9"):
        usable(path, "stop")
    data, ids, images, labels = usable(path, "skip")
    assert data.bad() == ["train 8"] and data.description.train == 11 and len(ids) == 11 and labels.max() < 3


def test_unreadable_images_stop_or_are_left_out(tmp_path):
    path, arrays = write_folder(tmp_path)
    broken = path / "train" / "class-1" / "004.png"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(UserError, match=f"{broken}, image 5: cannot be read"):
        usable(path, "stop")
    data, ids, images, _ = usable(path, "skip")
    assert data.bad() == ["train 5"] and len(images) == 11
    assert "11 train images" in pack_data_set(str(path), tmp_path / "packed.h5", 0, "skip")
    kept = np.delete(arrays["train"], 5, axis=0)
    np.testing.assert_array_equal(formats.open_parts(tmp_path / "packed.h5")["train"].read(np.arange(11))[0], kept)


def test_images_of_many_sizes_are_scaled_on_demand(tmp_path):
    image = pytest.importorskip("PIL.Image")
    path, _ = write_folder(tmp_path)
    image.new("RGB", (80, 40), (10, 200, 30)).save(path / "train" / "class-2" / "999.png")
    with pytest.raises(UserError, match="999.png, image 12: is 80 x 40, the first one 32 x 32; set data.size"):
        usable(path, "stop")
    data, _, images, _ = usable(path, "stop", size=16)
    assert data.description.shape == (3, 16, 16) and len(images) == 13
    assert (formats.open_parts(path, 16)["train"].read(np.array([12]))[0][0, :, 8, 8] == [10, 200, 30]).all()
