"""Factors of experts, from an adapter's file to what vLLM's wrappers copy into a slot.

A wrapper takes lists of A ``[E or 1, r, in]`` and B ``[E or 1, out, r]``, scale multiplied in: for
gate, down and up, or for gate and up together and down. 1 in place of E is one factor for all
experts, rank 0 no factor. E counts the experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.lora.layers import fused_moe as stock
from vllm.lora.lora_weights import PackedLoRALayerWeights

from moegraft.adapters import AdapterSource, ModelSpec, bind, check_bound
from moegraft.errors import AdapterError
from moegraft.hosts.vllm.counters import count
from moegraft.sites import Site, expert_site
from moegraft.types import LoraFactor, SiteFactors, WeightLayout


def experts_layers(manager: Any) -> dict[str, Any]:
    """Return module name -> wrapper of all experts layers; empty unless moegraft serves each."""
    wrappers = {
        name: module
        for name, module in manager.modules.items()
        if isinstance(module, stock.FusedMoEWithLoRA)
    }
    served = all(getattr(w, "_moegraft_pool", None) is not None for w in wrappers.values())
    return wrappers if served else {}


def bind_experts(
    manager: Any, source: AdapterSource, dtype: torch.dtype
) -> dict[str, PackedLoRALayerWeights]:
    """Return module name -> what vLLM registers for it.

    Raises:
        AdapterError: a tensor without a place, of the wrong size, or of a rank over the engine's.
    """
    layers = experts_layers(manager)
    spec = ModelSpec(tuple(_site(name, wrapper) for name, wrapper in layers.items()))
    source = _of_this_rank(source, spec)
    if not source.tensors:
        return {}
    bound = bind(source, spec)
    check_bound(bound.report, spec)
    if bound.report.max_rank > manager.lora_config.max_lora_rank:
        raise AdapterError(
            f"{source.origin}: rank {bound.report.max_rank} of its experts is over the engine's "
            f"{manager.lora_config.max_lora_rank}; start it with a --max-lora-rank "
            f"of at least {bound.report.max_rank}."
        )
    if any(not _complete(site, bound.factors[site.name]) for site in _used(spec, bound.factors)):
        count("adapters_completed")
    return {
        site.name: _packed(site, layers[site.name], bound.factors[site.name], dtype)
        for site in _used(spec, bound.factors)
    }


def _used(spec: ModelSpec, factors: Any) -> list[Site]:
    return [site for site in spec.sites if site.name in factors]


def _complete(site: Site, factors: SiteFactors) -> bool:
    all_experts = factors.expert_map is None or bool((factors.expert_map >= 0).all())
    return all_experts and len(factors.projections) == len(site.projections)


def _site(name: str, wrapper: Any) -> Site:
    """Return the whole site, over all ranks, in the order of the model's checkpoint."""
    config, order = wrapper.moe_config, wrapper._moegraft_formula.layout.gate_up_order
    hidden = getattr(config, "hidden_dim_unpadded", None) or wrapper.hidden_size
    width = (
        getattr(config, "intermediate_size_per_partition_unpadded", None)
        or wrapper.intermediate_size_per_partition
    )
    # Checkpoints with interleaved gate and up (gpt_oss) are [E, in, out].
    layout = WeightLayout(order, out_major=order != "interleaved")
    return expert_site(name, wrapper.global_num_experts, hidden, width * wrapper.tp_size, layout)


def _of_this_rank(source: AdapterSource, spec: ModelSpec) -> AdapterSource:
    """Leave out the layers of other pipeline ranks."""
    if get_pp_group().world_size == 1:
        return source
    here = {
        key: tensor
        for key, tensor in source.tensors.items()
        if spec.resolve_experts(source.keys[key].module.partition(".experts")[0] + ".experts")
    }
    return replace(source, tensors=here, keys={key: source.keys[key] for key in here})


@dataclass(frozen=True)
class _Pair:
    """A ``[E or 1, r, in]`` and B ``[E or 1, out, r]`` of one projection, scaled, of this rank."""

    a: torch.Tensor
    b: torch.Tensor


def _packed(
    site: Site, wrapper: Any, factors: SiteFactors, dtype: torch.dtype
) -> PackedLoRALayerWeights:
    pairs: dict[str, _Pair] = {}
    known_a: dict[int, torch.Tensor] = {}
    for projection in site.projections:
        factor = factors.projections.get(projection.name)
        if factor is None:
            empty_a = torch.zeros(1, 0, projection.in_features, dtype=dtype)
            empty_b = torch.zeros(1, projection.out_features, 0, dtype=dtype)
            pairs[projection.name] = _Pair(empty_a, empty_b)
        else:
            pairs[projection.name] = _pair(wrapper, factor, factors.expert_map, dtype, known_a)
    if wrapper.enable_moe_shared_loras:
        _check_outer_are_shared(site, pairs)
    sides = _three_dimensional if isinstance(wrapper, stock.FusedMoE3DWithLoRA) else _per_side
    chosen = sides(site, pairs)
    rank = max(pair.a.shape[1] for pair in pairs.values())
    return PackedLoRALayerWeights(
        site.name,
        rank,
        [None] * len(chosen),
        [pair.a for pair in chosen],
        [pair.b for pair in chosen],
        scaling=[1] * len(chosen),
    )


def _pair(
    wrapper: Any,
    factor: LoraFactor,
    expert_map: torch.Tensor | None,
    dtype: torch.dtype,
    known_a: dict[int, torch.Tensor],
) -> _Pair:
    """Spread a factor over this rank's experts; B of those without one is 0."""
    if id(factor.lora_A) not in known_a:
        a = factor.lora_A  # one for all stays one: where B is 0 it does nothing
        a = a if a.shape[0] == 1 else _of_this_ranks_experts(wrapper, a, expert_map)
        a = a.to(dtype).contiguous()
        # vLLM pins each tensor by itself; one that is pinned stays the same object.
        known_a[id(factor.lora_A)] = a.pin_memory() if torch.cuda.is_available() else a
    b = factor.lora_B
    if b.shape[0] > 1 or expert_map is not None:
        b = _of_this_ranks_experts(wrapper, b, expert_map)
    b = (b.float() * factor.scale).to(dtype).contiguous()
    return _Pair(known_a[id(factor.lora_A)], b)


def _of_this_ranks_experts(
    wrapper: Any, matrix: torch.Tensor, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """Return ``[local experts, ..]`` of ``[entries, ..]``; 0 for experts without an entry."""
    first = wrapper.ep_rank * wrapper.local_num_experts
    mine = slice(first, first + wrapper.local_num_experts)
    if expert_map is None:
        return matrix[mine]
    entries = expert_map[mine].long()
    spread = matrix[entries.clamp(0, matrix.shape[0] - 1)]
    return torch.where((entries >= 0)[:, None, None], spread, torch.zeros_like(spread[:1]))


def _check_outer_are_shared(site: Site, pairs: dict[str, _Pair]) -> None:
    """Raise where the engine's slots have room for one outer factor, and the adapter has many."""
    outer = [pair.a for name, pair in pairs.items() if name != "down"] + [pairs["down"].b]
    if any(factor.shape[0] > 1 for factor in outer):
        raise AdapterError(
            f"{site.name}: the adapter has outer factors (A of gate and up, B of down) for each "
            "expert, but this engine was started with --enable-moe-shared-loras, which keeps one "
            "for all. Start it without: moegraft serves both kinds then."
        )


def _per_side(site: Site, pairs: dict[str, _Pair]) -> list[_Pair]:
    first = pairs["gate"] if site.gated else pairs["up"]
    return [first, pairs["down"], pairs["up"]]


def _three_dimensional(site: Site, pairs: dict[str, _Pair]) -> list[_Pair]:
    gate, up = pairs["gate"], pairs["up"]
    if gate.a is not up.a:
        raise AdapterError(
            f"{site.name}: gate and up have factors A of their own, but this engine keeps one for "
            "both; start it with --enable-mixed-moe-lora-format."
        )
    width = site.projection("up").out_features
    shape = (gate.b.shape[0], 2 * width, gate.b.shape[2])
    both = gate.b.new_empty(shape)
    both[:, site.layout.columns("gate", width)] = gate.b
    both[:, site.layout.columns("up", width)] = up.b
    return [_Pair(gate.a, both), pairs["down"]]
