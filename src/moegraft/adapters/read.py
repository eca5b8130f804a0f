"""Read an adapter from a folder, a file or live tensors: safetensors only, never pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moegraft.adapters.config import AdapterConfig
from moegraft.adapters.keys import AdapterKey, parse_key
from moegraft.errors import AdapterError, shorten

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "adapter_model.ckpt")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AdapterSource:
    """An adapter as read, before it is bound to a model.

    Attributes:
        tensors: key as in the file -> tensor, fp32/bf16/fp16, finite.
        keys: the same keys parsed.
        config: its configuration.
        origin: where it came from, for messages.
    """

    tensors: Mapping[str, torch.Tensor]
    keys: Mapping[str, AdapterKey]
    config: AdapterConfig
    origin: str


def read_adapter(path: str | Path) -> AdapterSource:
    """Read an adapter folder (or its safetensors file, with the config beside it).

    Raises:
        AdapterError: nothing there, a pickle file, a damaged file, bad values or a bad config.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    weights = path / WEIGHTS_FILE if path.is_dir() else path
    if weights.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise _pickle_error(weights)
    if not weights.is_file():
        for name in _PICKLES:
            if path.is_dir() and (path / name).is_file():
                raise _pickle_error(path / name)
        inside = _adapters_inside(path)
        if inside:
            raise AdapterError(
                f"{str(path)!r} is no adapter folder itself: it has no {WEIGHTS_FILE}. There are "
                f"adapters inside; give one of them: {shorten(inside)}."
            )
        raise AdapterError(
            f"There is no adapter at {str(path)!r}: expected a folder with {WEIGHTS_FILE} and "
            f"{CONFIG_FILE}. moegraft never downloads; fetch the adapter first."
        )
    return make_source(_load(weights), _load_config(folder / CONFIG_FILE), str(path))


def make_source(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    origin: str = "tensors in memory",
) -> AdapterSource:
    """Check live tensors and a config (the JSON of adapter_config.json) and wrap them.

    Raises:
        AdapterError: no LoRA tensors, a dtype that can't be served, NaN or Inf, a bad config.
    """
    if not any("lora_" in key for key in tensors):
        raise AdapterError(
            f"{origin}: none of its {len(tensors)} tensors is a LoRA factor"
            + (f" (first names: {shorten(list(tensors))})." if tensors else ".")
        )
    for key, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise AdapterError(
                f"{origin}: {key} is {tensor.dtype}; factors must be float32, bfloat16 or float16."
            )
        if not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise AdapterError(
                f"{origin}: {key} holds {count} NaN or infinite values of {tensor.numel()}; the "
                "adapter is damaged (did its training diverge?) and is refused."
            )
    keys = {key: parse_key(key) for key in tensors}
    # A trainer's live parameters carry gradients; what is served must not.
    tensors = {key: tensor.detach() for key, tensor in tensors.items()}
    return AdapterSource(tensors, keys, AdapterConfig.parse(config or {}), origin)


def _adapters_inside(path: Path) -> list[str]:
    """Return the direct subfolders that hold an adapter."""
    if not path.is_dir():
        return []
    return sorted(str(child.parent) for child in path.glob(f"*/{WEIGHTS_FILE}"))


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise AdapterError(f"{str(path)!r} is not a readable safetensors file: {error}.") from error


def _load_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise AdapterError(
            f"{str(path)!r} is missing: without it rank and alpha, so the scale, are unknown."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{str(path)!r} is not readable JSON: {error}.") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{str(path)!r} must hold a JSON object, got {type(config).__name__}.")
    return config


def _pickle_error(path: Path) -> AdapterError:
    return AdapterError(
        f"{str(path)!r} is a pickle file, which can run code when opened, so it is refused. "
        "Convert it where you trust it: load it with torch.load(..., weights_only=True) and save "
        f"it with safetensors.torch.save_file(tensors, '{WEIGHTS_FILE}')."
    )
