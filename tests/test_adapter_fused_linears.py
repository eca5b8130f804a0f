"""Linears that are fused in the file or in the model, but not in both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from moegraft.adapters import BoundAdapter, ModelSpec, bind, check_bound, make_source
from moegraft.adapters.layouts.base import LayoutResult
from moegraft.adapters.layouts.fused_linear import FUSED, _join, _Part
from moegraft.errors import AdapterError
from moegraft.sites import Site, linear_site
from moegraft.testing import assert_bit_equal, assert_close, relative_error
from stacked import CONFIG, put
from tiny_grafts import new_graft, prompts

ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
#: A model with fused linears: q has 16 rows, k and v 8 each; gate and up 20 each.
FUSED_MODEL = ModelSpec(
    (linear_site(f"{ATTENTION}.qkv_proj", 24, 32), linear_site(f"{MLP}.gate_up_proj", 24, 40))
)
SPLIT_MLP = ModelSpec(tuple(linear_site(f"{MLP}.{n}", 24, 20) for n in ("gate_proj", "up_proj")))
ROWS = {"q_proj": 16, "k_proj": 8, "v_proj": 8}

Tensors = dict[str, torch.Tensor]


def pair(rows: int, rank: int = 3, seed: int = 0, width: int = 24) -> tuple[Any, Any]:
    """Random A [r, in] and B [rows, r]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rank, width), (rows, rank)
    a, b = (0.2 * torch.randn(*shape, generator=generator) for shape in shapes)
    return a, b


def bound_to(spec: ModelSpec, tensors: Tensors, config: Any = None) -> BoundAdapter:
    """Bind in full, or raise."""
    bound = bind(make_source(tensors, config or CONFIG), spec)
    check_bound(bound.report, spec)
    assert bound.report.bound == bound.report.total == len(tensors)
    return bound


def delta_at(bound: BoundAdapter, site: Site) -> torch.Tensor:
    """The delta of a linear."""
    return tiny.weight_deltas(site, bound.factors[site.name])[f"{site.name}.weight"]


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.model.language_"])
def test_a_fused_qkv_is_served_as_the_models_q_k_and_v(prefix: str) -> None:
    a, b = pair(32)
    tensors = put(f"{ATTENTION}.qkv_proj", a, b)
    tensors = {key.replace("base_model.model.", prefix): t for key, t in tensors.items()}
    graft = new_graft("qwen3_moe")
    report = graft.load_tensors("fused", tensors, CONFIG).report
    how = "qkv_proj is q_proj, k_proj, v_proj of the model, rows of B in this order (1 place)"
    assert report.layouts == {"fused_linear": how}
    assert [site.site for site in report.sites] == [f"{ATTENTION}.{name}" for name in ROWS]
    merged = tiny.new_model("qwen3_moe")
    start = 0
    for name, rows in ROWS.items():
        weight = merged.get_submodule(f"{ATTENTION}.{name}").weight
        with torch.no_grad():
            weight += 2.0 * b[start : start + rows] @ a
        start += rows
    inputs = prompts(2)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = merged(**inputs).logits[mask]
    assert_close(graft.forward(**inputs, adapters="fused").logits[mask], expected, torch.float32)


def test_a_fused_gate_up_of_a_dense_mlp_is_taken_apart() -> None:
    a, b = pair(40)
    bound = bound_to(SPLIT_MLP, put(f"{MLP}.gate_up_proj", a, b))
    for i, site in enumerate(SPLIT_MLP.sites):
        factor = bound.factors[site.name].projections["linear"]
        assert_bit_equal(factor.lora_A[0], a)
        assert_bit_equal(factor.lora_B[0].contiguous(), b[20 * i : 20 * (i + 1)].contiguous())


@pytest.mark.parametrize("names", ["qkv", "qk", "qv", "kv", "q", "v"])
def test_q_k_and_v_of_a_file_are_rows_of_the_models_qkv(names: str) -> None:
    tensors: Tensors = {}
    expected = torch.zeros(32, 24)
    start = 0
    for i, (name, rows) in enumerate(ROWS.items()):
        if name[0] in names:
            a, b = pair(rows, rank=2 + i, seed=i)
            tensors |= put(f"{ATTENTION}.{name}", a, b)
            expected[start : start + rows] = 2.0 * b @ a
        start += rows
    bound = bound_to(FUSED_MODEL, tensors)
    site = FUSED_MODEL.sites[0]
    assert relative_error(delta_at(bound, site), expected) <= 1e-6
    assert bound.report.sites[0].projections["linear"].rank == sum(
        2 + i for i, name in enumerate(ROWS) if name[0] in names
    )
    assert "are rows of the model's qkv_proj (1 place)" in bound.report.layouts["fused_linear"]


@pytest.mark.parametrize("first", ["gate_proj", "up_proj"])
def test_parts_of_several_dtypes_keep_every_value(first: str) -> None:
    parts: Tensors = {}
    expected = torch.zeros(40, 24)
    for start, name in ((0, "gate_proj"), (20, "up_proj")):
        a, b = pair(20, seed=start)
        a, b = (a.half(), b.half()) if name == first else (a, 1e6 * b)
        parts |= put(f"{MLP}.{name}", a, b)
        expected[start : start + 20] = 2.0 * b.float() @ a.float()
    bound = bound_to(FUSED_MODEL, parts)
    assert relative_error(delta_at(bound, FUSED_MODEL.sites[1]), expected) <= 1e-6


def test_one_part_of_two_dtypes_keeps_every_value() -> None:
    a, b = pair(20)
    b = (1e6 * b).bfloat16()
    bound = bound_to(FUSED_MODEL, put(f"{MLP}.gate_proj", a, b))
    expected = torch.zeros(40, 24)
    expected[:20] = 2.0 * b.float() @ a
    assert relative_error(delta_at(bound, FUSED_MODEL.sites[1]), expected) <= 1e-6


def test_parts_with_scales_of_their_own_keep_them() -> None:
    (a0, b0), (a1, b1) = pair(20), pair(20, rank=5, seed=1)
    tensors = {**put(f"{MLP}.gate_proj", a0, b0), **put(f"{MLP}.up_proj", a1, b1)}
    bound = bound_to(FUSED_MODEL, tensors, {**CONFIG, "rank_pattern": {"up_proj": 5}})
    expected = torch.cat([6 / 3 * b0 @ a0, 6 / 5 * b1 @ a1])
    assert relative_error(delta_at(bound, FUSED_MODEL.sites[1]), expected) <= 1e-6
    assert any("different scales" in note for note in bound.report.notes)


def test_parts_are_put_together_on_the_device_that_they_are_on() -> None:
    parts = {name: pair(rows, seed=rows) for name, rows in ROWS.items()}
    members = [
        _Part(name, [], *(tensor.to("meta") for tensor in parts[name]), scale=1.0) for name in ROWS
    ]
    result = LayoutResult()
    site = FUSED_MODEL.sites[0]
    assert _join(members, site, FUSED["qkv_proj"], result)
    [factor] = result.factors[site.name].projections.values()
    assert factor.lora_A.is_meta and factor.lora_B.is_meta


@pytest.mark.parametrize(
    ("spec", "tensors", "reason"),
    [
        (
            SPLIT_MLP,
            put(f"{MLP}.gate_up_proj", *pair(39)),
            "24 -> 39 matrix.* together are 24 -> 40",
        ),
        (SPLIT_MLP, put(f"{MLP}.gate_up_proj", *pair(40, width=8)), "8 -> 40 matrix"),
        (FUSED_MODEL, put(f"{ATTENTION}.k_proj", *pair(8)), "k_proj 24 -> 8 don't tell rows"),
        (FUSED_MODEL, put(f"{MLP}.gate_proj", *pair(19)), "gate_proj 24 -> 19 don't tell rows"),
        (FUSED_MODEL, put(f"{ATTENTION}.q_proj", *pair(33)), "q_proj 24 -> 33 don't tell"),
        (FUSED_MODEL, put(f"{ATTENTION}.q_proj", *pair(16, width=8)), "q_proj 8 -> 16 don't"),
        (
            FUSED_MODEL,
            {
                k: t
                for n, r in ROWS.items()
                for k, t in put(f"{ATTENTION}.{n}", *pair(r + 1)).items()
            },
            "don't tell rows",
        ),
        (
            FUSED_MODEL,
            {f"{ATTENTION}.q_proj.lora_A.weight": pair(16)[0]},
            "partner .*q_proj.lora_B is missing",
        ),
        (
            ModelSpec(SPLIT_MLP.sites[:1]),
            put(f"{MLP}.gate_up_proj", *pair(40)),
            "has no such module",
        ),
    ],
)
def test_sizes_that_do_not_tell_the_rows_are_refused(
    spec: ModelSpec, tensors: Tensors, reason: str
) -> None:
    with pytest.raises(AdapterError, match=reason):
        bound_to(spec, tensors)


def test_fused_and_apart_in_one_file_are_refused() -> None:
    tensors = {**put(f"{MLP}.gate_up_proj", *pair(40)), **put(f"{MLP}.up_proj", *pair(20))}
    with pytest.raises(AdapterError, match="already has factors in another layout"):
        bound_to(SPLIT_MLP, tensors)
