"""What the tests of the layer on the CPU backend share."""

from __future__ import annotations

import torch

import moegraft.backends.cpu as cpu
from moegraft.backends.cpp.layer import CompiledLayer
from moegraft.sites import Site
from moegraft.testing import LayerCase, assert_case, random_factors
from moegraft.types import SiteFactors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(case: LayerCase, lora_method: str) -> None:
    """Check a case, and that the fixture ``lora_method`` really picked the method."""
    layer = case.layer()
    plan = layer.plan(*case.routing.topk_ids.shape)
    if lora_method == "compiled":
        assert plan.backend == "cpp" and isinstance(plan.run, CompiledLayer)
    else:
        assert isinstance(plan.stages, cpu.CpuStages) and plan.stages.lora_method == lora_method
    assert_case(case, layer)


def mixed_adapters(site: Site, dtype: torch.dtype) -> list[SiteFactors | None]:
    """An empty slot, every kind at several ranks, a subset of experts in another order."""
    return [
        None,
        random_factors(site, 3, "fused", scale=0.25, seed=1, dtype=dtype),
        random_factors(site, 12, "separate", experts=[4, 0, 2], scale=8.0, seed=2, dtype=dtype),
        random_factors(site, 3, "separate", seed=3, dtype=dtype),
        random_factors(site, 16, "shared_outer", seed=4, dtype=dtype),
    ]
