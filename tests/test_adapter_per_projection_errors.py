"""3-D factors per projection that are not served: refused by name, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny
from moegraft.adapters import ModelSpec, make_source
from moegraft.adapters import bind as bind_source
from moegraft.cli import main
from moegraft.errors import AdapterError
from moegraft.sites import expert_site
from moegraft.types import WeightLayout
from stacked import (
    CONFIG,
    EXPERTS,
    OUTER,
    PROJ_NAMES,
    Tensors,
    bound_to,
    experts_of,
    per_expert_form,
    put,
    random_pairs,
    stacked_form,
)

SPEC = tiny.spec_of("qwen3_moe")
SITE = experts_of("qwen3_moe")
KEY = f"base_model.model.{EXPERTS}"
Change = Callable[[torch.Tensor], torch.Tensor]


def refusal(
    tensors: Tensors, config: dict[str, Any] | None = None, spec: ModelSpec = SPEC
) -> tuple[str, set[str]]:
    """The error of a file, and the tensors that its report refuses."""
    with pytest.raises(AdapterError) as caught:
        bound_to(spec, tensors, config)
    report = bind_source(make_source(tensors, config or CONFIG), spec).report
    assert report.bound + len(report.refused) == report.total
    return str(caught.value), set(report.refused)


def pair_of(name: str) -> set[str]:
    """The keys of both factors of one projection."""
    return {f"{KEY}.{name}.lora_{leaf}.weight" for leaf in "AB"}


@pytest.mark.parametrize(
    ("leaf", "change", "reason"),
    [
        ("A", lambda t: t[:3], "have 3 and 4 experts"),
        ("B", lambda t: t.repeat(2, 1, 1), "have 4 and 8 experts"),
        ("B", lambda t: t[:0], "have 4 and 0 experts"),
        ("A", lambda t: t[:, :2], "have ranks 2 and 3"),
        ("B", lambda t: t[:, :, :1], "have ranks 3 and 1"),
        ("A", lambda t: t.repeat(1, 2, 1), "have ranks 6 and 3"),
        ("A", lambda t: t[:, :, :20], "are for a 20 -> 16 matrix"),
        ("B", lambda t: t.repeat(1, 2, 1), "are for a 24 -> 32 matrix"),
        ("A", lambda t: t[0], "are not both 3-D"),
        ("B", lambda t: t[None], "are not both 3-D"),
        ("A", lambda t: t.transpose(0, 1), "have 3 and 4 experts"),
    ],
)
@pytest.mark.parametrize("name", ["w1", "w3"])
def test_a_factor_of_the_wrong_shape_is_refused_with_both_shapes(
    name: str, leaf: str, change: Change, reason: str
) -> None:
    tensors = stacked_form(SITE, random_pairs(SITE))
    key = f"{KEY}.{name}.lora_{leaf}.weight"
    tensors[key] = change(tensors[key]).contiguous()
    message, refused = refusal(tensors)
    assert reason in message and refused == pair_of(name)
    assert f"of {EXPERTS} takes A [4 or 1, r, 24], B [4 or 1, 16, r]" in message
    assert all(str(tuple(tensors[k].shape)) in message for k in refused)


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "reason"),
    [
        ((4, 24, 3), (4, 3, 16), "are transposed"),
        ((4, 3, 16), (4, 24, 3), "have in and out exchanged"),
        ((4, 24, 3), (4, 16, 3), "have ranks 24 and 3"),
        ((4, 0, 24), (4, 16, 0), "r >= 1"),
        ((4, 0, 24), (4, 16, 3), "have ranks 0 and 3"),
    ],
)
def test_other_orientations_are_never_guessed(
    shape_a: tuple[int, ...], shape_b: tuple[int, ...], reason: str
) -> None:
    tensors = put(f"{EXPERTS}.up_proj", torch.ones(shape_a), torch.ones(shape_b))
    message, refused = refusal(tensors)
    assert reason in message and refused == set(tensors)


def test_square_factors_that_could_be_transposed_are_refused() -> None:
    spec = ModelSpec((expert_site(EXPERTS, 4, 8, 8),))
    square = torch.ones(4, 8, 8)
    assert (
        "could as well be transposed"
        in refusal(put(f"{EXPERTS}.w1", square, square), None, spec)[0]
    )
    flat = square[:, :4]
    bound_to(spec, put(f"{EXPERTS}.w1", flat, flat.transpose(1, 2)))


@pytest.mark.parametrize("names", [("w1",), ("gate_up_proj",), ("down_proj",)])
@pytest.mark.parametrize("leaf", "AB")
def test_a_factor_without_its_partner_is_refused(names: tuple[str, ...], leaf: str) -> None:
    tensors = stacked_form(SITE, random_pairs(SITE, ("up",)))
    alone = f"{KEY}.{names[0]}.lora_{leaf}.weight"
    tensors[alone] = torch.ones(4, 3, 24)
    message, refused = refusal(tensors)
    partner = "B" if leaf == "A" else "A"
    assert f"its partner {EXPERTS}.{names[0]}.lora_{partner} is missing" in message
    assert refused == {alone}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(value: float) -> None:
    tensors = stacked_form(SITE, random_pairs(SITE, shared=OUTER))
    tensors[f"{KEY}.w2.lora_B.weight"][0, 3, 1] = value
    with pytest.raises(AdapterError, match=r"experts\.w2\.lora_B\.weight holds 1 NaN or inf"):
        make_source(tensors, CONFIG)


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_3d_and_per_expert_factors_of_one_projection_are_refused(projection: str) -> None:
    pairs = random_pairs(SITE)
    tensors = {
        **per_expert_form(SITE, {projection: pairs[projection]}),
        **stacked_form(SITE, pairs),
    }
    message, refused = refusal(tensors)
    assert f"{projection} of {EXPERTS} already has factors in another layout" in message
    assert len(refused) == 6 and all(".experts.w" in key for key in refused)


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ("w1", "gate_proj", "a second gate factor"),
        ("w3", "up_proj", "a second up factor"),
        ("gate_up_proj", "w1", "a second gate factor"),
        ("up_proj", "gate_up_proj", "a second up factor"),
    ],
)
def test_one_projection_under_two_names_is_refused(first: str, second: str, what: str) -> None:
    tensors: Tensors = {}
    for name in (first, second):
        width = 32 if name == "gate_up_proj" else 16
        tensors |= put(f"{EXPERTS}.{name}", torch.ones(4, 3, 24), torch.ones(4, width, 3))
    message, refused = refusal(tensors)
    assert f"{what} for {EXPERTS}" in message and refused == pair_of(second)


def test_a_fused_gate_up_on_a_model_that_interleaves_is_refused_with_the_way_out() -> None:
    site = experts_of("gpt_oss")
    pairs = random_pairs(site)
    b = torch.cat([pairs["gate"][1], pairs["up"][1]], 1)
    tensors = put(f"{site.name}.gate_up_proj", pairs["gate"][0], b)
    message, refused = refusal(tensors, None, tiny.spec_of("gpt_oss"))
    assert "packs gate and up as interleaved" in message and "gate_proj and up_proj" in message
    assert "gate_up_rows='concatenated' or 'interleaved'" in message
    assert refused == set(tensors)
    up_first = ModelSpec((expert_site(EXPERTS, 4, 24, 16, WeightLayout("up_first")),))
    assert "packs gate and up as up_first" in refusal(tensors, None, up_first)[0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CONFIG, "the config does not say so"),
        ({**CONFIG, "veomni_lora": {"moe_mode": "each"}}, "the config does not say so"),
        ({**CONFIG, "veomni_lora": "shared"}, "the config does not say so"),
        (
            {**CONFIG, "veomni_lora": {"moe_mode": "shared"}, "r": 1},
            "stacked experts of its rank 1",
        ),
    ],
)
def test_2d_factors_that_could_be_stacked_experts_are_refused(
    config: dict[str, Any], reason: str
) -> None:
    tensors = put(f"{EXPERTS}.down_proj", torch.ones(4, 16), torch.ones(24, 4))
    message, refused = refusal(tensors, config)
    assert reason in message and refused == set(tensors)
    assert "adapter_config.json" in message or "correct r" in message


@pytest.mark.parametrize("name", ["gate_proj", "gate_up_proj"])
def test_a_gate_for_experts_without_one_is_refused(name: str) -> None:
    spec = ModelSpec((expert_site(EXPERTS, 4, 8, 6, WeightLayout("no_gate")),))
    tensors = put(f"{EXPERTS}.{name}", torch.ones(4, 3, 8), torch.ones(4, 12, 3))
    message, _ = refusal(tensors, None, spec)
    assert f"{name} is not for this model: the experts of {EXPERTS} have no gate" in message
    full = {
        n: put(f"{EXPERTS}.{n}", torch.ones(4, 3, 8), torch.ones(4, 6, 3)) for n in ("w1", "w3")
    }
    message, refused = refusal({**full["w1"], **full["w3"]}, None, spec)
    assert "w1 is not for this model" in message and refused == pair_of("w1")


@pytest.mark.parametrize("gated", [True, False])
def test_an_empty_w3_is_refused_where_it_means_nothing(gated: bool) -> None:
    layout = WeightLayout() if gated else WeightLayout("no_gate")
    spec = ModelSpec((expert_site(EXPERTS, 4, 8, 6, layout),))
    tensors = put(f"{EXPERTS}.w3", torch.ones(0), torch.ones(0))
    if gated:  # without a gate an empty w3 alone is an adapter of nothing
        tensors |= put(f"{EXPERTS}.w1", torch.ones(4, 3, 8), torch.ones(4, 6, 3))
    message, refused = refusal(tensors, None, spec)
    assert "A (0,), B (0,)" in message and refused == pair_of("w3")


def test_a_name_that_no_layout_knows_is_refused_with_its_shape() -> None:
    tensors = put(f"{EXPERTS}.w13", torch.ones(4, 3, 24), torch.ones(4, 32, 3))
    tensors |= stacked_form(SITE, random_pairs(SITE, ("down",)))
    message, refused = refusal(tensors)
    assert "no layout reads a lora_A of shape (4, 3, 24) under this name" in message
    assert refused == pair_of("w13")


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    tensors = {k.replace("layers.0", "layers.7"): t
               for k, t in stacked_form(SITE, random_pairs(SITE)).items()}  # fmt: skip
    assert "bound 0 of 6" in refusal(tensors)[0]


@pytest.mark.parametrize("shared", [(), OUTER])
def test_inspect_shows_the_layout_and_what_binds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shared: tuple[str, ...]
) -> None:
    tensors = stacked_form(SITE, random_pairs(SITE, shared=shared), PROJ_NAMES)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 6}')
    assert main(["inspect", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one factor pair per projection (down_proj, gate_proj, up_proj): 4 experts" in text
    assert ("for all experts at once: down_proj.lora_B, gate_proj.lora_A" in text) == bool(shared)
    model = tiny.FIXTURES / "models" / "qwen3_moe"
    assert main(["inspect", str(tmp_path), "--model", str(model)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "binds in full" in text and "4/4" in text and "1/2" in text
    assert "3-D factors per projection (down_proj, gate_proj, up_proj) on 1 experts module" in text
