"""Every MoE class of the installed transformers, each as a tiny model; found, never listed.

What a class needs besides :data:`TINY` is in :data:`SPECIAL`. A class that a new version brings is
found by itself; when the sizes don't do for it, its tests fail until it has a line there.
"""

from __future__ import annotations

import importlib
import inspect
import re
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import tiny
from moegraft.adapters import BoundAdapter, ModelSpec
from moegraft.hosts.transformers import model_spec
from moegraft.hosts.transformers.outside import OUTSIDE

_DECORATOR = re.compile(r"^@use_experts_implementation", re.MULTILINE)
_EXPERTS_NAME = re.compile(
    r"^class (\w*(?:Experts?|ExpertGLU|SparseMLP|CDMoE|NaiveMoe)\w*)\(", re.MULTILINE
)
#: Sizes by their name in a config; those that a config has are set.
TINY: dict[str, Any] = {
    **dict(vocab_size=64, hidden_size=24, num_hidden_layers=2, num_attention_heads=2),
    **dict(num_key_value_heads=2, head_dim=12, max_position_embeddings=64),
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False),
    **dict(num_experts_per_tok=2, moe_k=2, moe_topk=2, top_k_experts=2, top_k=2),
    **dict(num_experts=4, moe_num_experts=4, num_local_experts=4, n_routed_experts=4),
    **dict(n_shared_experts=1, num_shared_experts=1, n_group=2, topk_group=2, num_expert_group=2),
    **dict(moe_intermediate_size=16, intermediate_size=40, shared_intermediate_size=20),
    **dict(shared_expert_intermediate_size=20, moe_shared_expert_intermediate_size=20),
    **dict(first_k_dense_replace=1, num_dense_layers=1),
    **dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8),
    **dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8),
    **dict(linear_value_head_dim=8, linear_head_dim=8, linear_num_heads=2),
    **dict(mamba_d_state=4, mamba_d_conv=2, mamba_expand=2, mamba_num_heads=2, mamba_head_dim=24),
    **dict(mamba_n_heads=2, mamba_d_head=24, mamba_n_groups=1, ssm_state_size=4, n_groups=1),
    **dict(index_topk=4, index_n_heads=2, index_head_dim=8, sliding_window=4),
    **dict(global_head_dim=12, num_global_key_value_heads=1, swiglu_limit=0.5),
    **dict(mlp_gate_softcap=0.5, mlp_up_softcap=0.5),
    **dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=8),
}
_LINEAR_FIRST = dict(layer_types=["linear_attention", "full_attention"])
_DENSE_FIRST = dict(mlp_layer_types=["dense", "sparse"])
_MROPE = {"rope_type": "default", "rope_theta": 1e4}
#: Experts class -> what it needs besides.
SPECIAL: dict[str, dict[str, Any]] = {
    "AXK1Experts": dict(qk_head_dim=12, head_dim=4),
    "BailingHybridExperts": dict(layer_group_size=2),
    "BeamExperts": dict(layer_types=["sliding_attention", "full_attention"], **_DENSE_FIRST),
    "DeepseekOcr2TextExperts": dict(num_experts_per_tok=2, **_DENSE_FIRST),
    "DeepseekV2Experts": dict(
        num_experts_per_tok=2, topk_method="group_limited_greedy", n_group=2, topk_group=2
    ),
    "DeepseekV3Experts": dict(head_dim=4),
    "DiffusionGemmaTextExperts": dict(
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "Dots1Experts": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "Ernie4_5_VLMoeMoeExperts": dict(
        moe_intermediate_size=[16, 20],
        rope_parameters={**_MROPE, "mrope_section": [2, 2, 2]},
        **_DENSE_FIRST,
    ),
    "FlintExperts": dict(mlp_only_layers=[0], first_k_dense_replace=1, num_dense_layers=1),
    "Gemma4TextExperts": dict(
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "Glm4vMoeTextExperts": dict(
        rope_parameters={**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
    ),
    "Glm5NextTextExperts": dict(
        index_kpool=2, qk_rope_head_dim=0, head_dim=0, **_LINEAR_FIRST, **_DENSE_FIRST
    ),
    "GraniteMoeHybridExperts": _LINEAR_FIRST,
    "HunYuanMoEV1Experts": dict(head_dim=12),
    "JambaExperts": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1
    ),
    "KimiLinearExperts": _LINEAR_FIRST,
    "Lfm2MoeExperts": dict(layer_types=["conv", "full_attention"]),
    "Llama4TextExperts": dict(intermediate_size=16, intermediate_size_mlp=40),
    "MiMoV2FlashExperts": dict(num_attention_heads=4, v_head_dim=12),
    "Qwen3_5MoeExperts": _LINEAR_FIRST,
    "Qwen3NextExperts": _LINEAR_FIRST,
    "Qwen3OmniMoeTalkerTextExperts": dict(shared_expert_intermediate_size=20),
    "Qwen4ExpTextExperts": dict(
        full_attention_interval=2,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=12,
        indexer_budget=4,
        indexer_compress_ratio=2,
    ),
    "Step3p7Experts": dict(
        n_routed_experts=4,
        share_expert_dim=20,
        sliding_window=4,
        swiglu_limits=[None, 0.02],
        swiglu_limits_shared=[None, 0.5],
        **_DENSE_FIRST,
    ),
    "ZayaExperts": dict(num_experts_per_tok=1),
}


@dataclass(frozen=True)
class Family:
    """One experts class of transformers and the model that it is tried in.

    Attributes:
        experts: the class that runs the experts.
        model: the smallest model of the same file that has a text config.

    Example: ``Family(Qwen3MoeExperts, Qwen3MoeForCausalLM)``.
    """

    experts: type[nn.Module]
    model: Any

    def config(self) -> Any:
        """A tiny config of the model."""
        make = self.model.config_class
        names, renamed = make().to_dict(), getattr(make, "attribute_map", {})
        sizes = {k: v for k, v in TINY.items() if names.get(renamed.get(k, k)) is not None}
        sizes["num_hidden_layers"] = TINY["num_hidden_layers"]
        sizes.update(deepcopy(SPECIAL.get(self.experts.__name__, {})))
        config = make(**sizes)
        config._attn_implementation = "eager"
        return config

    def build(self) -> Any:
        """A tiny fp32 model with seeded weights; norms and biases are no ones and zeros."""
        torch.manual_seed(0)
        model = self.model(self.config()).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() > 1:
                    parameter.copy_(0.2 * noise)
                else:
                    parameter.add_(0.05 * noise)
        return model


@cache
def families() -> dict[str, Family]:
    """Every experts class that uses transformers' experts interface, by its name."""
    found: dict[str, Family] = {}
    for source, module in _modeling_files(_DECORATOR):
        models = _text_models(module)
        for name in re.findall(r"^@use_experts_implementation.*\nclass (\w+)", source, re.M):
            experts = getattr(module, name)
            errors: list[str] = []
            model = next((m for m in models if _holds(m, experts, errors)), None)
            assert model is not None, f"{name}: no tiny model holds it; {errors}"
            found[name] = Family(experts, model)
    return found


@cache
def outside_families() -> dict[str, Family]:
    """The experts classes outside of the interface that are served, by name."""
    found: dict[str, Family] = {}
    for name in OUTSIDE:
        pattern = re.compile(rf"^class {name}\(", re.MULTILINE)
        for source, module in _modeling_files(pattern):
            experts, errors = getattr(module, name), []
            if not _DECORATOR.search(source):
                models = _text_models(module)
                model = next((m for m in models if _holds(m, experts, errors)), None)
                assert model is not None, f"{name}: no tiny model holds it; {errors}"
                found[name] = Family(experts, model)
    return found


def all_families() -> dict[str, Family]:
    """All experts classes that are served, those of the interface first."""
    return {**families(), **outside_families()}


def outside_classes() -> dict[str, list[str]]:
    """Model type -> classes that look like experts, of files without the experts interface."""
    found: dict[str, list[str]] = {}
    for path in _paths():
        source = path.read_text()
        names = _EXPERTS_NAME.findall(source)
        if names and not _DECORATOR.search(source):
            found.setdefault(path.parent.name, []).extend(names)
    return found


def hidden_of(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """What a model (or a graft, with adapters) makes of tokens: logits, or last hidden states."""
    inner = getattr(model, "model", model) if hasattr(model, "detach") else model
    inputs = {"input_ids": input_ids}
    if not hasattr(inner, "embed_tokens") and hasattr(inner, "codec_embedding"):
        with torch.no_grad():
            inputs = {"inputs_embeds": inner.codec_embedding(input_ids)}
    call = model.forward if inner is not model else model
    with torch.no_grad():
        output = call(**inputs, **kwargs)
    found = output.get("logits")
    result: torch.Tensor = output.last_hidden_state if found is None else found
    return result


def adapter_for(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    """Random factors for every site of a model, under the names that trainers write."""
    generator = torch.Generator().manual_seed(seed)
    rank = 2 + seed
    tensors: dict[str, torch.Tensor] = {}
    for site in spec.sites:
        for projection in site.projections:
            for expert in range(site.num_experts):
                module = f"base_model.model.{site.name}"
                if site.kind == "experts":
                    module += f".{expert}.{projection.name}_proj"
                for leaf, shape in (
                    ("A", (rank, projection.in_features)),
                    ("B", (projection.out_features, rank)),
                ):
                    factor = 0.2 * torch.randn(shape, generator=generator)
                    tensors[f"{module}.lora_{leaf}.weight"] = factor
    return tensors


def merged(model: Any, bound: BoundAdapter) -> Any:
    """Add an adapter's deltas to a model's weights."""
    spec = model_spec(model)
    with torch.no_grad():
        for key, delta in tiny.all_deltas(bound, spec).items():
            parameter = model.get_parameter(key)
            parameter.copy_((parameter.float() + delta).to(parameter.dtype))
    return model


def _paths() -> list[Path]:
    return sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))


def _modeling_files(pattern: re.Pattern[str]) -> list[tuple[str, Any]]:
    found = []
    for path in _paths():
        source = path.read_text()
        if pattern.search(source):
            name = f"transformers.models.{path.parent.name}.{path.stem}"
            found.append((source, importlib.import_module(name)))
    return found


def _text_models(module: Any) -> list[Any]:
    """Models of a file that take tokens alone, those with an output head first."""
    found = [
        thing
        for name, thing in vars(module).items()
        if inspect.isclass(thing)
        and issubclass(thing, transformers.PreTrainedModel)
        and thing.__module__ == module.__name__
        and inspect.isclass(thing.config_class)
        and not thing.config_class.sub_configs
        and name.endswith(("ForCausalLM", "Model"))
        and not name.endswith("PreTrainedModel")
    ]
    return sorted(found, key=lambda model: not model.__name__.endswith("ForCausalLM"))


def _holds(model: Any, experts: type[nn.Module], errors: list[str]) -> bool:
    """True when a model of this class, on the meta device, has the experts."""
    try:
        with torch.device("meta"):
            built = model(Family(experts, model).config())
    except Exception as error:  # such as of a tower with other sizes; the caller shows it
        errors.append(f"{model.__name__}: {type(error).__name__}: {error}")
        return False
    return any(isinstance(module, experts) for module in built.modules())
