"""Factors of linears as vLLM read them: each must have a module, a partner and the right size."""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from moegraft.errors import AdapterError, shorten


def check_linears(manager: Any, lora: Any) -> None:
    """Raise unless every factor of ``lora`` fits the place it would be copied to.

    Args:
        manager: vLLM's LoRA manager, which knows the model's modules.
        lora: vLLM's ``LoRAModel``, before factors are merged.

    Raises:
        AdapterError: a factor for a module that the model lacks, A without B, a rank over the
            engine's, or other sizes than the module's.
    """
    unknown = [name for name in lora.loras if _place(manager, name) is None]
    if unknown and not _may_be_elsewhere(manager):
        raise AdapterError(
            f"the model has no {shorten(unknown)}, so these factors would do nothing. Was it "
            "trained for another model?"
        )
    for name, weights in lora.loras.items():
        for leaf, tensor in (("lora_A", weights.lora_a), ("lora_B", weights.lora_b)):
            if tensor is None:
                raise AdapterError(f"{name} has no {leaf}, only its partner.")
        _check_pair(manager, name, tuple(weights.lora_a.shape), tuple(weights.lora_b.shape))


def _may_be_elsewhere(manager: Any) -> bool:
    """Return True when a module may be missing here for a good reason."""
    restricted = getattr(manager.lora_config, "target_modules", None) is not None
    return restricted or manager.is_pooling_model or get_pp_group().world_size > 1


def _place(manager: Any, name: str) -> tuple[Any, int] | None:
    """Return the wrapper of a module and which of its slices it is; None = no such module."""
    if name in manager.modules:
        return manager.modules[name], 0
    for packed, parts in manager.packed_modules.items():
        if name in parts and packed in manager.modules:
            return manager.modules[packed], parts.index(name)
    return None


def _check_pair(manager: Any, name: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise AdapterError(f"{name}: A {a} and B {b} are not [r, in] and [out, r].")
    limit = manager.lora_config.max_lora_rank
    if a[0] > limit:
        raise AdapterError(
            f"{name}: rank {a[0]} is over the engine's {limit}; start it with a --max-lora-rank "
            f"of at least {a[0]}."
        )
    place = _place(manager, name)
    if place is None:
        return
    wrapper, index = place
    if not isinstance(wrapper, BaseLinearLayerWithLoRA) or wrapper.tp_size > 1:
        return  # split over ranks, or no linear: vLLM checks those when it copies
    slices = len(wrapper.lora_b_stacked)
    parts = next((p for q, p in manager.packed_modules.items() if name in p), [name])
    if slices != len(parts):
        return
    sizes = (wrapper.lora_a_stacked[index].shape[-1], wrapper.lora_b_stacked[index].shape[2])
    if (a[1], b[0]) != sizes:
        raise AdapterError(
            f"{name}: the factors are for {a[1]} inputs and {b[0]} outputs, the model has "
            f"{sizes[0]} and {sizes[1]}. Was it trained for another model?"
        )
