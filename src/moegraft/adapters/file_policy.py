"""What files an adapter may be read from: an allowed root, and limits on sizes and counts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moegraft.errors import AdapterError, shown

_GiB = 1 << 30
_MiB = 1 << 20


@dataclass(frozen=True)
class FilePolicy:
    """Where adapters may lie, and how large what they claim may be.

    Attributes:
        root: folder that every file must lie in once links are followed; None = anywhere. Give
            one wherever a path comes from a request.
        max_bytes: largest safetensors file.
        max_header_bytes: longest header of one, 200 bytes or so per tensor.
        max_tensors: most tensors in one; 256 experts in 61 layers have 94,000.
        max_config_bytes: largest adapter_config.json.

    Example: ``FilePolicy(root="/srv/adapters", max_bytes=2 << 30)``.
    """

    root: str | Path | None = None
    max_bytes: int = 64 * _GiB
    max_header_bytes: int = 64 * _MiB
    max_tensors: int = 250_000
    max_config_bytes: int = 16 * _MiB

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_header_bytes", "max_tensors", "max_config_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise AdapterError(f"FilePolicy: {name}={shown(value)} is no whole number over 0.")
        if self.root is None:
            return
        if not isinstance(self.root, (str, Path)) or not os.path.isdir(self.root):
            raise AdapterError(f"FilePolicy: root={shown(self.root)} is no folder on this machine.")


#: What holds unless the caller says otherwise.
DEFAULT_POLICY = FilePolicy()
