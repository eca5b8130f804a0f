"""vLLM's modular MoE method, which keeps moegraft's experts over a reload of weights."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import fused_moe_modular_method as stock

from moegraft.hosts.vllm.experts import MoegraftExperts


class ModularMethod(stock.FusedMoEModularMethod):
    """vLLM's own, with another look after weights are processed.

    From 0.33 on vLLM may make a new kernel object then, with its own experts in it. They are
    replaced again, with the table and the context of those before.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Process, then keep the experts that served before."""
        before = self.moe_kernel.fused_experts
        super().process_weights_after_loading(layer)
        now = self.moe_kernel.fused_experts
        if isinstance(before, MoegraftExperts) and type(now) is type(before.stock):
            self.moe_kernel.impl.fused_experts = before.renewed(now)
