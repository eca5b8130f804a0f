"""Where SGLang lets others in, and where it is opened: all hooks, in one place.

They go through SGLang's own registry, so its log lists them with this plugin's name, and hooks of
other plugins on the same functions chain with them.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from moegraft.env import sglang_linears

logger = logging.getLogger("sglang.srt.moegraft")
_LAYER = "sglang.srt.lora.layers.FusedMoEWithLoRA"
_POOL = "sglang.srt.lora.mem_pool.LoRAMemoryPool"
_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
_BACKEND = "sglang.srt.lora.backend.base_backend.BaseLoRABackend"
#: What is hooked -> the arguments that the hook reads by place or name.
SEAMS: dict[str, tuple[str, ...]] = {
    f"{_LAYER}.__init__": ("self", "base_layer", "lora_backend"),
    f"{_LAYER}._forward_with_lora": ("self", "hidden_states", "topk_output", "lora_info"),
    f"{_POOL}.init_buffers": ("self", "base_model"),
    f"{_POOL}.load_lora_weight_to_buffer": ("self", "uid", "buffer_id", "lora_adapter"),
    f"{_POOL}._clear_buffer_slot_for_base": ("self", "buffer_id"),
    f"{_MANAGER}.reset_routing_cache": ("self",),
    f"{_BACKEND}.forward_with_base": ("self", "layer", "x", "base_fn"),
}


def reason_against() -> str | None:
    """Return None when every seam is there with the arguments that are read, else what is not."""
    for target, wanted in SEAMS.items():
        try:
            function = pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            return f"SGLang has no {target} here ({error})"
        found = tuple(inspect.signature(function).parameters)
        if found[: len(wanted)] != wanted:
            return f"{target} takes {found}, not {wanted}"
    return None


def install() -> None:
    """Register the hooks; call once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moegraft.hosts.sglang import layers, linears, pools, steps

    hooks: dict[str, Callable[..., Any]] = {
        f"{_LAYER}.__init__": layers.after_init,
        f"{_LAYER}._forward_with_lora": layers.forward,
        f"{_POOL}.init_buffers": pools.init_buffers,
        f"{_POOL}.load_lora_weight_to_buffer": pools.load,
        f"{_POOL}._clear_buffer_slot_for_base": pools.clear,
        f"{_MANAGER}.reset_routing_cache": steps.forget_slots,
        f"{_BACKEND}.forward_with_base": linears.forward_with_base,
    }
    assert set(hooks) == set(SEAMS)
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    logger.info(
        "moegraft is active: MoE layers%s with LoRA run on it.",
        " and their models' linears" if sglang_linears() else "",
    )
