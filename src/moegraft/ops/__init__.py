"""The layer as functions on tensors, for engines that keep routing, slots and memory themselves.

:func:`moe_lora` is the whole layer. :func:`routed_moe_lora` is the base layer with a delta of gate
and up that the caller computed; :func:`finalize_moe_lora` and :func:`add_down_delta` add that of
down. :func:`choose_experts` makes ids and weights of a router's logits. ``docs/ops.md`` has
arguments, shapes and an example. All work on CPU and CUDA tensors and inside ``torch.compile``, as
operators ``torch.ops.moegraft.*`` that write to their outputs.
"""

from moegraft.ops.activation_types import ActivationLike
from moegraft.ops.block_scale import (
    fp4_block_scale_routed_moe_lora,
    fp8_block_scale_routed_moe_lora,
)
from moegraft.ops.choose import choose_experts, choose_experts_packed
from moegraft.ops.finalize import add_down_delta, finalize_moe_lora
from moegraft.ops.moe_lora import moe_lora
from moegraft.ops.pack import pack_topk, unpack_topk
from moegraft.ops.routed import routed_moe_lora
from moegraft.ops.routed_core import UnfinalizedRows

__all__ = [
    "ActivationLike",
    "UnfinalizedRows",
    "add_down_delta",
    "choose_experts",
    "choose_experts_packed",
    "finalize_moe_lora",
    "fp4_block_scale_routed_moe_lora",
    "fp8_block_scale_routed_moe_lora",
    "moe_lora",
    "pack_topk",
    "routed_moe_lora",
    "unpack_topk",
]
