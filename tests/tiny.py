"""The tiny fixture models and the adapters that PEFT wrote for them, loaded once per process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from moegraft.adapters import (
    BoundAdapter,
    ModelSpec,
    ReadOptions,
    bind,
    check_bound,
    read_adapter,
)
from moegraft.hosts.transformers import model_spec
from moegraft.sites import Site
from moegraft.testing import assert_bit_equal
from moegraft.types import LoraFactor, SiteFactors

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
#: Cases that hold something which is not served.
REFUSED_CASES = (
    "peft/0.21.2/qwen3_moe/modules_to_save",
    "peft/0.21.2/qwen3_moe/embedding",
    "peft/0.21.2/gpt_oss/experts_and_biases",
)
#: Cases with DoRA or a bias of lora_B on linears: their deltas are not B A alone.
VECTOR_CASES = (
    "peft/0.21.2/qwen3_moe/dora_attention",
    "peft/0.21.2/qwen3_moe/lora_bias",
    "peft/0.21.2/gpt_oss/lora_bias",
)
ALL_CASES = tuple(
    sorted(str(p.parent.relative_to(FIXTURES)) for p in FIXTURES.rglob("oracle.safetensors"))
)
SERVED_CASES = tuple(c for c in ALL_CASES if c not in (*REFUSED_CASES, *VECTOR_CASES))
#: The plainest case, and a DoRA magnitude that PEFT would not write for its experts.
EXPERTS = "peft/0.21.2/qwen3_moe/experts"
MAGNITUDE = "base_model.model.model.layers.0.mlp.experts.lora_magnitude_vector"
_INPUTS = ("input_ids", "attention_mask", "logits")


def folder(case: str) -> Path:
    """The adapter folder of a case such as ``peft/0.21.2/qwen3_moe/experts``."""
    return FIXTURES / case


def model_of(case: str) -> str:
    """The name of the model that a case was made for."""
    return case.split("/")[-2]


def new_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A fresh base model that the caller may change."""
    model = AutoModelForCausalLM.from_pretrained(
        FIXTURES / "models" / name, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


@cache
def base_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A base model that nobody may change."""
    return new_model(name, dtype)


@cache
def spec_of(name: str) -> ModelSpec:
    """What a model offers to adapters."""
    return model_spec(base_model(name))


@cache
def tensors_of(case: str) -> dict[str, torch.Tensor]:
    """The tensors of a case's adapter file; copy the dict before changing it."""
    return load_file(folder(case) / "adapter_model.safetensors")


@cache
def _config_text(case: str) -> str:
    return (folder(case) / "adapter_config.json").read_text()


def config_of(case: str, **changes: Any) -> dict[str, Any]:
    """A case's adapter_config with some fields changed."""
    return {**json.loads(_config_text(case)), **changes}


@cache
def oracle_of(case: str) -> dict[str, torch.Tensor]:
    """The inputs, logits and merged parameters of a case."""
    return load_file(folder(case) / "oracle.safetensors")


def bound_case(case: str, options: ReadOptions | None = None) -> BoundAdapter:
    """A case bound to its own model; an error when any tensor is left."""
    spec = spec_of(model_of(case))
    bound = bind(read_adapter(folder(case)), spec, options)
    check_bound(bound.report, spec)
    return bound


def merged_parameters(case: str) -> dict[str, torch.Tensor]:
    """Name -> merged value of every parameter that the adapter changes."""
    return {key: value for key, value in oracle_of(case).items() if key not in _INPUTS}


@cache
def merged_model(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """The base model with the case's adapter merged into its weights by PEFT; read only."""
    model = new_model(model_of(case), dtype)
    for key, value in merged_parameters(case).items():
        module, _, leaf = key.rpartition(".")
        parameter = nn.Parameter(value.to(dtype), requires_grad=False)
        setattr(model.get_submodule(module), leaf, parameter)
    return model


def delta_of(factor: LoraFactor, factors: SiteFactors, num_experts: int) -> torch.Tensor:
    """``scale * B[e] @ A[e]`` of every expert, ``[E, out, in]``; zeros where there is none."""
    wide = factor.scale * (factor.lora_B.float() @ factor.lora_A.float())
    out = torch.zeros(num_experts, *wide.shape[1:])
    for expert in range(num_experts):
        entry = factors.entry(expert)
        if entry >= 0:
            out[expert] = wide[entry if wide.shape[0] > 1 else 0]
    return out


def weight_deltas(site: Site, factors: SiteFactors) -> dict[str, torch.Tensor]:
    """Parameter name -> delta in the host's own storage order, from canonical factors."""
    deltas = {
        name: delta_of(factor, factors, site.num_experts)
        for name, factor in factors.projections.items()
    }
    if site.kind != "experts":
        return {f"{site.name}.weight": deltas["linear"][0]}
    found: dict[str, torch.Tensor] = {}
    if "down" in deltas:
        found[f"{site.name}.down_proj"] = deltas["down"]
    sides = [side for side in ("gate", "up") if side in deltas]
    if sides:
        up = site.projection("up")
        rows = up.out_features * (2 if site.gated else 1)
        fused = torch.zeros(site.num_experts, rows, up.in_features)
        for side in sides:
            fused[:, site.layout.columns(side, up.out_features)] = deltas[side]
        found[f"{site.name}.{'gate_up_proj' if site.gated else 'up_proj'}"] = fused
    if site.layout.out_major:
        return found
    return {name: delta.transpose(1, 2) for name, delta in found.items()}


def all_deltas(bound: BoundAdapter, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Parameter name -> delta of everything an adapter was bound to."""
    found: dict[str, torch.Tensor] = {}
    for site in spec.sites:
        if site.name in bound.factors:
            found.update(weight_deltas(site, bound.factors[site.name]))
    return found


def parameter_of(name: str, key: str) -> torch.Tensor:
    """A parameter of an untouched base model."""
    value: torch.Tensor = base_model(name).get_parameter(key).detach()
    return value


def assert_same(first: BoundAdapter, second: BoundAdapter) -> None:
    """The same factors at the same sites."""
    assert set(first.factors) == set(second.factors)
    for name, factors in first.factors.items():
        for projection, factor in factors.projections.items():
            other = second.factors[name].projections[projection]
            assert_bit_equal(factor.lora_A, other.lora_A)
            assert_bit_equal(factor.lora_B, other.lora_B)
            assert factor.scale == other.scale
