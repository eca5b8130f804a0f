"""Layers in vLLM's shapes, with vLLM's own objects around them, and its formula in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from vllm.config.lora import LoRAConfig
from vllm.lora.layers.utils import LoRAMapping
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from moegraft.adapters.foreign import ForeignPool, stacked_pool
from moegraft.hosts.slot_tensors import rank_major
from moegraft.hosts.vllm.experts import MoegraftExperts
from moegraft.hosts.vllm.formulas import formula
from moegraft.hosts.vllm.punica import PunicaWrapperCPU, PunicaWrapperGPU
from moegraft.sites import expert_site

#: The same file runs on a GPU, with the kernels.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, K, E, H, WIDTH, R, S = 9, 2, 6, 64, 32, 8, 3
RANKS = (8, 3, 0)
IDS = (11, 12, None)  # vLLM's numbers of the adapters in the slots
TOKENS = (11, 0, 12, 12, 0, 11, 11, 0, 12)


@dataclass
class Case:
    """One layer: weights, slot tensors, and a batch. Biases, scores and rows are all random."""

    name: str
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None
    w13_a: tuple[torch.Tensor, ...]
    w13_b: tuple[torch.Tensor, ...]
    w2_a: torch.Tensor
    w2_b: torch.Tensor
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def gated(self) -> bool:
        """True with a gate."""
        return not self.name.endswith("no_mul")


def make_case(
    name: str,
    slices: int = 2,
    biases: bool = False,
    outer: bool = False,
    experts: int = E,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Make a case; past a slot's rank the slot tensors are 0, as vLLM leaves them."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)

    def slots(entries: int, num_out: int, num_in: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = random(S, entries, R, num_in), random(S, entries, num_out, R)
        for slot, rank in enumerate(RANKS):
            a[slot, :, rank:] = 0
            b[slot, :, :, rank:] = 0
        return a, b

    gated = not name.endswith("no_mul")
    wide = WIDTH * (2 if gated else 1)
    one = 1 if outer else experts
    sides = [slots(experts, wide if slices == 1 else WIDTH, H) for _ in range(slices)]
    w2_a, w2_b = slots(experts, H, WIDTH)
    return Case(
        name,
        random(experts, wide, H),
        random(experts, H, WIDTH),
        random(experts, wide) if biases else None,
        random(experts, H) if biases else None,
        tuple(a[:, :one].contiguous() for a, _ in sides),
        tuple(b for _, b in sides),
        w2_a,
        w2_b[:, :one].contiguous(),
        random(T, H, scale=1.0),
        torch.randint(0, experts, (T, K), generator=generator, dtype=torch.int32).to(DEVICE),
        torch.rand(T, K, generator=generator).to(DEVICE),
    )


def activate(name: str, packed: torch.Tensor) -> torch.Tensor:
    """vLLM's activation of one row, ``[2I]`` or ``[I]``."""
    if name == "relu2_no_mul":
        return F.relu(packed).square()
    if name == "silu_no_mul":
        return F.silu(packed)
    if name == "swigluoai":
        gate, up = packed[0::2].clamp(max=7.0), packed[1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = packed.chunk(2)
    if name == "swigluoai_uninterleave":
        gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
        return (up + 0.5) * gate * torch.sigmoid(1.5 * gate)
    function = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    }
    return function[name](gate) * up


def expected(case: Case, on_input: bool = False, base: bool = False) -> torch.Tensor:
    """vLLM's formula, one pair at a time, in fp64; -1 contributes nothing."""
    out = torch.zeros(T, H, dtype=torch.float64)
    wide = {
        name: value.double().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in vars(case).items()
    }
    w13_a = [a.double().cpu() for a in case.w13_a]
    w13_b = [b.double().cpu() for b in case.w13_b]
    for t in range(T):
        slot = IDS.index(TOKENS[t]) if TOKENS[t] and not base else -1
        for k in range(K):
            e = int(case.ids[t, k])
            if e < 0:
                continue
            x = wide["x"][t]
            packed = wide["w13"][e] @ x
            if wide["b13"] is not None:
                packed = packed + wide["b13"][e]
            if slot >= 0:
                packed = packed + delta13(case, w13_a, w13_b, slot, e, x)
            h = activate(case.name, packed)
            y = wide["w2"][e] @ h
            if wide["b2"] is not None:
                y = y + wide["b2"][e]
            if slot >= 0:
                b = wide["w2_b"][slot, e if wide["w2_b"].shape[1] > 1 else 0]
                y = y + b @ (wide["w2_a"][slot, e] @ h)
            out[t] += y * (1.0 if on_input else float(case.weights[t, k]))
    return out


def delta13(
    case: Case,
    w13_a: list[torch.Tensor],
    w13_b: list[torch.Tensor],
    slot: int,
    e: int,
    x: torch.Tensor,
) -> torch.Tensor:
    """The delta of gate and up, in the order of the weights' columns."""
    parts = [
        b[slot, e] @ (a[slot, e if a.shape[1] > 1 else 0] @ x)
        for a, b in zip(w13_a, w13_b, strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    if case.name == "swigluoai":
        return torch.stack(parts, 1).flatten()
    return torch.cat(parts)


def make_experts(
    case: Case, expert_map: torch.Tensor | None = None, global_experts: int | None = None
) -> MoegraftExperts:
    """Put moegraft's class in place of vLLM's, with vLLM's context for a batch."""
    local = case.w2.shape[0]
    extra = {"gemm1_clamp_limit": 2.0, "gemm1_alpha": 1.5, "gemm1_beta": 0.5}
    quant = FusedMoEQuantConfig.make(
        w1_bias=case.b13,
        w2_bias=case.b2,
        **(extra if case.name == "swigluoai_uninterleave" else {}),
    )
    config = FusedMoEConfig(
        num_experts=global_experts or local,
        experts_per_token=K,
        hidden_dim=H,
        intermediate_size=WIDTH,
        num_local_experts=local,
        num_logical_experts=global_experts or local,
        # vLLM takes no experts without a gate on the CPU; the class itself does not look here.
        activation=MoEActivation(case.name if case.gated else "silu"),
        device=DEVICE,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=case.x.dtype,
        is_lora_enabled=True,
    )
    stock = TritonExperts(config, quant)
    found = formula(case.name, stock)
    assert found is not None
    pool = make_pool(case, found.layout)
    experts = MoegraftExperts(stock, found, pool.table, expert_map)
    experts.set_lora_context(context(case))
    return experts


def make_pool(case: Case, layout: Any) -> ForeignPool:
    """The slot tensors, B stored as the wrappers store it."""
    case.w13_b = tuple(rank_major(b).copy_(b) for b in case.w13_b)
    case.w2_b = rank_major(case.w2_b).copy_(case.w2_b)
    site = expert_site("experts", case.w2.shape[0], H, WIDTH, layout)
    pool = stacked_pool(site, case.w13_a, case.w13_b, case.w2_a, case.w2_b)
    if DEVICE != "cpu":
        pool.expect_adapters()
    for slot, rank in enumerate(RANKS):
        if rank:
            pool.load(slot, rank)
    return pool


def context(case: Case) -> MoELoRAContext:
    """vLLM's context, with its metadata for :data:`TOKENS`."""
    lora = LoRAConfig(max_lora_rank=R, max_loras=S, lora_dtype=case.x.dtype)
    return MoELoRAContext(
        w13_lora_a_stacked=case.w13_a,
        w13_lora_b_stacked=case.w13_b,
        w2_lora_a_stacked=(case.w2_a,),
        w2_lora_b_stacked=(case.w2_b,),
        adapter_enabled=torch.tensor([1, 1, 0, 0], dtype=torch.int32, device=DEVICE),
        max_loras=S,
        top_k=K,
        w13_num_slices=len(case.w13_a),
        fully_sharded=False,
        tp_rank=0,
        tp_size=1,
        local_num_experts=case.w2.shape[0],
        punica_wrapper=make_punica(lora),
        use_tuned_config=False,
    )


def make_punica(lora: LoRAConfig) -> Any:
    """vLLM's metadata object of this device, with :data:`TOKENS`."""
    wrapper_class = PunicaWrapperCPU if DEVICE == "cpu" else PunicaWrapperGPU
    punica = wrapper_class(64, max_batches=T, device=torch.device(DEVICE), lora_config=lora)
    set_tokens(punica, TOKENS)
    return punica


def set_tokens(punica: Any, tokens: tuple[int, ...]) -> None:
    """Tell the metadata which adapter each token has."""
    punica.update_metadata(LoRAMapping(tokens, tokens, True), list(IDS), S + 1, 512)


def run(
    experts: MoegraftExperts,
    case: Case,
    expert_map: torch.Tensor | None = None,
    on_input: bool = False,
) -> torch.Tensor:
    """Call ``apply`` as vLLM's kernel object does; the output begins as NaN."""
    shapes = experts.workspace_shapes(
        T, case.w13.shape[1], H, K, E, case.w2.shape[0], None, MoEActivation(case.name)
    )
    scratch = [torch.empty(shape, dtype=case.x.dtype, device=DEVICE) for shape in shapes]
    scratch[2].fill_(torch.nan)
    experts.apply(
        output=scratch[2],
        hidden_states=case.x,
        w1=case.w13,
        w2=case.w2,
        topk_weights=case.weights,
        topk_ids=case.ids,
        activation=MoEActivation(case.name),
        global_num_experts=E,
        expert_map=expert_map,
        a1q_scale=None,
        a2_scale=None,
        workspace13=scratch[0],
        workspace2=scratch[1],
        expert_tokens_meta=None,
        apply_router_weight_on_input=on_input,
    )
    return scratch[2]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error."""
    return float((found.double().cpu() - wanted).norm() / wanted.norm())
