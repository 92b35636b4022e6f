"""Prepare data sets for jobs: fetch their files into a folder, and pack them into one chunked HDF5 file."""

import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import h5py
import numpy as np
from tqdm import tqdm

from adam_mpi.base.errors import UserError
from adam_mpi.config import Data
from adam_mpi.data import sets
from adam_mpi.data.sets import DataSet

MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
}
MD5 = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    "fashion": {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
}
TIMEOUT_SECONDS = 10
BLOCK = 1 << 16
MOST_BYTES = 1 << 26
"""Bytes that a file may have: twice those of the largest one."""


class _TooMuch(OSError):
    """A mirror sends more than any file of a data set has."""


def fetch_data_set(name: str, source: str | None, target: Path) -> None:
    """Fetch the files of `name` into the folder `target`, from a folder or base URL `source`, or else from mirrors.

    Raises UserError when a file cannot be fetched or has a wrong checksum.
    """
    if name not in MD5:
        raise UserError(f"fetch {name}: nothing to fetch; allowed are {', '.join(MD5)} (glyphs is built in)")
    bases = MIRRORS[name] if source is None else (source,)
    remote = bases[0].startswith(("http://", "https://"))
    if not remote and not Path(bases[0]).is_dir():
        raise UserError(f"fetch {name} --from {source}: neither a folder nor an http(s) address")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file, md5 in MD5[name].items():
            if _md5(target / file) == md5:
                continue
            if remote:
                _download(name, bases, md5, target / file)
            else:
                _copy_file(Path(bases[0]) / file, md5, target / file)
    except OSError as error:
        raise UserError(f"fetch {name}: {target} cannot be written ({error})") from None


def _copy_file(source: Path, md5: str, target: Path) -> None:
    """Copy a file of the data set to fetch, whose checksum must be `md5`."""
    found = _md5(source)
    if found != md5:
        raise UserError(f"{source}: {f'its md5 is {found}, not {md5}' if found else 'not there'}; nothing was copied")
    part = _part(target)
    shutil.copyfile(source, part)
    os.replace(part, target)


def _download(name: str, bases: tuple[str, ...], md5: str, target: Path) -> None:
    """Download a data set's file to `target` from one base URL after the other, each continuing the last."""
    part = _part(target)
    failures = []
    for base in bases:
        address = f"{base.rstrip('/')}/{target.name}"
        try:
            _transfer(address, part)
        except _TooMuch as error:
            # The next mirror cannot continue it.
            part.unlink(missing_ok=True)
            failures.append(f"{address}: {error}")
            continue
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{address}: {getattr(error, 'reason', None) or error or type(error).__name__}")
            continue
        found = _md5(part)
        if found == md5:
            os.replace(part, target)
            return
        # Wrong bytes cannot be continued.
        part.unlink(missing_ok=True)
        failures.append(f"{address}: its md5 is {found}, not {md5}")
    raise UserError(
        f"{target.name} could not be fetched ({'; '.join(failures)}); "
        f"if you have the files in a folder: python -m adam_mpi fetch {name} --from DIR"
    )


def _transfer(address: str, part: Path) -> None:
    """Download the rest of the data set's file at `address`, from where `part` ends."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # the file ends where `part` does; its md5 shows whether it is the right one
        raise
    with answer:
        # A server without ranges sends the whole file again.
        have = have if answer.status == http.client.PARTIAL_CONTENT else 0
        _receive_body(answer, part, have)


def _receive_body(answer: http.client.HTTPResponse, part: Path, have: int) -> None:
    """Append the body of `answer` to the `have` bytes of `part`; raise OSError when it is too long or cut short."""
    total = have + answer.length if answer.length is not None else None
    if (total or 0) > MOST_BYTES:
        raise _TooMuch(f"it announces {total} bytes; no file of a data set has more than {MOST_BYTES}")
    with (
        open(part, "ab" if have else "wb") as file,
        tqdm(desc=part.stem, initial=have, total=total, unit="B", unit_scale=True, disable=None) as bar,
    ):
        while block := answer.read(BLOCK):
            file.write(block)
            bar.update(len(block))
            if file.tell() > MOST_BYTES:
                raise _TooMuch(f"it sends more than {MOST_BYTES} bytes; no file of a data set has as many")
        if total is not None and file.tell() < total:
            raise OSError(f"the connection ended after {file.tell()} of {total} bytes")


def _part(target: Path) -> Path:
    """Return the name of a file that is not fetched completely."""
    return target.with_name(target.name + ".part")


def _md5(path: Path) -> str | None:
    """Return the md5 checksum of a fetched file, or None if it does not exist."""
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


CHUNK_BYTES = 1 << 14
"""Bytes of a chunk of the file."""
BLOCK_BYTES = 1 << 24
"""Bytes that are read at a time."""


def pack_data_set(source: str, target: Path, size: int, on_bad: str) -> str:
    """Write the data set at `source` to `target`; return a sentence about what was written.

    `size` and `on_bad` are those of the config's `data`. Raises UserError when the file cannot be written.
    """
    data = sets.open_set(Data(set=source, size=size, on_bad=on_bad, cache=0))
    part = target.with_name(target.name + ".part")
    try:
        with h5py.File(part, "w", locking=False) as file:
            file.attrs["classes"] = data.classes
            counts = {name: _pack_part(data, name, file.create_group(name)) for name in data.sources}
        os.replace(part, target)
    except OSError as error:
        raise UserError(f"pack: {target} cannot be written ({error})") from None
    finally:
        part.unlink(missing_ok=True)
    images = " and ".join(f"{count} {name} images" for name, count in counts.items())
    shape = "x".join(map(str, data.sources["train"].shape))
    return f"{target}: {images} of {shape}, {data.classes} classes; {len(data.bad())} bad ones left out"


def _pack_part(data: DataSet, name: str, group: h5py.Group) -> int:
    """Write the part `name` of `data` into the `group` of a packed file; return the number of images written."""
    source = data.sources[name]
    rows = min(max(1, CHUNK_BYTES // source.image_bytes), len(source))
    # Features are one row each, as in the files that they were read from.
    shape = source.shape[:1] if source.shape[1:] == (1, 1) else source.shape
    sizes = (len(source), *shape)
    images = group.create_dataset("images", sizes, source.dtype, maxshape=(None, *shape), chunks=(rows, *shape))
    labels = []
    written = 0
    step = max(1, BLOCK_BYTES // source.image_bytes)
    with tqdm(desc=name, total=len(source), unit=" images", disable=None) as bar:
        for first in range(0, len(source), step):
            wanted = np.arange(first, min(first + step, len(source)))
            _, pixels, more = data.read_source(name, wanted)
            images[written : written + len(pixels)] = pixels.reshape(len(pixels), *shape)
            labels.append(more)
            written += len(pixels)
            bar.update(len(wanted))
    images.resize(written, axis=0)
    group["labels"] = np.concatenate(labels)
    return written
