"""The experts of one layer: SGLang's call on moegraft's op, adapters read from SGLang's slots."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.distributed.device_communicators.pynccl_allocator import use_symmetric_memory
from sglang.srt.layers.dp_attention import is_allocation_symmetric
from sglang.srt.runtime_context import get_parallel

from moegraft.adapters.foreign import ForeignPool, stacked_pool
from moegraft.hosts.formula import Formula, WeightsInPlace
from moegraft.hosts.sglang.counters import count, counters
from moegraft.ops import moe_lora
from moegraft.sites import Site, expert_site
from moegraft.types import TokenSlots

logger = logging.getLogger("sglang.srt.moegraft")


class Experts:
    """What a wrapper needs to run on moegraft.

    Attributes:
        site: the experts of this rank.
        pool: the table over SGLang's slot tensors, once they exist.
    """

    def __init__(self, wrapper: Any, formula: Formula) -> None:
        base = wrapper.base_layer
        self.site: Site = expert_site(
            base.layer_name or f"layers.{base.layer_id}.experts",
            base.num_local_experts,
            base.hidden_size,
            base.intermediate_size_per_partition,
            formula.layout,
        )
        self.pool: ForeignPool | None = None
        self._weights = WeightsInPlace(formula)

    def set_buffers(
        self,
        gate_up_a: torch.Tensor,
        gate_up_b: torch.Tensor,
        down_a: torch.Tensor,
        down_b: torch.Tensor,
    ) -> None:
        """Make the table over the slot tensors, see :mod:`moegraft.hosts.sglang.pools`."""
        a = gate_up_a.split(gate_up_b.shape[3], dim=2)
        width = self.site.projection("up").out_features
        columns = [self.site.layout.columns(p.name, width) for p in self.site.projections[:-1]]
        b = [gate_up_b[:, :, part] for part in columns]
        self.pool = stacked_pool(self.site, a, b, down_a, down_b)
        if self.pool.device.type != "cpu":
            self.pool.expect_adapters()  # graphs are captured before adapters come

    def run(
        self, wrapper: Any, x: torch.Tensor, topk_output: Any, slots: TokenSlots | None
    ) -> torch.Tensor:
        """Return the weighted sum over each token's experts, ``[T, H]``."""
        assert self.pool is not None
        config, info = wrapper.moe_runner_config, wrapper._quant_info
        weights = topk_output.topk_weights
        if config.apply_router_weight_on_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        with use_symmetric_memory(get_parallel().tp_group, disabled=not is_allocation_symmetric()):
            out = torch.empty_like(x)
        if slots is not None and not self.pool.table.has_delta(slots):
            slots = None
        moe_lora(
            x,
            topk_output.topk_ids,
            weights,
            self._weights.of(info.w13_weight, info.w2_weight, info.b13, info.b2),
            self.pool.table,
            slots,
            routed_scaling_factor=config.routed_scaling_factor or 1.0,
            out=out,
        )
        count("expert_calls")
        if slots is not None:
            if not counters()["expert_calls_with_adapters"]:
                logger.info("moegraft runs experts with adapters from now on.")
            count("expert_calls_with_adapters")
        return out
