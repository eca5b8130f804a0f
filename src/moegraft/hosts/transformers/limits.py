"""What decoding on static memory can't do, and why: one reason as text, or None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moegraft.hosts.transformers import attention
from moegraft.hosts.transformers.sharding import is_distributed

#: Attention functions that take a 4-D mask over a static cache.
ATTENTION = ("sdpa", "eager")

#: Arguments of generate under which it does not decode one token per row, and why.
_OTHER_MODES = {
    "assistant_model": "assisted decoding checks several tokens at once",
    "prompt_lookup_num_tokens": "prompt lookup checks several tokens at once",
    "custom_generate": "the caller brings a decoding loop",
    "penalty_alpha": "contrastive search copies the cache",
    "dola_layers": "DoLa needs more than logits",
    "output_attentions": "the caller asks for attentions",
    "output_hidden_states": "the caller asks for hidden states",
    "output_router_logits": "the caller asks for router logits",
}


def why_not_called(default: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return why a call of generate can't use graphs, or None when it can.

    Args:
        default: the model's own generation config.
        args, kwargs: what generate is called with.
    """
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    configs = [config for config in (given, default) if config is not None]

    def setting(name: str) -> Any:
        found = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in found if value is not None), None)

    if kwargs.get("past_key_values") is not None:
        return "the caller brings a cache"
    if setting("use_cache") is False:
        return "use_cache is False"
    if (setting("num_beams") or 1) > 1:
        return "beam search reorders the cache"
    if setting("cache_implementation") not in (None, "static"):
        return f"cache_implementation is {setting('cache_implementation')!r}"
    for name, reason in _OTHER_MODES.items():
        if setting(name):
            return reason
    return None


def why_not_static(model: Any) -> str | None:
    """Return why a model can't decode on static memory, or None when it can."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    config = model.config.get_text_config(decoder=True)
    if is_distributed(model):
        return "the model is sharded over ranks"
    if model.config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    kind = config._attn_implementation
    if kind not in (*ATTENTION, attention.IMPLEMENTATION):
        return f"attention {kind!r} is not one of {', '.join(ATTENTION)}"
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        return f"the model is spread over {', '.join(sorted(devices))}"
    if getattr(config, "output_router_logits", False):
        return "the model is configured to return router logits"
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, Mapping) else [kinds]
        if any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds):
            return f"{path} changes its rotary frequencies as the text grows"
    try:
        layers = StaticCache(config=config, max_cache_len=8).layers
    except Exception as error:
        return f"it has no static cache ({error})"
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not StaticLayer})
    return f"its cache has layers of type {', '.join(others)}" if others else None


def why_not_step(inputs: dict[str, Any], fixed: dict[str, Any], max_length: int) -> str | None:
    """Return why one decode forward can't be held by a graph, or None when it can."""
    mask, positions = inputs["attention_mask"], inputs["position_ids"]
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return f"the attention mask of a step is no 4-D tensor but {_described(mask)}"
    if tuple(mask.shape[-2:]) != (1, max_length):
        return f"the attention mask of a step has shape {tuple(mask.shape)}"
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
        return f"the positions of a step are no 2-D tensor but {_described(positions)}"
    for name, value in fixed.items():
        if not isinstance(value, (bool, int, float, str)):
            return f"the model gets {name} ({_described(value)}) at every step"
    return None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def cache_bytes(model: Any, batch_size: int, max_length: int) -> int:
    """Return about how many bytes a static cache takes."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width
    return int(batch_size * max_length * per_token * model.dtype.itemsize)


def free_bytes(device: torch.device) -> int:
    """Return how many bytes a GPU still has for tensors."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)
