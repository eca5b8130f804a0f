"""The tensors of a safetensors file, read once into memory of their own."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import torch

from moegraft.adapters.file_policy import FilePolicy
from moegraft.adapters.header import Header, StoredTensor, read_header
from moegraft.adapters.safe_open import open_regular, path_text
from moegraft.errors import AdapterError


def read_tensors(path: Path, policy: FilePolicy) -> dict[str, torch.Tensor]:
    """Read a safetensors file: name -> tensor, views of one buffer.

    The file is opened once, and its bytes are copied: nothing that happens to it later (another
    file in its place, a shorter one) can change what was checked, or end the process as a memory
    map of a truncated file would.

    Raises:
        AdapterError: no readable safetensors file, or one that the policy does not allow.
    """
    origin = path_text(path)
    with open_regular(path, policy) as (file, num_bytes):
        header = read_header(file, num_bytes, origin, policy)
        data = _read(file, header, origin)
    return {name: _view(data, stored) for name, stored in header.tensors.items()}


def _read(file: BinaryIO, header: Header, origin: str) -> torch.Tensor:
    """Return the file's data as uint8, all of it or an error."""
    try:
        data = torch.empty(header.data_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise AdapterError(
            f"{origin} has {header.data_bytes:,} bytes of tensors, more than this machine has "
            "memory for."
        ) from error
    found = file.readinto(data.numpy().data)  # type: ignore[attr-defined]
    if found != header.data_bytes:
        raise AdapterError(
            f"{origin} is not a readable safetensors file: it ended after {found:,} of "
            f"{header.data_bytes:,} bytes of tensors."
        )
    return data


def _view(data: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Return one tensor as a view, or as a copy where its bytes are not aligned to its dtype."""
    found = data[stored.begin : stored.end]
    if stored.begin % stored.dtype.itemsize:
        found = found.clone()
    return found.view(stored.dtype).view(stored.shape)
