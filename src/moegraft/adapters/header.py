"""The header of a safetensors file, checked in full before anything is allocated or believed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from moegraft.adapters.file_policy import FilePolicy
from moegraft.adapters.stored import LARGEST, Header, TensorKind, sizes_of
from moegraft.adapters.strict_json import count_marks, parse_json
from moegraft.errors import AdapterError, shown

#: Dtypes that factors may be stored in, under their names in safetensors files.
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
#: One tensor of a header as safetensors writes it, with the comma behind it.
_ENTRY = re.compile(
    rb'"([^"\\\x00-\x1f]+)":{"dtype":"(\w{1,16}","shape":\[(?:\d{1,18}(?:,\d{1,18})*)?)\],'
    rb'"data_offsets":\[((?:0|[1-9]\d{0,17}),(?:0|[1-9]\d{0,17}))\]},'
)
#: What lies between dtype and sizes of an entry.
_SHAPE = b'","shape":['
_METADATA = re.compile(rb'{"__metadata__":({"[\w.-]+":"[\w.-]*"}),')
#: Dimensions of a tensor; factors have two or three.
MAX_DIMS = 8
#: Names are shown in messages and split at dots; the longest real ones have about 150 characters.
_MAX_NAME = 1000
#: Values of the header (numbers, names, lists) per tensor that it may hold.
_VALUES_PER_TENSOR = 12


class _Columns(NamedTuple):
    """Entries: names, dtypes with sizes as they are written, first bytes, those behind the last."""

    names: Sequence[str]
    kinds: Sequence[bytes]
    begins: Any
    ends: Any


def read_header(file: BinaryIO, file_bytes: int, origin: str, policy: FilePolicy) -> Header:
    """Read and check the header of an open file.

    Args:
        file: at its beginning; afterwards at its data.
        file_bytes: its size.
        origin: what to call it in messages.
        policy: the limits.

    Raises:
        AdapterError: over a limit, or a header that is damaged or lies: its length, its JSON (no
            key twice), its dtypes and shapes, its offsets. Takes time and memory in proportion to
            the header's length at most.
    """

    def bad(what: str) -> AdapterError:
        return AdapterError(f"{origin} is not a readable safetensors file: {what}.")

    if file_bytes > policy.max_bytes:
        raise AdapterError(
            f"{origin} has {file_bytes:,} bytes, over the limit of {policy.max_bytes:,} "
            "(FilePolicy.max_bytes)."
        )
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > file_bytes - 8:
        raise bad(f"it has {file_bytes:,} bytes, and says that its header has {length:,}")
    if length > policy.max_header_bytes:
        raise AdapterError(
            f"{origin} has a header of {length:,} bytes, over the limit of "
            f"{policy.max_header_bytes:,} (FilePolicy.max_header_bytes)."
        )
    raw = file.read(length)
    if len(raw) < length or not raw.startswith(b"{"):
        raise bad("its header is no JSON object")
    values, most = count_marks(raw), _VALUES_PER_TENSOR * policy.max_tensors
    if values > most:
        raise AdapterError(
            f"{origin} has a header of {values:,} values, more than {policy.max_tensors:,} tensors "
            "need (FilePolicy.max_tensors)."
        )
    columns, metadata = _plain(raw) or _any(raw, origin, most)
    if len(columns.names) > policy.max_tensors:
        raise AdapterError(
            f"{origin} holds {len(columns.names):,} tensors, over the limit of "
            f"{policy.max_tensors:,} (FilePolicy.max_tensors)."
        )
    kinds, kind_of = _checked(columns, origin)
    data_bytes = file_bytes - 8 - length
    problem = _cover(columns, data_bytes)
    if problem:
        raise bad(problem)
    return Header(columns.names, kinds, kind_of, columns.begins, metadata, 8 + length, data_bytes)


def check_tensor_name(name: object, origin: str) -> None:
    """Refuse names that are no plain line of text: they end up in messages and logs."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > _MAX_NAME:
        raise AdapterError(
            f"{origin} holds a tensor named {shown(name)}; a name is at most {_MAX_NAME} printable "
            "characters."
        )


def wrong_dtype(origin: str, name: str, dtype: object) -> AdapterError:
    """Return the error for a tensor of a dtype that factors can't have."""
    more = ""
    if "8" in str(dtype) and "f" in str(dtype).lower():
        more = " (8-bit floats need scales that are not part of a LoRA; store it as bfloat16)"
    return AdapterError(
        f"{origin}: {name} is {dtype}; factors must be float32, bfloat16 or float16{more}."
    )


def _plain(raw: bytes) -> tuple[_Columns, dict[str, str]] | None:
    """Read a header in the form that safetensors writes; None for any other.

    JSON makes several objects per tensor, which costs more than reading small factors does.
    """
    start = _METADATA.match(raw)
    metadata = json.loads(start[1]) if start else {}
    text = raw[start.end() if start else 1 :].rstrip(b" ")
    if not text.endswith(b"}"):
        return None
    text = text[:-1] + b","
    parts = _ENTRY.split(text)
    if any(parts[:: _ENTRY.groups + 1]):
        return None  # the entries leave something over
    names, kinds, spans = (parts[i :: _ENTRY.groups + 1] for i in (1, 2, 3))
    try:
        decoded = b"\n".join(names).decode().split("\n") if names else []
    except UnicodeDecodeError:
        return None
    if len(set(decoded)) != len(names):
        return None
    offsets = np.fromstring(b",".join(spans), dtype=np.int64, sep=",")
    return _Columns(decoded, kinds, offsets[0::2], offsets[1::2]), metadata


def _any(raw: bytes, origin: str, max_values: int) -> tuple[_Columns, dict[str, str]]:
    """Read any header, and say what is wrong with it."""
    what = f"{origin} is not a readable safetensors file: its header"
    found = parse_json(raw, what, max_values)
    assert isinstance(found, dict)  # it begins with a brace
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise AdapterError(f"{what} has a __metadata__ that is no object of texts.")
    kinds: list[bytes] = []
    spans: list[list[int]] = []
    for name, entry in found.items():
        check_tensor_name(name, origin)
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise AdapterError(f"{what} has {name} without dtype, shape and data_offsets alone.")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str):
            raise wrong_dtype(origin, name, shown(dtype))
        if not _are_sizes(shape):
            raise AdapterError(f"{origin}: {name} has the shape {shown(shape)}.")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise AdapterError(f"{origin}: {name} has the offsets {shown(offsets)}.")
        sizes = ",".join(map(str, shape)).encode()
        kinds.append(dtype.encode("utf-8", "replace") + _SHAPE + sizes)
        spans.append(offsets)
    begins, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return _Columns(list(found), kinds, begins, ends), metadata


def _checked(columns: _Columns, origin: str) -> tuple[list[TensorKind], Any]:
    """Check every entry; what many have in common (dtype and shape) is checked once.

    Returns:
        The kinds, and the number of each tensor's.
    """
    names = columns.names
    if max(map(len, names), default=0) > _MAX_NAME or not "".join(names).isprintable():
        for name in names:
            check_tensor_name(name, origin)
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(columns.kinds))}
    kind_of = np.fromiter(map(numbers.__getitem__, columns.kinds), np.int64, len(names))
    firsts = np.flatnonzero(np.diff(np.maximum.accumulate(kind_of), prepend=-1)).tolist()
    kinds = [_kind(names[i], columns.kinds[i], origin) for i in firsts]
    wrong = np.flatnonzero(columns.ends - columns.begins != sizes_of(kinds)[kind_of])
    if len(wrong):
        first = int(wrong[0])
        dtype, shape, num_bytes = kinds[kind_of[first]]
        raise AdapterError(
            f"{origin}: {names[first]} is {dtype} {shape}, so {num_bytes:,} bytes, but has bytes "
            f"{columns.begins[first]:,} to {columns.ends[first]:,}."
        )
    return kinds, kind_of


def _kind(name: str, written: bytes, origin: str) -> TensorKind:
    """Return what a dtype and sizes, as they are written, say."""
    dtype_name, _, sizes = written.decode().rpartition(_SHAPE.decode())
    dtype = STORED_DTYPES.get(dtype_name)
    if dtype is None:
        raise wrong_dtype(origin, name, shown(dtype_name))
    shape = parse_json(f"[{sizes}]".encode(), f"{origin}: the shape of {name}")
    widest = math.prod(max(size, 1) for size in shape)
    if len(shape) > MAX_DIMS or widest >= LARGEST:
        raise AdapterError(f"{origin}: {name} has the shape {shown(shape)}.")
    return TensorKind(dtype, tuple(shape), math.prod(shape) * dtype.itemsize)


def _are_sizes(values: object) -> bool:
    """True for a list of whole numbers from 0 on that torch can count with."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < LARGEST for v in values)


def _cover(columns: _Columns, data_bytes: int) -> str:
    """Return where tensors leave holes in the data, overlap or end outside; "" when nowhere."""
    order = np.lexsort((columns.ends, columns.begins))
    if not len(order):
        return "" if not data_bytes else f"{data_bytes:,} bytes of data belong to no tensor"
    begins, ends = columns.begins[order], columns.ends[order]
    if begins[0] != 0:
        name = columns.names[order[0]]
        return f"{name} is the first one, but begins at byte {begins[0]:,} of the data"
    apart = np.flatnonzero(begins[1:] != ends[:-1])
    if len(apart):
        at = int(apart[0])
        first, second = (columns.names[i] for i in order[at : at + 2])
        kind = "overlap" if begins[at + 1] < ends[at] else "leave a hole"
        return f"{first} and {second} {kind}: {ends[at]:,} and {begins[at + 1]:,}"
    if ends[-1] != data_bytes:
        return f"its tensors have {ends[-1]:,} bytes, its data {data_bytes:,}"
    return ""
