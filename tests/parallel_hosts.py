"""A tiny model that transformers shards over ranks, its adapters, and what rows must equal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import moegraft
import tiny
from moegraft.adapters import ModelSpec, bind, check_bound, make_source
from moegraft.hosts.transformers import model_spec
from moegraft.testing import assert_bit_equal, assert_close, random_factors
from stacked import Tensors, put
from tiny_grafts import prompts

CONFIG: dict[str, Any] = {"r": 4, "lora_alpha": 8}
_ATTENTION = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
#: Arguments of transformers' DistributedConfig for two ranks.
MODES: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2, "tp_plan": "auto"},
    "tp and ep": {"tp_size": 2, "ep_size": 2, "tp_plan": "auto"},
    "ep, all_reduce by name": {
        "tp_size": 2,
        "ep_size": 2,
        "tp_plan": "auto",
        "ep_implementation": "all_reduce",
    },
    # Experts over the ranks, the dense layers beside them whole on each.
    "ep, dense replicated": {
        "tp_size": 2,
        "ep_size": 2,
        "tp_plan": {
            **{f"model.layers.*.{name}": "replicate" for name in _ATTENTION},
            **{f"model.layers.*.mlp.{n}_proj": "replicate" for n in ("gate", "up", "down")},
        },
    },
}
ROWS: list[str | None] = [None, "all", "outer", None, "half", "attention", "down", "all"]


def save_model(folder: Path) -> None:
    """Write a model with one MoE layer, one dense layer, and heads that two ranks can share."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).eval().save_pretrained(folder)


def save_family(folder: Path, family: str) -> None:
    """Write a tiny model of a family of ``test_host_models``, or of gpt_oss."""
    from test_host_models import COMMON, build

    if family != "gpt_oss":
        build(family).save_pretrained(folder)
        return
    torch.manual_seed(0)
    sizes = {"intermediate_size": 20, "head_dim": 8, "initializer_range": 0.2}
    config = GptOssConfig(**{**COMMON, **sizes}, num_local_experts=4)
    model = GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)


def whole_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in one process."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def sharded_model(folder: Path, mode: str, dtype: torch.dtype = torch.float32) -> Any:
    """This rank's part of the model."""
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        distributed_config=DistributedConfig(**MODES[mode]),
    ).eval()


def adapters_for(spec: ModelSpec) -> dict[str, Tensors]:
    """Files of adapters: everything; shared factors; two experts; attention; down alone."""
    names = ("all", "outer", "half", "attention", "down")
    found: dict[str, Tensors] = {name: {} for name in names}
    for seed, site in enumerate(spec.sites):
        if site.kind != "experts":
            factor = random_factors(site, 4, seed=seed).projections["linear"]
            pair = put(site.name, factor.lora_A[0], factor.lora_B[0])
            found["all"] |= pair
            if "self_attn" in site.name:
                found["attention"] |= pair
            continue
        for name, factor in random_factors(site, 4, seed=seed).projections.items():
            for expert in range(site.num_experts):
                path = f"{site.name}.{expert}.{name}_proj"
                pair = put(path, factor.lora_A[expert].clone(), factor.lora_B[expert].clone())
                found["all"] |= pair
                if expert < 2:
                    found["half"] |= pair
                if name == "down":
                    found["down"] |= pair
        w_names = {"gate": "w1", "up": "w3", "down": "w2"}
        outer = random_factors(site, 3, "shared_outer", seed=seed + 50)
        for name, factor in outer.projections.items():
            found["outer"] |= put(f"{site.name}.{w_names[name]}", factor.lora_A, factor.lora_B)
    return found


def merged(model: Any, spec: ModelSpec, tensors: Tensors) -> Any:
    """A copy of a whole model with an adapter added to its weights."""
    bound = bind(make_source(tensors, CONFIG), spec)
    check_bound(bound.report, spec)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, delta in tiny.all_deltas(bound, spec).items():
            model.get_parameter(name).add_(delta.to(model.dtype))
    return model


def rows_equal_merged(rank: int, folder: Path, mode: str) -> dict[str, int]:
    """Logits and tokens of a mixed batch; returns each adapter's bytes here."""
    whole = whole_model(folder)
    spec = model_spec(whole)
    adapters = adapters_for(spec)
    plain = sharded_model(folder, mode)
    inputs = prompts(len(ROWS))
    with torch.no_grad():
        before = plain(**inputs).logits
    graft = moegraft.attach(plain, max_adapters=6)
    for name, tensors in adapters.items():
        info = graft.load_tensors(name, tensors, CONFIG)
        assert info.report.bound == len(tensors)
        source = make_source(tensors, CONFIG)
        assert graft.memory_estimate(source).num_bytes == info.num_bytes
    models = {None: whole, **{n: merged(whole, spec, t) for n, t in adapters.items()}}
    found = graft.forward(**inputs, adapters=ROWS).logits
    for row, name in enumerate(ROWS):
        one = {key: value[row : row + 1] for key, value in inputs.items()}
        with torch.no_grad():
            expected = models[name](**one).logits
        mask = one["attention_mask"][0].bool()
        assert_close(found[row : row + 1][:, mask], expected[:, mask], torch.float32)
        if name is not None:
            base = before[row : row + 1][:, mask]
            assert (expected[:, mask] - base).norm() > 0.1 * base.norm(), f"{name} does too little"
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    tokens = graft.generate(**inputs, adapters=ROWS, **options)
    for row, name in enumerate(ROWS):
        one = {key: value[row : row + 1] for key, value in inputs.items()}
        assert torch.equal(tokens[row : row + 1], models[name].generate(**one, **options)), name
    with torch.no_grad():
        base = graft.model(**inputs).logits
        # Transformers' own products may sum in another order.
        assert_close(base, before, torch.float32)
        assert_bit_equal(graft.model(**inputs).logits, base, "the base through the graft, twice")
    sizes = {info.name: info.num_bytes for info in graft.adapters}
    graft.detach()
    with torch.no_grad():
        assert_bit_equal(plain(**inputs).logits, before, "after detach")
    return sizes


def family_equals_merged(rank: int, folder: Path, mode: str) -> None:
    """Rows with two adapters at every site of a model of any family."""
    from families import adapter_for

    whole = whole_model(folder)
    spec = model_spec(whole)
    tensors = {f"a{seed}": adapter_for(spec, seed) for seed in (1, 2)}
    graft = moegraft.attach(sharded_model(folder, mode))
    for name, adapter in tensors.items():
        graft.load_tensors(name, adapter, CONFIG)
    inputs = prompts(4)
    rows = ["a1", None, "a2", "a1"]
    found = graft.forward(**inputs, adapters=rows).logits
    for row, name in enumerate(rows):
        model = whole if name is None else merged(whole, spec, tensors[name])
        one = {key: value[row : row + 1] for key, value in inputs.items()}
        with torch.no_grad():
            expected = model(**one).logits
        mask = one["attention_mask"][0].bool()
        assert_close(found[row : row + 1][:, mask], expected[:, mask], torch.float32)


def whole_sizes(folder: Path) -> dict[str, int]:
    """Each adapter's bytes in one process."""
    graft = moegraft.attach(whole_model(folder), max_adapters=6)
    for name, tensors in adapters_for(graft.spec).items():
        graft.load_tensors(name, tensors, CONFIG)
    return {info.name: info.num_bytes for info in graft.adapters}
