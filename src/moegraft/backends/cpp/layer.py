"""A whole MoE layer as one call of the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.backends.cpp.library import (
    ACTIVATIONS,
    DTYPES,
    ORDERS,
    LayerStruct,
    Library,
    TableStruct,
    WeightsStruct,
)
from moegraft.backends.cpu import check_not_captured
from moegraft.call import LayerCall
from moegraft.errors import MoegraftError
from moegraft.factor_table import SiteTable


@dataclass(frozen=True)
class CompiledLayer:
    """Runs layer calls.

    Attributes:
        library: whose functions.
    """

    library: Library

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """Run a checked call; see :class:`moegraft.call.LayerRun`."""
        weights, x = call.weights, unit_columns(call.x_TH)
        out = call.out
        direct = (
            out is not None and out.stride(1) == 1 and out.dtype == x.dtype and not out.is_neg()
        )
        result = out if out is not None and direct else torch.empty(x.shape, dtype=x.dtype)
        ids = call.topk_ids.contiguous()
        topk_weights = call.topk_weights.to(torch.float32).contiguous().resolve_neg()
        activation = weights.activation
        arguments = LayerStruct(
            x=x.data_ptr(),
            x_dtype=DTYPES[x.dtype],
            x_stride=x.stride(0),
            topk_ids=ids.data_ptr(),
            wide_ids=ids.dtype == torch.int64,
            topk_weights=topk_weights.data_ptr(),
            out=result.data_ptr(),
            out_stride=result.stride(0),
            num_tokens=ids.shape[0],
            top_k=ids.shape[1],
            num_experts=weights.num_experts,
            hidden=weights.hidden,
            intermediate=weights.intermediate,
            expert_offset=call.expert_offset,
            gate_up=_weights(weights.gate_up_oi, weights.gate_up_bias),
            down=_weights(weights.down_oi, weights.down_bias),
            order=ORDERS[weights.layout.gate_up_order],
            activation=ACTIVATIONS[activation.kind],
            limited=activation.limit is not None,
            limit=activation.limit or 0.0,
            alpha=activation.alpha if activation.kind == "silu" else 1.0,
            up_shift=activation.up_shift,
            scale=call.scale,
            threads=torch.get_num_threads(),
        )
        arena = None
        if call.lora:
            assert call.table is not None and call.slots is not None
            check_not_captured(call.slots)
            arena = call.table.arena.data
            arguments.slots = call.slots.slots.data_ptr()
            arguments.table = table_struct(call.table, arena)
        self.library.layer(arguments)
        del arena  # until here: a bank that grows meanwhile lets go of it
        return result if out is None or direct else out.copy_(result)


def unit_columns(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose rows lie in memory as they are; a copy where they do not."""
    return (x if x.stride(1) == 1 else x.contiguous()).resolve_neg()


def _weights(weight_oi: torch.Tensor, bias: torch.Tensor | None) -> WeightsStruct:
    if weight_oi.is_neg() or (bias is not None and bias.is_neg()):
        raise MoegraftError(
            "The experts' weights are a view that torch negates when it is read, which the "
            "compiled kernels do not see: pass weight.resolve_neg()."
        )
    found = WeightsStruct(weight_oi.data_ptr(), DTYPES[weight_oi.dtype], *weight_oi.stride())
    if bias is not None:
        found.bias, found.bias_dtype = bias.data_ptr(), DTYPES[bias.dtype]
        found.bias_expert_stride, found.bias_stride = bias.stride()
    return found


def table_struct(table: SiteTable, arena: torch.Tensor) -> TableStruct:
    """Describe a site's table, for one call: the arena may move between two.

    The caller holds ``arena``, the table's data, until the call is over: a bank that grows in
    another thread lets go of it, and the library knows its address alone.
    """
    records, expert_map = table.records, table.expert_map
    found = TableStruct(records=records.data_ptr(), slot_words=records.stride(0))
    if expert_map is not None:
        found.expert_map, found.map_stride = expert_map.data_ptr(), expert_map.stride(0)
    found.arena, found.dtype = arena.data_ptr(), DTYPES[arena.dtype]
    return found
