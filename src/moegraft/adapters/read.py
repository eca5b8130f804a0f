"""Read an adapter from a folder, a file or live tensors: safetensors only, never pickle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moegraft.adapters.config import AdapterConfig
from moegraft.adapters.file_policy import DEFAULT_POLICY, FilePolicy
from moegraft.adapters.finite import check_finite
from moegraft.adapters.header import STORED_DTYPES, check_tensor_name, wrong_dtype
from moegraft.adapters.keys import AdapterKey, parse_keys
from moegraft.adapters.safe_open import as_one, check_inside, open_regular, path_text, readable
from moegraft.adapters.strict_json import check_depth, parse_json
from moegraft.adapters.tensor_file import reading
from moegraft.errors import AdapterError, shorten, shown
from moegraft.gc_pause import gc_paused

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "adapter_model.ckpt")
_DTYPES = frozenset(STORED_DTYPES.values())
#: module -> leaf -> (key, tensor)
Pairs = dict[str, dict[str, tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class AdapterSource:
    """An adapter as read, before it is bound to a model.

    Attributes:
        tensors: key as in the file -> tensor, fp32/bf16/fp16, finite.
        keys: the same keys parsed.
        config: its configuration.
        origin: where it came from, for messages.
        memory: uint8 buffer that all tensors are views of, when it was made for them.
    """

    tensors: Mapping[str, torch.Tensor]
    keys: Mapping[str, AdapterKey]
    config: AdapterConfig
    origin: str
    memory: torch.Tensor | None = None

    @cached_property
    def pairs(self) -> Pairs:
        """All lora_A and lora_B by their modules, see :func:`paired`; shared, not to be changed."""
        return paired(self.keys, self.tensors)


def paired(keys: Mapping[str, AdapterKey], tensors: Mapping[str, torch.Tensor]) -> Pairs:
    """Group lora_A/lora_B tensors by module; of two for one module and leaf the first counts."""
    modules: Pairs = {}
    for name, tensor in tensors.items():
        module, leaf = keys[name]
        if leaf == "lora_A" or leaf == "lora_B":
            known = modules.get(module)
            if known is None:
                modules[module] = {leaf: (name, tensor)}
            elif leaf not in known:
                known[leaf] = (name, tensor)
    return modules


@gc_paused()
def read_adapter(
    path: str | Path, policy: FilePolicy = DEFAULT_POLICY, pin_memory: bool = False
) -> AdapterSource:
    """Read an adapter folder (or its safetensors file, with the config beside it).

    Args:
        path: where it is; relative ones are relative to the current folder, as everywhere.
        policy: where adapters may lie, and limits for what files claim.
        pin_memory: read it into page-locked memory, for asynchronous copies to a GPU.

    Raises:
        AdapterError: nothing there, outside of the allowed root, a pickle file, a damaged or
            hostile file, bad values or a bad config.
    """
    if not isinstance(path, (str, Path)):
        raise AdapterError(f"{shown(path)} is no path of an adapter; give a text or a Path.")
    path = Path(path)
    check_inside(path, policy)
    is_folder = os.path.isdir(path)
    folder = path if is_folder else path.parent
    weights = path / WEIGHTS_FILE if is_folder else path
    if weights.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise _pickle_error(weights)
    if not os.path.lexists(weights):
        for name in _PICKLES:
            if is_folder and os.path.isfile(path / name):
                raise _pickle_error(path / name)
        # Who asks for a path inside of a root need not know what else is there.
        inside = _adapters_inside(path) if policy.root is None else []
        if inside:
            raise AdapterError(
                f"{path_text(path)} is no adapter folder itself: it has no {WEIGHTS_FILE}. There "
                f"are adapters inside; give one of them: {shorten(inside)}."
            )
        raise AdapterError(
            f"There is no adapter at {path_text(path)}: expected a folder with {WEIGHTS_FILE} and "
            f"{CONFIG_FILE}. moegraft never downloads; fetch the adapter first."
        )
    # Links of the folder are followed once, so that one that is flipped leads to one version.
    folder = Path(os.path.realpath(folder))
    weights, config_file = folder / weights.name, folder / CONFIG_FILE
    with as_one(folder, (weights, config_file)):
        with reading(weights, policy, pin_memory) as file:
            keys = parse_keys(file.tensors)
        config = _load_config(config_file, policy)
    name = str(path)
    origin = name if name.isprintable() else path_text(path)
    _check_any_lora(file.tensors, origin)
    check_finite(file.tensors, origin, file.runs)
    return AdapterSource(file.tensors, keys, AdapterConfig.parse(config), origin, file.memory)


@gc_paused()
def make_source(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    origin: str = "tensors in memory",
    memory: Iterable[torch.Tensor] = (),
) -> AdapterSource:
    """Check live tensors and a config (the JSON of adapter_config.json) and wrap them.

    Args:
        tensors: name -> tensor.
        config: the JSON of adapter_config.json.
        origin: what to call them in messages.
        memory: tensors that together hold every value of ``tensors``, when they are views of a few
            buffers: these are then checked for NaN and infinity in one pass.

    Raises:
        AdapterError: no LoRA tensors, a dtype that can't be served, NaN or Inf, a bad config.
    """
    if not isinstance(tensors, Mapping):
        raise AdapterError(f"{origin}: {shown(tensors)} is no mapping of names to tensors.")
    if config is not None and not isinstance(config, Mapping):
        raise AdapterError(
            f"{origin}: the config {shown(config)} is no mapping; give the JSON of "
            f"{CONFIG_FILE}, or LoraConfig.to_dict()."
        )
    check_depth(config or {}, f"{origin}: the config")
    for key, tensor in tensors.items():
        check_tensor_name(key, origin)
        problem = _why_no_values(tensor)
        if problem:
            raise AdapterError(f"{origin}: {key} is {problem}.")
    _check_any_lora(tensors, origin)
    for key, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise wrong_dtype(origin, key, tensor.dtype)
    check_finite(tensors, origin, memory)
    keys = parse_keys(tensors)
    # A trainer's live parameters carry gradients; what is served must not.
    if any(tensor.requires_grad for tensor in tensors.values()):
        tensors = {key: tensor.detach() for key, tensor in tensors.items()}
    return AdapterSource(tensors, keys, AdapterConfig.parse(config or {}), origin)


def _check_any_lora(tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    if not any("lora_" in key for key in tensors):
        raise AdapterError(
            f"{origin}: none of its {len(tensors)} tensors is a LoRA factor"
            + (f" (first names: {shorten(list(tensors))})." if tensors else ".")
        )


def _why_no_values(tensor: object) -> str:
    """Return what keeps a tensor from being read, as ``a list``; "" for plain ones."""
    if not isinstance(tensor, torch.Tensor):
        return f"{shown(tensor)}, not a tensor"
    if hasattr(tensor, "full_tensor"):
        return "a DTensor, of which each rank has a part; give its full_tensor()"
    if tensor.layout is not torch.strided:
        return f"no dense tensor ({tensor.layout})"
    return "on meta, where tensors have no values" if tensor.is_meta else ""


def _adapters_inside(path: Path) -> list[str]:
    """Return the direct subfolders that hold an adapter."""
    if not os.path.isdir(path):
        return []
    return sorted(str(child.parent) for child in path.glob(f"*/{WEIGHTS_FILE}"))


def _load_config(path: Path, policy: FilePolicy) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise AdapterError(
            f"{path_text(path)} is missing: without it rank and alpha, so the scale, are unknown."
        )
    with open_regular(path, policy) as (file, num_bytes):
        if num_bytes > policy.max_config_bytes:
            raise AdapterError(
                f"{path_text(path)} has {num_bytes:,} bytes, over the limit of "
                f"{policy.max_config_bytes:,} (FilePolicy.max_config_bytes)."
            )
        with readable(path_text(path)):
            raw = file.read(num_bytes)
        config = parse_json(raw, path_text(path))
    if not isinstance(config, dict):
        raise AdapterError(
            f"{path_text(path)} must hold a JSON object, got {type(config).__name__}."
        )
    return config


def _pickle_error(path: Path) -> AdapterError:
    return AdapterError(
        f"{path_text(path)} is a pickle file, which can run code when opened, so it is refused. "
        "Convert it where you trust it: load it with torch.load(..., weights_only=True) and save "
        f"it with safetensors.torch.save_file(tensors, '{WEIGHTS_FILE}')."
    )
