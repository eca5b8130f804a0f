"""A model's safetensors checkpoint on disk: its files, and its tensors as places to read and write.

Only for checkpoints of the user's own; adapters of strangers go through
:mod:`moegraft.adapters.read`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from moegraft.adapters.header import STORED_DTYPES
from moegraft.errors import AdapterError, shorten

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class CheckpointTensor:
    """Where one tensor of a checkpoint lies in its file.

    Unlike a :class:`moegraft.adapters.stored.StoredTensor` it may have any dtype: most tensors are
    only copied with the file.

    Attributes:
        name: key in the file.
        dtype: as the file names it, such as ``BF16``.
        shape: its sizes; begin: first byte, counted from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype; AdapterError for one that nothing can be added to."""
        if self.dtype not in STORED_DTYPES:
            raise AdapterError(
                f"{self.name} is stored as {self.dtype}: an adapter can be merged into float32, "
                "bfloat16 and float16 weights only; use the checkpoint that was quantised."
            )
        return STORED_DTYPES[self.dtype]

    def read(self, file: BinaryIO, entry: int | None = None) -> torch.Tensor:
        """Read it into memory of its own, or entry ``entry`` of its first dimension."""
        shape = self.shape if entry is None else self.shape[1:]
        num_bytes = math.prod(shape) * self.torch_dtype.itemsize
        file.seek(self.begin + (entry or 0) * num_bytes)
        data = bytearray(num_bytes)
        if file.readinto(data) != num_bytes:  # type: ignore[attr-defined]
            raise AdapterError(f"{self.name}: the file ends before it does.")
        return torch.frombuffer(data, dtype=self.torch_dtype).view(shape)

    def write(self, file: BinaryIO, value: torch.Tensor, entry: int | None = None) -> None:
        """Write what :meth:`read` with the same ``entry`` reads."""
        data = value.to(self.torch_dtype).contiguous().view(torch.uint8).numpy()
        file.seek(self.begin + (entry or 0) * data.nbytes)
        file.write(data.data)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder.

    Raises:
        AdapterError: there are none, or one that the index names is missing.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            if not all(isinstance(name, str) for name in found):
                raise TypeError("a name of a file in its weight_map is no text")
            names = sorted(set(found))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise AdapterError(f"{str(index)!r} is not a readable index: {error}.") from error
    else:
        names = [SINGLE_FILE]
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise AdapterError(f"{str(index)!r} names files outside of its folder: {shorten(outside)}.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise AdapterError(
            f"{str(folder)!r} lacks {shorten(missing)}: merging reads a safetensors checkpoint as "
            "save_pretrained writes it."
        )
    return [folder / name for name in names]


def other_files(folder: Path) -> Iterator[Path]:
    """Yield the files beside the weights: configs, the tokenizer, the index."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and path.name[0] != ".":
            yield path


def stored_tensors(path: Path) -> list[CheckpointTensor]:
    """Return the tensors of one file, in the order of its header.

    Raises:
        AdapterError: it is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        return [
            CheckpointTensor(
                name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(f"{str(path)!r} is not a readable safetensors file: {error}.") from error
