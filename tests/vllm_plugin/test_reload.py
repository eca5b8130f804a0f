"""Newer versions of vLLM make a new kernel object when weights are reloaded: ours must be in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_cases import error, expected, make_case, make_experts, run
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import fused_moe_modular_method as stock
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from moegraft.hosts.vllm.experts import MoegraftExperts
from moegraft.hosts.vllm.method import ModularMethod
from moegraft.hosts.vllm.plugin import register


def new_kernel(experts: Any) -> FusedMoEKernel:
    """vLLM's kernel object around experts of its own."""
    fresh = TritonExperts(experts.moe_config, experts.quant_config)
    return FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), fresh)


def as_in_0_33(self: Any, layer: Any) -> None:
    """What vLLM 0.33's method does: its experts, with the context of those before."""
    before = self.moe_kernel.fused_experts
    self.old_quant_method.moe_kernel = new_kernel(before)
    self.old_quant_method.moe_kernel.fused_experts.set_lora_context(before._lora_context)
    self.moe_kernel.impl = self.old_quant_method.moe_kernel.impl


@pytest.mark.parametrize("remakes", [True, False])
def test_experts_survive_a_reload_of_the_weights(
    remakes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    case = make_case("silu")
    experts = make_experts(case)
    if remakes:
        monkeypatch.setattr(
            stock.FusedMoEModularMethod, "process_weights_after_loading", as_in_0_33, raising=False
        )
    with set_current_vllm_config(VllmConfig()):
        quant_method = UnquantizedFusedMoEMethod(experts.moe_config)
        quant_method.moe_kernel = kernel = new_kernel(experts)
        kernel.impl.fused_experts = experts
        method = stock.FusedMoEModularMethod(quant_method, kernel)
    assert type(method) is ModularMethod
    before = run(experts, case)
    case.w2 = case.w2 * 2
    method.process_weights_after_loading(torch.nn.Module())
    now = method.moe_kernel.fused_experts
    assert isinstance(now, MoegraftExperts) and (now is not experts) == remakes
    after = run(now, case)
    assert error(after, expected(case)) < 1e-5 and not torch.equal(after, before)
