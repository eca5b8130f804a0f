"""Attention of one query token without copies of the cache for grouped heads.

transformers repeats keys and values once per query head of a group (before 5.23 also for a single
query token), which over a static cache costs more memory traffic than the attention itself. One
query token needs none of that: the query heads of a group are a matrix that meets their keys.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

#: Name under which the function is registered, and that configs carry while a decode step runs.
IMPLEMENTATION = "moegraft_sdpa"

_lock = threading.Lock()
#: id of a config -> how many decode steps run with it switched.
_switched: dict[int, int] = {}


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend like transformers' ``sdpa``; anything but one masked query token is left to it.

    Args:
        query: ``[B, heads, S, D]``; key and value ``[B, kv heads, L, D]``.
        attention_mask: ``[B, 1, S, L]``.

    Returns:
        ``[B, S, heads, D]``, and None for the weights.
    """
    batch, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    is_plain = (
        length == 1
        and heads > kv_heads
        and attention_mask is not None
        and attention_mask.shape[1] == 1
        and all(kwargs.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
    )
    if not is_plain:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        found: tuple[torch.Tensor, torch.Tensor | None] = plain(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    packed = query.reshape(batch, kv_heads, heads // kv_heads, -1)
    out = F.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(batch, 1, heads, -1), None


def may_group(model: Any) -> bool:
    """True when a model's attention is transformers' own ``sdpa`` with grouped heads."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if model.config.get_text_config(decoder=True)._attn_implementation != "sdpa":
        return False
    grouped = [m for m in model.modules() if getattr(m, "num_key_value_groups", 1) > 1]
    # A model with an attention function of its own has a registry of its own.
    registries = {
        id(getattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS", None))
        for module in grouped
    }
    return registries == {id(ALL_ATTENTION_FUNCTIONS)}


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Within the block the model's ``sdpa`` attention is :func:`grouped_sdpa`.

    Another thread that runs the model meanwhile gets the same results by the same function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config = model.config.get_text_config(decoder=True)
    with _lock:
        if not _switched.get(id(config)):
            AttentionInterface.register(IMPLEMENTATION, grouped_sdpa)
            AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
            config._attn_implementation = IMPLEMENTATION
        _switched[id(config)] = _switched.get(id(config), 0) + 1
    try:
        yield
    finally:
        with _lock:
            _switched[id(config)] -= 1
            if not _switched[id(config)]:
                del _switched[id(config)]
                config._attn_implementation = "sdpa"
