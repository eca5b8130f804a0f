"""Kinds of fault in reading adapters and their scales; see ``docs/field-faults.md``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import moegraft
import tiny
from moegraft.adapters import ModelSpec
from moegraft.errors import AdapterError
from moegraft.sites import expert_site, linear_site
from moegraft.testing import assert_bit_equal, assert_close
from moegraft.types import WeightLayout
from test_field_faults import CASE, SITE, Tensors, bound_to, experts_pairs, pair
from tiny_grafts import new_graft, prompts

QWEN = "peft/0.21.2/qwen3_moe/"


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    """The tensors with a part of their names changed."""
    return {key.replace(old, new): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("extra", ["moe", "feed_forward.moe", "block"])
def test_an_engines_extra_path_part_still_binds_every_expert_tensor(extra: str) -> None:
    tensors = tiny.tensors_of(CASE)
    spec, config = tiny.spec_of("qwen3_moe"), tiny.config_of(CASE)
    changed = renamed(tensors, "mlp.experts", f"{extra}.experts")
    assert changed.keys() != tensors.keys()
    found = bound_to(spec, changed, config)
    assert found.report.bound == len(tensors)
    tiny.assert_same(found, bound_to(spec, tensors, config))


def test_an_experts_name_that_no_layer_owns_is_refused_with_the_unbound_names() -> None:
    tensors = renamed(tiny.tensors_of(CASE), "layers.1.mlp.experts", "layers.7.moe.experts")
    with pytest.raises(AdapterError, match="of 16 tensors can't be served") as caught:
        bound_to(tiny.spec_of("qwen3_moe"), tensors, tiny.config_of(CASE))
    assert "layers.7.moe.experts" in str(caught.value)


@pytest.mark.parametrize("architectures", [None, [], ["SomethingElse"]])
def test_a_model_config_without_architectures_attaches_and_loads(architectures: Any) -> None:
    model = tiny.new_model("qwen3_moe")
    model.config.architectures = architectures
    graft = moegraft.attach(model)
    assert graft.load("x", tiny.folder(CASE)).report.bound == 16
    graft.detach()


def test_3d_up_and_down_without_a_gate_both_bind() -> None:
    spec = ModelSpec((expert_site(SITE, 4, 8, 6, WeightLayout("no_gate")),))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{SITE}.{name}.lora_{x}": torch.randn(shape, generator=generator)
        for name, shapes in {
            "up_proj": ((4, 3, 8), (4, 6, 3)),
            "down_proj": ((4, 3, 6), (4, 8, 3)),
        }.items()
        for x, shape in zip("AB", shapes, strict=True)
    }
    bound = bound_to(spec, tensors, {"r": 3, "lora_alpha": 3})
    assert set(bound.factors[SITE].projections) == {"up", "down"}
    deltas = tiny.all_deltas(bound, spec)
    for name in ("up_proj", "down_proj"):
        key = f"{SITE}.{name}"
        wanted = tensors[f"{key}.lora_B"] @ tensors[f"{key}.lora_A"]
        assert_close(deltas[key], wanted, torch.float32)


def test_a_factor_that_all_experts_share_is_stored_once() -> None:
    site = expert_site(SITE, 8, 64, 48, WeightLayout())
    shapes = {
        "w1": ((1, 4, 64), (8, 48, 4)),
        "w3": ((1, 4, 64), (8, 48, 4)),
        "w2": ((8, 4, 48), (1, 64, 4)),
    }
    generator = torch.Generator().manual_seed(2)
    tensors: Tensors = {}
    for name, (shape_a, shape_b) in shapes.items():
        tensors[f"{SITE}.{name}.lora_A.weight"] = torch.randn(shape_a, generator=generator)
        tensors[f"{SITE}.{name}.lora_B.weight"] = torch.randn(shape_b, generator=generator)
    spec = ModelSpec((site,))
    shared = bound_to(spec, tensors, {"r": 4})
    expanded = {k: t.expand(8, -1, -1).contiguous() for k, t in tensors.items()}
    copies = bound_to(spec, expanded, {"r": 4})
    stored = sum(tensor.numel() for tensor in tensors.values()) * 4
    assert shared.report.num_bytes == copies.report.num_bytes == stored
    for key, delta in tiny.all_deltas(copies, spec).items():
        assert_bit_equal(delta, tiny.all_deltas(shared, spec)[key])


def test_experts_follow_the_adapters_own_scale() -> None:
    graft, inputs = new_graft("qwen3_moe"), prompts(1)
    tensors = experts_pairs(("gate_proj", "up_proj", "down_proj"), 3)
    doubled = {k: 2 * t if "lora_B" in k else t for k, t in tensors.items()}
    graft.load_tensors("alpha", tensors, {"r": 3, "lora_alpha": 12})
    graft.load_tensors("b", doubled, {"r": 3, "lora_alpha": 6})
    graft.load_tensors("one", tensors, {"r": 3, "lora_alpha": 3})
    logits = {name: graft.forward(**inputs, adapters=name).logits for name in ("alpha", "b", "one")}
    assert_close(logits["alpha"], logits["b"], torch.float32)
    assert (logits["alpha"] - logits["one"]).abs().max() > 1e-2
    graft.detach()


def test_rank_and_alpha_differ_by_layer_and_projection_in_one_adapter() -> None:
    sites = (
        *(expert_site(f"model.layers.{i}.mlp.experts", 4, 8, 6, WeightLayout()) for i in (2, 3)),
        linear_site("model.layers.3.self_attn.q_proj", 8, 8),
    )
    tensors: Tensors = pair("model.layers.3.self_attn.q_proj", 8, 8, 8)
    for layer, rank in ((2, 8), (3, 32)):
        for expert in range(4):
            path = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors |= pair(f"{path}.up_proj", 8, 6, rank, seed=expert)
            tensors |= pair(f"{path}.down_proj", 6, 8, 2, seed=expert)
    patterns = {
        "rank_pattern": {"layers.3.mlp.experts.[0-9]+.up_proj": 32, "down_proj": 2},
        "alpha_pattern": {"layers.3.mlp.experts.[0-9]+.up_proj": 128, "down_proj": 1},
    }
    bound = bound_to(ModelSpec(sites), tensors, {"r": 8, "lora_alpha": 16, **patterns})
    found = {
        (site.site, name): (projection.rank, projection.scale)
        for site in bound.report.sites
        for name, projection in site.projections.items()
    }
    assert found == {
        ("model.layers.2.mlp.experts", "up"): (8, 2.0),
        ("model.layers.2.mlp.experts", "down"): (2, 0.5),
        ("model.layers.3.mlp.experts", "up"): (32, 4.0),
        ("model.layers.3.mlp.experts", "down"): (2, 0.5),
        ("model.layers.3.self_attn.q_proj", "linear"): (8, 2.0),
    }


def test_the_order_of_tensors_in_a_file_changes_nothing() -> None:
    case = f"{QWEN}patterns"
    tensors, config = tiny.tensors_of(case), tiny.config_of(case)
    for config_used in (config, {"peft_version": config["peft_version"]}):
        wanted = bound_to(tiny.spec_of("qwen3_moe"), tensors, copy.deepcopy(config_used))
        turned = dict(reversed(tensors.items()))
        found = bound_to(tiny.spec_of("qwen3_moe"), turned, config_used)
        tiny.assert_same(found, wanted)
        assert found.report.sites == wanted.report.sites
