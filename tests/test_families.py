"""Every MoE class of the installed transformers takes adapters as if merged, or is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, DbrxConfig, LongcatFlashConfig

import moegraft
from families import (
    adapter_for,
    all_families,
    families,
    hidden_of,
    outside_classes,
    outside_families,
)
from family_runs import ROWS, documented, outside_table, run_of, table
from moegraft.hosts.transformers import model_spec
from moegraft.hosts.transformers.outside import OUTSIDE, outside_of
from moegraft.hosts.transformers.unserved import why_no_experts
from moegraft.layer import MoeLoraLayer
from moegraft.parallel import ExpertPlacement, ExpertShard, Part, shard_experts
from moegraft.testing import assert_bit_equal, assert_close, random_weights

#: Files with the interface in the first version that is served; later ones have more.
MIN_CLASSES = 50


def longcat() -> nn.Module:
    """A tiny model whose experts are out of reach."""
    config = LongcatFlashConfig(
        vocab_size=64,
        hidden_size=24,
        num_layers=1,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        ffn_hidden_size=40,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        zero_expert_num=1,
        moe_topk=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        head_dim=4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_classes_are_found_by_themselves() -> None:
    found = families()
    assert len(found) >= MIN_CLASSES
    assert {"Qwen3MoeExperts", "GptOssExperts", "DeepseekV3Experts"} <= set(found)


@pytest.mark.parametrize("name", all_families())
def test_every_row_equals_its_merged_model(name: str) -> None:
    run = run_of(name)
    assert len(run.graft.layers) >= 1
    for row, adapter in enumerate(ROWS):
        assert_close(run.found[row], run.expected[row], torch.float32)
        if adapter is not None:
            change = (run.expected - run.base)[row].norm()
            assert change > 1e-2 * run.base[row].norm()
    assert run.served


@pytest.mark.parametrize("name", all_families())
def test_every_experts_module_of_a_class_is_a_site(name: str) -> None:
    run, experts = run_of(name), all_families()[name].experts
    modules = {path for path, m in run.graft.model.named_modules() if isinstance(m, experts)}
    assert modules and modules == set(run.graft.layers)


def test_docs_models_has_the_table_of_this_version() -> None:
    version, written, outside = documented()
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, here is {transformers.__version__}")
    assert (written, outside) == (table(), outside_table()), "run: python tests/family_runs.py"


def test_every_class_outside_of_the_interface_is_known_by_its_name() -> None:
    found = outside_classes()
    assert {"llama4", "dbrx", "jetmoe", "longcat_flash", "switch_transformers"} <= set(found)
    for names in found.values():
        made = [type(name, (nn.Module,), {})() for name in names]
        assert any(outside_of(module) or why_no_experts(module) for module in made), names


def test_experts_outside_of_the_interface_are_refused_with_the_name_of_their_class() -> None:
    model = longcat()
    graft = moegraft.attach(model)
    assert not graft.layers
    for key in ("experts.lora_A.weight", "experts.base_layer.lora_A.weight"):
        path = f"base_model.model.model.layers.0.mlp.{key}"
        tensors = {
            path: torch.randn(8, 24),
            path.replace("lora_A", "lora_B"): torch.randn(32, 8),
        }
        with pytest.raises(moegraft.AdapterError, match="LongcatFlashExperts"):
            graft.load_tensors("a", tensors, {"r": 2, "target_parameters": ["x"]})


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_class_outside_of_the_interface_is_left_as_it_was(name: str) -> None:
    model = outside_families()[name].build()
    ids = torch.arange(3, 9)[None]
    before = hidden_of(model, ids)
    graft = moegraft.attach(model)
    graft.load_tensors("a", adapter_for(graft.spec, 0), {"r": 2})
    assert not torch.equal(hidden_of(graft, ids, adapters="a"), before)
    with pytest.raises(moegraft.MoegraftError, match="detach"):
        copy.deepcopy(model)
    module = model.get_submodule(next(iter(graft.layers)))
    shadow = module.__dict__.pop("forward")
    with pytest.raises(moegraft.MoegraftError, match="was replaced after attach"):
        hidden_of(graft, ids, adapters="a")
    module.__dict__["forward"] = shadow
    graft.detach()
    assert "forward" not in module.__dict__
    assert_bit_equal(hidden_of(model, ids), before)
    hidden_of(moegraft.attach(copy.deepcopy(model)), ids)


def test_the_rest_of_such_a_model_takes_adapters() -> None:
    model = longcat()
    graft = moegraft.attach(model)
    tensors = {k: t for k, t in adapter_for(graft.spec, 0).items() if "self_attn" in k}
    assert graft.load_tensors("a", tensors, {"r": 2}).report.bound == len(tensors)
    ids = torch.arange(3, 9)[None].repeat(2, 1)
    with torch.no_grad():
        before = graft.forward(input_ids=ids).logits
    found = graft.forward(input_ids=ids, adapters=["a", None]).logits
    assert not torch.allclose(found[0], before[0])
    assert_bit_equal(found[1], before[1])


def test_linears_inside_of_such_experts_are_no_sites() -> None:
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=24, d_kv=12, d_ff=16, num_layers=2, num_heads=2, num_experts=4
    )
    spec = model_spec(transformers.SwitchTransformersForConditionalGeneration(config))
    inside = [path for path in spec.refused if ".experts.expert_0." in path]
    assert inside and not any(".experts." in site.name for site in spec.sites)
    assert all("SwitchTransformersExperts" in spec.refused[path] for path in inside)


def test_one_matrix_for_all_experts_is_refused_by_name() -> None:
    config = DbrxConfig(d_model=24, n_heads=2, n_layers=1, vocab_size=64)
    config.ffn_config.moe_num_experts, config.ffn_config.ffn_hidden_size = 4, 16
    config.attn_config.kv_n_heads, config.attn_config.rope_theta = 2, 1e4
    spec = model_spec(AutoModelForCausalLM.from_config(config))
    reasons = [why for path, why in spec.refused.items() if path.endswith("experts")]
    assert reasons and all("DbrxExperts" in why and "one matrix" in why for why in reasons)


@pytest.mark.parametrize(
    ("name", "leaf", "why"),
    [
        ("JambaExperts", "dt_proj", "without calling it"),
        ("DeepseekV4Experts", "o_a_proj", "DeepseekV4GroupedLinear"),
    ],
)
def test_a_linear_whose_adapter_would_be_lost_or_wrong_is_refused_by_name(
    name: str, leaf: str, why: str
) -> None:
    spec = run_of(name).graft.spec
    reasons = [reason for path, reason in spec.refused.items() if path.endswith(leaf)]
    assert reasons and all(why in reason for reason in reasons)
    assert not any(site.name.endswith(leaf) for site in spec.sites)


def test_a_router_that_is_a_linear_with_a_forward_of_its_own_takes_its_adapter() -> None:
    kinds = {s.name: s.kind for s in run_of("PhimoeExperts").graft.spec.sites}
    routers = [name for name, kind in kinds.items() if kind == "router"]
    assert len(routers) == 2 and all(name.endswith("mlp.router") for name in routers)


def test_the_plan_says_that_it_runs_the_hosts_own_activation_and_norm() -> None:
    if "Inkling2Experts" not in families():
        pytest.skip("this transformers has no class with such an activation")
    custom = next(iter(run_of("Inkling2Experts").graft.layers.values()))
    assert "the host's own function" in custom.plan(4, 2).explain()
    normed = next(iter(run_of("MuseSparkExperts").graft.layers.values()))
    assert "norm behind each expert" in normed.plan(4, 2).explain()
    plain = next(iter(run_of("Qwen3MoeExperts").graft.layers.values()))
    assert "host's own" not in plain.plan(4, 2).explain()


def test_a_norm_behind_experts_refuses_slices_of_their_width() -> None:
    weights = replace(random_weights(4, 24, 20), post_norm=nn.functional.normalize)
    whole = ExpertPlacement.contiguous(4, 0, 1)
    half = ExpertShard(whole, Part.of(20, 0, 2))
    with pytest.raises(moegraft.UnsupportedError, match="whole experts"):
        shard_experts(weights, half)
    MoeLoraLayer(weights)
