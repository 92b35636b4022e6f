"""Data sets of named arrays, as `data.inputs` and `data.targets` describe them: any inputs, and targets of any kind."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.data.formats import arrays, hdf5
from adam_mpi.data.formats.arrays import Held
from adam_mpi.data.formats.source import Column, Rows, Source, image_axes, rows_at
from adam_mpi.sharding.fields import CLASSES, INPUT, KINDS, SEQUENCES, SETS, TARGET, VECTORS, Field

SAFETENSORS = {"U8": "u1", "BOOL": "?", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"} | {
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}
MOST_HEADER = 100 << 20
"""Bytes of the largest header of a safetensors file that is read."""


@dataclass(frozen=True)
class Wanted:
    """An entry of `data.inputs` or `data.targets`."""

    name: str
    kind: str = ""


def parse(key: str, entries: Sequence[Any], kinds: Sequence[str] = ()) -> list[Wanted]:
    """Return the named arrays that `key` asks for: names, or tables with name and kind; raise UserError for others."""
    found = [Wanted(entry) if isinstance(entry, str) else _parse_table(key, entry, kinds) for entry in entries]
    names = [wanted.name for wanted in found]
    if len(set(names)) < len(names):
        raise UserError(f"{key} = {names}: each array may be named once")
    return found


def _parse_table(key: str, entry: Any, kinds: Sequence[str]) -> Wanted:
    """Return the named array that a table of `key` asks for; raise UserError for a wrong one."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not {"name", "kind"} >= set(entry):
        raise UserError(f"{key}: {entry!r} is neither the name of an array nor a table with name and kind")
    wanted = Wanted(entry["name"], entry.get("kind", ""))
    if wanted.kind and wanted.kind not in kinds:
        raise UserError(f"{key}: {wanted.name} has the kind {wanted.kind!r}; allowed: {', '.join(kinds) or 'none'}")
    return wanted


def open_parts(path: Path, inputs: Sequence[Any], targets: Sequence[Any]) -> dict[str, Source]:
    """Open the parts of the data set of named arrays at `path`, with the `inputs` and `targets` of the configuration.

    Raises UserError for an array that is missing, has another length than the others, or holds no numbers.
    """
    if not inputs or not targets:
        raise UserError("data.inputs and data.targets: give both, or neither for images and labels")
    taken = parse("data.inputs", inputs)
    aims = parse("data.targets", targets, KINDS)
    if both := {wanted.name for wanted in taken} & {wanted.name for wanted in aims}:
        raise UserError(f"data.targets: {', '.join(sorted(both))} is also in data.inputs")
    held = open_arrays(path)
    parts = {"train": _find_named_arrays(path, held, [*taken, *aims], "train", required=True)}
    if test := _find_named_arrays(path, held, [*taken, *aims], "test", required=False):
        parts["test"] = test
    return {part: _source_of_part(found, taken, aims) for part, found in parts.items()}


def open_arrays(path: Path) -> dict[str, Held]:
    """Return the named arrays of an npz, HDF5 or safetensors file, or of a folder of npy files."""
    if path.is_dir():
        return arrays.open_arrays(path)
    with open(path, "rb") as file:
        start = file.read(8)
    if start.startswith(b"PK\x03\x04"):
        return arrays.members(path)
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return hdf5.open_arrays(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    raise UserError(f"data set {path}: named arrays are read from npz, HDF5 and safetensors files, and folders of npy")


def _open_safetensors(path: Path) -> dict[str, Held]:
    """Return the tensors of a safetensors file: a length, a header in JSON, and the tensors one after the other."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MOST_HEADER:
                raise ValueError(f"its header announces {length} bytes")
            header = json.loads(file.read(length))
        found = {}
        for name, described in header.items():
            if name != "__metadata__":
                dtype = np.dtype(SAFETENSORS[described["dtype"]])
                sizes = tuple(map(int, described["shape"])) or (1,)
                rows = rows_at(path, dtype, sizes, 8 + length + int(described["data_offsets"][0]))
                found[name] = Held(f"{path}:{name}", sizes, dtype, rows)
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a safetensors file, or damaged ({error})") from None


def _find_named_arrays(
    path: Path, held: Mapping[str, Held], wanted: Sequence[Wanted], part: str, required: bool
) -> dict[str, Held]:
    """Return the named arrays of `part`: x is train_x, x_train or train/x, or x alone.

    Without `required` nothing is returned unless one of them is there.
    """
    found = {}
    missing = []
    for entry in wanted:
        names = [f"{part}_{entry.name}", f"{entry.name}_{part}", f"{part}/{entry.name}"]
        names += [entry.name] if part == "train" else []
        name = next((name for name in names if name in held), None)
        if name is None:
            missing.append(names[0])
        else:
            found[entry.name] = held[name]
    if missing and (required or found):
        shown = ", ".join(sorted(held)[:8]) or "nothing"
        raise UserError(f"{path}: no array {missing[0]} (data.inputs and data.targets name it); it holds {shown}")
    return found


def _source_of_part(found: Mapping[str, Held], inputs: Sequence[Wanted], targets: Sequence[Wanted]) -> Source:
    """Return the source of one part of a data set of named arrays."""
    count = _check_lengths(found)
    first = found[inputs[0].name]
    field, rows = _first_input(inputs[0].name, first)
    columns = [_further_input(wanted.name, found[wanted.name]) for wanted in inputs[1:]]
    aims = [_target_field(wanted, found[wanted.name]) for wanted in targets]
    values = [np.ascontiguousarray(found[aim.name].all().reshape(count, *aim.shape), aim.dtype) for aim in aims]
    more = [Column(aim, array.__getitem__) for aim, array in zip(aims[1:], values[1:], strict=True)]
    return Source(
        name=lambda index: f"{first.name}, row {index}",
        shape=field.shape,
        dtype=np.dtype(field.dtype),
        labels=values[0],
        rows=rows,
        in_memory=first.in_memory,
        input_name=field.name,
        target=aims[0],
        columns=(*columns, *more),
    )


def _check_lengths(found: Mapping[str, Held]) -> int:
    """Return the rows of all named arrays; raise UserError where they differ, or hold no numbers."""
    (first, one), *_ = found.items()
    for name, held in found.items():
        if held.dtype.kind not in "uifb":
            raise UserError(f"{held.name}: holds {held.dtype}; it must hold numbers")
        if held.sizes[0] != one.sizes[0]:
            raise UserError(f"{held.name}: {name} has {held.sizes[0]} rows, {first} has {one.sizes[0]}")
    if not math.prod(one.sizes):
        raise UserError(f"{one.name}: holds nothing, its sizes are {one.sizes}")
    return one.sizes[0]


def _input_type(dtype: np.dtype) -> str:
    """Return the type that a named input is sent as: bytes, integers, and floats of at most 32 bits."""
    if dtype.kind == "f":
        return "float16" if dtype.itemsize == 2 else "float32"
    if dtype.kind == "b" or dtype == np.uint8:
        return "uint8"
    return "int32" if dtype.itemsize < 4 or dtype == np.int32 else "int64"


def _first_input(name: str, held: Held) -> tuple[Field, Rows]:
    """Return the first named input: bytes and floats are images or features, (channels, height, width)."""
    field, rows = _further_input(name, held).field, _further_input(name, held).rows
    if not 2 <= len(held.sizes) <= 4 or field.dtype.startswith("int"):
        return field, rows
    shape, order = image_axes(held.name, held.sizes)

    def arranged(indices: np.ndarray) -> np.ndarray:
        taken = rows(indices)
        return np.ascontiguousarray(taken.transpose(order) if order else taken.reshape(len(indices), *shape))

    return Field(name, field.dtype, shape), arranged


def _further_input(name: str, held: Held) -> Column:
    """Return a further named input as it is in the file."""
    dtype = _input_type(held.dtype)
    return Column(
        Field(name, dtype, held.sizes[1:], INPUT), lambda indices: np.ascontiguousarray(held.rows(indices), dtype)
    )


def _target_field(wanted: Wanted, held: Held) -> Field:
    """Return the field of a named target, whose kind follows from its type where none is given.

    Raises UserError for an array that cannot be of this kind.
    """
    kind = wanted.kind or _target_kind(held)
    shape = held.sizes[1:]
    floats = held.dtype.kind == "f"
    if kind == CLASSES and (floats or math.prod(shape) != 1):
        raise UserError(f"{held.name}: classes are one whole number each, not {held.dtype} of sizes {held.sizes}")
    if kind in (SETS, SEQUENCES) and (floats or len(shape) != 1):
        raise UserError(f"{held.name}: {kind} are rows of whole numbers, not {held.dtype} of sizes {held.sizes}")
    if kind == CLASSES:
        return Field(wanted.name, "int64", (), TARGET, kind)
    if kind == VECTORS:
        return Field(wanted.name, "float32", shape or (1,), TARGET, kind)
    return Field(wanted.name, "uint8" if kind == SETS else "int32", shape, TARGET, kind)


def _target_kind(held: Held) -> str:
    """Return the kind of targets that a named array of this type and shape has."""
    if held.dtype.kind == "f":
        return VECTORS
    if math.prod(held.sizes[1:]) == 1:
        return CLASSES
    return SETS if held.dtype.kind == "b" or held.dtype == np.uint8 else SEQUENCES
