"""SGLang's memory pool: slot tensors stored rank-major, and what each slot holds.

The pool owns, for each layer, A of gate and up ``[S, E or 1, 2R, H]`` (gate's rows first, up's
from row R on, whatever an adapter's rank is; ``[.., R, H]`` without a gate), their B
``[S, E, 2I, R]``, A of down ``[S, E, R, I]`` and its B ``[S, E or 1, H, R]``.
``load_lora_weight_to_buffer`` overwrites a slot with one adapter, the scale multiplied into B,
zeros where the adapter has nothing. Factors B are kept rank-major here behind views of those
shapes: the kernels read whole rank rows, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moegraft.hosts.sglang import linears
from moegraft.hosts.sglang.counters import count
from moegraft.hosts.sglang.eligible import reason_against_buffers, say_why_not
from moegraft.hosts.slot_tensors import rank_major

_GATE_UP, _DOWN = "gate_up_proj_moe", "down_proj_moe"


def init_buffers(original: Callable[..., None], self: Any, base_model: Any) -> None:
    """Make the slot tensors, and tables over those of the layers that run on moegraft.

    Linears are taken over in models with such experts only: others have no slots per token.
    """
    original(self, base_model)
    for wrapper in served_layers(base_model):
        reason = reason_against_buffers(wrapper, self.A_buffer, self.dtype)
        if reason is not None:
            leave(wrapper, reason)
            continue
        layer = wrapper.base_layer.layer_id
        for name in (_GATE_UP, _DOWN):
            self.B_buffer[name][layer] = rank_major(self.B_buffer[name][layer])
        wrapper._moegraft.set_buffers(
            self.A_buffer[_GATE_UP][layer],
            self.B_buffer[_GATE_UP][layer],
            self.A_buffer[_DOWN][layer],
            self.B_buffer[_DOWN][layer],
        )
        count("expert_layers")
    if served_layers(base_model):
        linears.take_over(self, base_model)


def load(
    original: Callable[..., None],
    self: Any,
    uid: Any,
    buffer_id: int,
    lora_adapter: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Fill a slot, then tell the layers what it holds: nothing while it is half written."""
    _forget(self, buffer_id)
    original(self, uid, buffer_id, lora_adapter, *args, **kwargs)
    if uid is None:
        return
    for wrapper in served_layers(self.base_model):
        names = lora_adapter.layers[wrapper.base_layer.layer_id].weights
        ranks = _ranks(names, lora_adapter.config.r, wrapper._moegraft.pool.site.gated)
        wrapper._moegraft.pool.load(buffer_id, ranks)
    for linear in linears.linears(self.base_model):
        linear.load(buffer_id, lora_adapter, self.target_modules)
    count("slots_loaded")


def clear(original: Callable[..., None], self: Any, buffer_id: int) -> None:
    """Empty a slot."""
    original(self, buffer_id)
    _forget(self, buffer_id)


def _forget(self: Any, buffer_id: int) -> None:
    for wrapper in served_layers(self.base_model):
        wrapper._moegraft.pool.clear(buffer_id)
    for linear in linears.linears(self.base_model):
        linear.pool.clear(buffer_id)


def _ranks(names: Any, rank: int, gated: bool) -> dict[str, int]:
    """Return projection -> rank of one layer, by the names of an adapter's tensors for it.

    SGLang has one rank per adapter, and has put gate's and up's factors together by now.
    """
    experts = [name for name in names if ".experts." in name]
    sides = rank if any("gate_up_proj" in name for name in experts) else 0
    down = rank if any("down_proj" in name for name in experts) else 0
    return {**({"gate": sides} if gated else {}), "up": sides, "down": down}


def served_layers(base_model: Any) -> list[Any]:
    """Return SGLang's wrappers of experts that run on moegraft."""
    return [m for m in base_model.modules() if getattr(m, "_moegraft", None) is not None]


def leave(wrapper: Any, reason: str) -> None:
    """Leave a layer to SGLang from now on, with a line in the log."""
    base = wrapper.base_layer
    say_why_not(base.layer_name or f"layer {base.layer_id}", reason)
    wrapper._moegraft = None
    count("expert_layers_left")
