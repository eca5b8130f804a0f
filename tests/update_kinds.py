"""Updates of all kinds of tensors that there is a plan for: two layers of experts and a linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moegraft.adapters import (
    AdapterBank,
    AdapterSource,
    BoundAdapter,
    ModelSpec,
    ReadOptions,
    bind,
    check_bound,
)
from moegraft.adapters.update_plan import TensorKinds, UpdatePlan, make_plan
from moegraft.factors import TableLayout
from moegraft.sites import expert_site, linear_site

EXPERTS, HIDDEN, WIDTH, RANK = 12, 24, 20, 3
SITES = (
    expert_site("layers.0.mlp.experts", EXPERTS, HIDDEN, WIDTH),
    linear_site("layers.0.self_attn.q_proj", HIDDEN, HIDDEN),
    expert_site("layers.1.mlp.experts", EXPERTS, HIDDEN, WIDTH),
)
SPEC = ModelSpec(SITES)
CONFIG = {"r": RANK, "lora_alpha": 2 * RANK, "peft_version": "0.21.2"}
SIZES = {"gate_proj": (HIDDEN, WIDTH), "up_proj": (HIDDEN, WIDTH), "down_proj": (WIDTH, HIDDEN)}
Tensors = dict[str, torch.Tensor]


def bound(source: AdapterSource, options: ReadOptions | None) -> BoundAdapter:
    found = bind(source, SPEC, options)
    check_bound(found.report, SPEC)
    return found


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def linear(seed: int) -> Tensors:
    path = "layers.0.self_attn.q_proj"
    return {
        f"{path}.lora_A.weight": random(RANK, HIDDEN, seed=seed),
        f"{path}.lora_B.weight": random(HIDDEN, RANK, seed=seed + 1),
    }


def per_expert(seed: int, experts: int = EXPERTS) -> Tensors:
    return {
        f"layers.{layer}.mlp.experts.{expert}.{name}.lora_{leaf}.weight": random(
            *((RANK, sizes[0]) if leaf == "A" else (sizes[1], RANK)), seed=seed + expert + layer
        )
        for layer in range(2)
        for expert in range(experts)
        for name, sizes in SIZES.items()
        for leaf in "AB"
    } | linear(seed)


def per_projection(seed: int) -> Tensors:
    return {
        f"layers.1.mlp.experts.{name}.lora_{leaf}.weight": random(
            EXPERTS, *((RANK, sizes[0]) if leaf == "A" else (sizes[1], RANK)), seed=seed
        )
        for name, sizes in SIZES.items()
        for leaf in "AB"
    } | linear(seed)


def fused(seed: int) -> Tensors:
    path, e = "layers.0.mlp.experts", EXPERTS
    return {
        f"{path}.base_layer.lora_A.weight": random(e * RANK, HIDDEN, seed=seed),
        f"{path}.base_layer.lora_B.weight": random(2 * WIDTH, RANK * e, seed=seed),
        f"{path}.lora_A.weight": random(e * RANK, WIDTH, seed=seed),
        f"{path}.lora_B.weight": random(HIDDEN, RANK * e, seed=seed + 1),
    }


def swapped(seed: int) -> Tensors:
    path, e = "layers.0.mlp.experts", EXPERTS
    return {
        f"{path}.base_layer.lora_A.weight": random(e * RANK, 2 * WIDTH, seed=seed),
        f"{path}.base_layer.lora_B.weight": random(HIDDEN, RANK * e, seed=seed),
    }


def mixed(seed: int) -> Tensors:
    return {
        name: tensor.bfloat16() if "layers.1" in name else tensor
        for name, tensor in per_expert(seed).items()
    }


KINDS: dict[str, Callable[[int], Tensors]] = {
    "per_expert": per_expert,
    "some experts": lambda seed: per_expert(seed, experts=11),
    "per_projection": per_projection,
    "fused": fused,
    "swapped": swapped,
    "mixed dtypes": mixed,
    "linear": linear,
}


def new_bank(
    dtype: torch.dtype = torch.float32,
    slots: int = 2,
    device: str = "cpu",
    arena_bytes: int | None = None,
) -> AdapterBank:
    return AdapterBank(
        SITES, num_slots=slots, max_rank=16, dtype=dtype, device=device, arena_bytes=arena_bytes
    )


def plan_of(tensors: Tensors, bank: AdapterBank, config: Any = None) -> UpdatePlan:
    kinds = TensorKinds.of(tensors)
    assert kinds is not None
    plan = make_plan(kinds, config or CONFIG, None, bound, bank.layout, bank.dtype)
    assert plan is not None, "there is no plan for these"
    return plan


def shuffled(tensors: Tensors) -> Tensors:
    """The same tensors, each in memory of its own, in another order."""
    names = sorted(tensors, key=lambda name: name[::-1])
    return {name: tensors[name].clone() for name in names}


#: Rank, in and out of experts, few of them multiples of what is copied at once.
ODD_SIZES = [(1, 24, 40), (2, 33, 7), (3, 300, 36), (4, 16, 24), (5, 17, 264), (8, 1032, 520)]
ODD_SIZES += [(12, 8, 48), (16, 36, 260), (24, 40, 9), (36, 72, 130), (70, 24, 66)]
FORMS = ["per projection", "fused", "swapped"]


def experts_of(
    rank: int, num_in: int, num_out: int, dtype: torch.dtype, form: str, experts: int = 3
) -> Tensors:
    """Factors of experts, ``num_out`` the hidden size: stacked, or entries side by side."""
    path, shape_a = "layers.0.experts", (experts * rank, num_in)
    if form == "per projection":
        path = f"{path}.down_proj"
        a, b = torch.randn(experts, rank, num_in), torch.randn(experts, num_out, rank)
    else:
        if form == "swapped":  # of gate_up [in, out]: B's rows are halves of A's
            path, shape_a = f"{path}.base_layer", (experts * rank, 2 * num_in)
        a, b = torch.randn(shape_a), torch.randn(num_out, rank * experts)
    return {f"{path}.lora_A.weight": a.to(dtype), f"{path}.lora_B.weight": b.to(dtype)}


def experts_plan(tensors: Tensors, num_in: int, num_out: int, dtype: torch.dtype) -> UpdatePlan:
    """Return how :func:`experts_of` become a packed adapter."""
    sites = (expert_site("layers.0.experts", 3, num_out, num_in),)
    spec, layout, kinds = ModelSpec(sites), TableLayout.of(sites), TensorKinds.of(tensors)
    assert kinds is not None
    plan = make_plan(kinds, CONFIG, None, lambda s, o: bind(s, spec, o), layout, dtype)
    assert plan is not None, "there is no plan for these"
    return plan


def shifted(tensors: Tensors, offset: int, device: str = "cpu") -> Tensors:
    """The same values ``offset`` values behind a multiple of 16 bytes, with NaN around them."""
    moved = {}
    for name, tensor in tensors.items():
        flat = torch.full((tensor.numel() + 32,), torch.nan, dtype=tensor.dtype, device=device)
        assert flat.data_ptr() % 16 == 0
        moved[name] = flat[offset : offset + tensor.numel()].view(tensor.shape)
        moved[name].copy_(tensor)
    return moved
