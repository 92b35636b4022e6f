"""The named fields of a batch, inputs and targets alike, and how messages hold them. Pure.

message = header (int64 x 8) | ids (int64) | field | field | ...

Each field has the values of all images one after the other, and begins at a multiple of 8 bytes. Its name, type and
shape are described once, in `Field`: data ranks and workers have the same description, and each message has its
signature. A strip gets its columns of inputs, a rank of a hybrid replica its share of their images; targets are whole.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.model.metrics import CLASSES, SEQUENCES, SETS, VECTORS

HEADER_WORDS = 8
"""Kind, phase, part, epoch, batch number, images, batches left, signature; see `DataServer` for a phase."""
SIGNATURE = 7
"""The word of the header that has the signature of the fields."""
ALIGNMENT = 8
INPUT = "input"
TARGET = "target"
KINDS = (CLASSES, VECTORS, SETS, SEQUENCES)
"""A class for each image; numbers; marks of labels (0 or 1 each); whole numbers, one for each position."""
DTYPES = ("uint8", "int32", "int64", "float16", "float32")


@dataclass(frozen=True)
class Field:
    """One named array of a batch: the type of its values, and the shape of those of one image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str = INPUT
    """Whether it is an input or a target."""
    kind: str = ""
    """Of a target: one of KINDS."""

    @property
    def values(self) -> int:
        """Return the number of values that a field has of one image."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Return the bytes that a field has of one image."""
        return self.values * np.dtype(self.dtype).itemsize

    def bytes(self, images: int) -> int:
        """Return the bytes of a field of `images` images in a message."""
        return -(-images * self.size // ALIGNMENT) * ALIGNMENT


CLASS = Field(TARGET, "int64", (), TARGET, CLASSES)
"""A class for each image."""


OTHER = "target2"
WEIGHT = "weight"
SOFT = (Field(OTHER, "int64", (), TARGET, CLASSES), Field(WEIGHT, "float32", (), TARGET, VECTORS))
"""Of mixed images: the class of the other one, and the weight of the class in the first target."""


def image_fields(shape: tuple[int, ...], dtype: str = "uint8") -> tuple[Field, Field]:
    """Return the fields of a batch of images of `shape` with a class each."""
    return Field(INPUT, dtype, shape), CLASS


def signature(fields: Sequence[Field]) -> int:
    """Return a number that tells descriptions of fields apart."""
    digest = hashlib.sha256(repr(tuple(fields)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def cut_columns(fields: Sequence[Field], first: int, end: int) -> tuple[Field, ...]:
    """Return `fields` as a strip receives them, which has the columns from `first` to `end` of all inputs."""
    return tuple(
        replace(field, shape=(*field.shape[:-1], end - first)) if field.role == INPUT else field for field in fields
    )


def message_bytes(images: int, fields: Sequence[Field]) -> int:
    """Return the bytes of a message with the fields of `images` images, or of the largest one up to as many."""
    return 8 * (HEADER_WORDS + images) + sum(field.bytes(images) for field in fields)


def pack_batch(header: Sequence[int], mark: int, ids: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the fields of a batch as a message; `values`: the arrays in the fields' order, `mark`: their signature."""
    words = np.zeros(HEADER_WORDS, np.int64)
    words[: len(header)] = header
    words[SIGNATURE] = mark
    parts = [words, ids.astype(np.int64), *map(np.ascontiguousarray, values)]
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
    message = np.empty(sum(sizes), np.uint8)
    place = 0
    for part, size in zip(parts, sizes, strict=True):
        message[place : place + part.nbytes] = part.reshape(-1).view(np.uint8)
        message[place + part.nbytes : place + size] = 0
        place += size
    return message


def unpack_batch(message: np.ndarray, fields: Sequence[Field], mark: int, own: int) -> dict[str, np.ndarray]:
    """Return the fields in a message by name, as views; inputs are of `own` images, targets of all.

    Raises UserError for a message whose signature is not `mark`, that of the sender's description.
    """
    words = message[: 8 * HEADER_WORDS].view(np.int64)
    if int(words[SIGNATURE]) != mark:
        names = ", ".join(f"{field.name} ({field.dtype} of {field.shape})" for field in fields)
        raise UserError(
            f"a data rank sends other fields than {names}: its files differ from those of rank 0; "
            "give all hosts the same data set"
        )
    count = int(words[5])
    place = 8 * (HEADER_WORDS + count)
    found = {}
    for field in fields:
        images = own if field.role == INPUT else count
        found[field.name] = message[place : place + images * field.size].view(field.dtype).reshape(images, *field.shape)
        place += field.bytes(images)
    return found


def split(fields: Sequence[Field], values: Mapping[str, np.ndarray], role: str) -> dict[str, np.ndarray]:
    """Return the arrays of the fields with this `role`, inputs or targets, in their order."""
    return {field.name: values[field.name] for field in fields if field.role == role}
