"""Other model families: built tiny from their config, merged by hand, compared row by row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import moegraft
from families import adapter_for, merged
from moegraft.adapters import bind, check_bound, make_source
from moegraft.adapters.batch import RowSlots
from moegraft.hosts.transformers import Graft
from moegraft.testing import assert_bit_equal, assert_close
from tiny_grafts import prompts

COMMON: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    num_experts_per_tok=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
QWEN: dict[str, Any] = dict(
    num_experts=4, moe_intermediate_size=16, intermediate_size=40, head_dim=8
)
MLA: dict[str, Any] = dict(
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=2,
    topk_group=2,
    moe_intermediate_size=16,
    intermediate_size=40,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
)
NEMOTRON: dict[str, Any] = dict(
    layers_block_type=["attention", "moe"],
    n_routed_experts=4,
    moe_intermediate_size=20,
    moe_shared_expert_intermediate_size=20,
    intermediate_size=20,
    head_dim=12,
)
#: name -> (model type, config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "shared_expert": (
        "qwen2_moe",
        dict(
            num_experts=4,
            moe_intermediate_size=16,
            intermediate_size=40,
            shared_expert_intermediate_size=20,
        ),
    ),
    "dense_first_layer": ("qwen3_moe", {**QWEN, "mlp_only_layers": [0]}),
    "gelu": ("qwen3_moe", {**QWEN, "hidden_act": "gelu"}),
    "gelu_tanh": ("qwen3_moe", {**QWEN, "hidden_act": "gelu_pytorch_tanh"}),
    "relu": ("qwen3_moe", {**QWEN, "hidden_act": "relu"}),
    "custom_activation": ("qwen3_moe", {**QWEN, "hidden_act": "mish"}),
    "sigmoid_routing": ("deepseek_v3", {**MLA, "first_k_dense_replace": 1}),
    "clamped": ("hy_v4", {**MLA, "swiglu_limit": 0.5}),
    "not_gated": ("nemotron_h", {**NEMOTRON, "n_group": 2, "topk_group": 2}),
    "latent_experts": ("nemotron_h", {**NEMOTRON, "moe_latent_size": 12}),
}


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model of a family with seeded weights."""
    model_type, sizes = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**COMMON, **sizes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


@cache
def case_of(family: str) -> tuple[Graft, dict[str | None, Any]]:
    """A graft with two adapters on every site, and the plain models of its rows."""
    graft = moegraft.attach(build(family))
    plain: dict[str | None, Any] = {None: build(family)}
    for seed, name in enumerate("ab"):
        tensors, config = adapter_for(graft.spec, seed), {"r": 2 + seed, "lora_alpha": 4}
        info = graft.load_tensors(name, tensors, config)
        assert info.report.bound == len(tensors)
        bound = bind(make_source(tensors, config), graft.spec)
        check_bound(bound.report, graft.spec)
        plain[name] = merged(build(family), bound)
    return graft, plain


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_of_a_family_takes_adapters_as_if_merged(family: str) -> None:
    graft, plain = case_of(family)
    rows = ["a", None, "b", "a"]
    inputs = prompts(4)
    found = graft.forward(**inputs, adapters=rows).logits
    for row, name in enumerate(rows):
        with torch.no_grad():
            expected = plain[name](**inputs).logits[row]
        real = inputs["attention_mask"][row].bool()
        assert_close(found[row][real], expected[real], torch.float32)
        if name is not None:
            with torch.no_grad():
                base = plain[None](**inputs).logits[row]
            assert (expected - base)[real].norm() > 1e-2 * base[real].norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_what_its_merged_models_do(family: str) -> None:
    graft, plain = case_of(family)
    rows = [None, "b", "a"]
    inputs = {"input_ids": torch.randint(3, 64, (3, 5), generator=torch.Generator().manual_seed(0))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    found = graft.generate(**inputs, adapters=rows, **options)
    for row, name in enumerate(rows):
        expected = plain[name].generate(**inputs, **options)
        assert torch.equal(found[row], expected[row])


@pytest.mark.parametrize("family", FAMILIES)
def test_detaching_a_family_restores_its_bits(family: str) -> None:
    model, inputs = build(family), prompts(2)
    with torch.no_grad():
        before = model(**inputs).logits
        graft = moegraft.attach(model)
        graft.load_tensors("a", adapter_for(graft.spec, 0), {"r": 2})
        assert not torch.equal(graft.forward(**inputs, adapters="a").logits, before)
        graft.detach()
        assert_bit_equal(model(**inputs).logits, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_moe_layer_has_a_router_that_takes_adapters(family: str) -> None:
    kinds = [site.kind for site in case_of(family)[0].spec.sites]
    assert kinds.count("router") == kinds.count("experts") >= 1


@pytest.mark.parametrize("family", ["shared_expert", "sigmoid_routing", "not_gated"])
def test_a_router_in_fp32_of_a_bf16_model_takes_its_adapter(family: str) -> None:
    model = build(family, torch.bfloat16)
    graft, inputs = moegraft.attach(model), prompts(3)
    tensors = adapter_for(graft.spec, 0)
    routers = [site.name for site in graft.spec.sites if site.kind == "router"]
    only = {k: t for k, t in tensors.items() if any(f"{name}." in k for name in routers)}
    config = {"r": 2, "lora_alpha": 40}
    graft.load_tensors("router", only, config)
    base = graft.forward(**inputs).logits
    found = graft.forward(**inputs, adapters=["router", None, "router"]).logits
    assert not torch.equal(found[0], base[0])
    assert found.dtype == base.dtype and bool(torch.isfinite(found).all())
    exact = merged(build(family), bind(make_source(only, config), graft.spec))
    with torch.no_grad():
        expected = exact(**inputs).logits
    real = inputs["attention_mask"][0].bool()
    error = (found[0].float() - expected[0])[real].norm() / expected[0][real].norm()
    assert error < 0.1


@pytest.mark.parametrize(
    ("family", "check"),
    [
        ("shared_expert", lambda a: (a.kind, a.limit) == ("silu", None)),
        ("gelu", lambda a: a.kind == "gelu"),
        ("gelu_tanh", lambda a: a.kind == "gelu_tanh"),
        ("relu", lambda a: a.kind == "relu"),
        ("custom_activation", lambda a: a.kind == "custom"),
        ("clamped", lambda a: (a.kind, a.limit, a.up_shift) == ("silu", 0.5, 0.0)),
        ("not_gated", lambda a: a.kind == "relu2"),
    ],
)
def test_the_activation_is_recognised_by_what_it_computes(
    family: str, check: Callable[[Any], bool]
) -> None:
    graft, _ = case_of(family)
    assert graft.layers
    for layer in graft.layers.values():
        assert check(layer.weights.activation), layer.weights.activation


def test_a_dense_layer_and_a_moe_layer_keep_their_own_sizes() -> None:
    graft, _ = case_of("dense_first_layer")
    sizes = {site.name: site.projections[-1].in_features for site in graft.spec.sites}
    assert sizes["model.layers.0.mlp.down_proj"] == 40
    assert sizes["model.layers.1.mlp.experts"] == 16
    assert list(graft.layers) == ["model.layers.1.mlp.experts"]


def test_an_adapter_for_attention_alone_needs_nothing_of_the_experts() -> None:
    graft, plain = case_of("sigmoid_routing")
    tensors = {k: t for k, t in adapter_for(graft.spec, 3).items() if "self_attn" in k}
    graft.load_tensors("attention", tensors, {"r": 5})
    inputs = prompts(2)
    found = graft.forward(**inputs, adapters=["attention", None]).logits
    with torch.no_grad():
        base = plain[None](**inputs).logits
    assert not torch.allclose(found[0], base[0])
    assert_close(found[1], base[1], torch.float32)
    graft.unload("attention")


def test_a_module_with_two_names_gets_its_delta_once() -> None:
    model = build("shared_expert")
    block = model.model.layers[0].mlp
    block.router = block.gate
    model.model.alias = model.model.layers[1].self_attn.q_proj
    graft, inputs = moegraft.attach(model), prompts(2)
    tensors = adapter_for(graft.spec, 0)
    bound = bind(make_source(tensors, {"r": 2}), graft.spec)
    expected = merged(build("shared_expert"), bound)
    renamed = {
        k.replace("layers.0.mlp.gate.", "layers.0.mlp.router."): t for k, t in tensors.items()
    }
    with torch.no_grad():
        logits = expected(**inputs).logits
    for name, chosen in (("own", tensors), ("alias", renamed)):
        graft.load_tensors(name, chosen, {"r": 2})
        found = graft.forward(**inputs, adapters=name).logits
        real = inputs["attention_mask"].bool()
        assert_close(found[real], logits[real], torch.float32)


def test_experts_that_are_sharded_over_ranks_are_refused() -> None:
    model = build("gelu")
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    with pytest.raises(moegraft.UnsupportedError, match="sharded by expert parallelism"):
        moegraft.attach(model)
    assert not model._forward_pre_hooks


def test_a_growing_cache_does_not_pile_up_spread_slots() -> None:
    rows = RowSlots([0, -1])
    decode = rows.spread(2, 1)
    for length in range(2, 200):
        assert rows.spread(2, length).num_tokens == 2 * length
        assert rows.spread(2, 1) is decode
    assert len(rows._cache) <= 4
