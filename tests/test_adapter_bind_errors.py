"""Adapters that do not fit the model: what binds, what is refused, and what the caller may say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from moegraft.adapters import (
    AdapterBank,
    AdapterStore,
    BoundAdapter,
    ModelSpec,
    ReadOptions,
    check_bound,
    make_source,
)
from moegraft.adapters import bind as bind_source
from moegraft.errors import AdapterError
from moegraft.sites import expert_site, linear_site
from moegraft.types import WeightLayout

CASE = "peft/0.21.2/qwen3_moe/experts"
PER_EXPERT = "per_expert/qwen3_moe/plain"
LAYER = "base_model.model.model.layers.0."
Tensors = dict[str, torch.Tensor]


def bind(
    tensors: Tensors,
    config: dict[str, Any] | None = None,
    options: ReadOptions | None = None,
    spec: ModelSpec | None = None,
) -> BoundAdapter:
    """Bind in full, or raise."""
    spec = spec or tiny.spec_of("qwen3_moe")
    bound = bind_source(make_source(tensors, config or {}), spec, options)
    check_bound(bound.report, spec)
    return bound


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    """The same tensors with a part of their names replaced."""
    return {key.replace(old, new): tensor for key, tensor in tensors.items()}


@pytest.fixture(scope="module")
def expected() -> BoundAdapter:
    """The fixture adapter as it is bound from its own key names."""
    return bind(tiny.tensors_of(CASE), tiny.config_of(CASE))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.model.", ""),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        ("base_model.model.model.", "base_model.model.module.model."),
        (".weight", ".default.weight"),
        (".weight", ""),
        ("mlp.experts", "mlp.moe.experts"),
        ("mlp.experts", "block_sparse_moe.experts"),
    ],
)
def test_other_spellings_of_the_keys_bind_to_the_same_places(
    expected: BoundAdapter, old: str, new: str
) -> None:
    tensors = renamed(tiny.tensors_of(CASE), old, new)
    tiny.assert_same(bind(tensors, tiny.config_of(CASE)), expected)


def test_an_adapter_of_another_model_binds_nothing_and_says_the_first_names() -> None:
    tensors = renamed(tiny.tensors_of(CASE), "model.layers", "model.blocks")
    with pytest.raises(AdapterError, match="bound 0 of 16 tensors") as caught:
        bind(tensors, tiny.config_of(CASE))
    message = str(caught.value)
    assert next(iter(tensors)) in message and "and 12 more" in message
    assert "no such module" in message and "trained for another model" in message


def test_a_partial_bind_is_refused_until_it_is_excused(expected: BoundAdapter) -> None:
    stray = "base_model.model.model.layers.7.self_attn.q_proj.lora_"
    tensors = {
        **tiny.tensors_of(CASE),
        f"{stray}A.weight": torch.ones(3, 24),
        f"{stray}B.weight": torch.ones(16, 3),
    }
    with pytest.raises(AdapterError, match="2 of 18 tensors can't be served") as caught:
        bind(tensors, tiny.config_of(CASE))
    assert f"{stray}A.weight" in str(caught.value) and "skip=" in str(caught.value)
    excused = bind(tensors, tiny.config_of(CASE), ReadOptions(skip=(r"layers\.7\.",)))
    tiny.assert_same(excused, expected)


def test_skipping_everything_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"bound 0 of 16 .*all were skipped"):
        bind(tiny.tensors_of(CASE), tiny.config_of(CASE), ReadOptions(skip=(".",)))


@pytest.mark.parametrize("case", [CASE, PER_EXPERT])
@pytest.mark.parametrize("leaf", ["lora_A", "lora_B"])
def test_a_factor_without_its_partner_is_refused_by_name(case: str, leaf: str) -> None:
    for key in tiny.tensors_of(case):
        if leaf in key and "layers.0" in key:
            tensors = {k: t for k, t in tiny.tensors_of(case).items() if k != key}
            partner = key.replace(leaf, "lora_B" if leaf == "lora_A" else "lora_A")
            with pytest.raises(AdapterError, match=f"{leaf} is missing") as caught:
                bind(tensors, tiny.config_of(case))
            assert partner in str(caught.value)


def test_an_expert_that_does_not_exist_is_refused() -> None:
    tensors = renamed(tiny.tensors_of(PER_EXPERT), "experts.3.", "experts.4.")
    with pytest.raises(AdapterError, match=r"expert 4 does not exist: .* has 4"):
        bind(tensors, tiny.config_of(PER_EXPERT))


@pytest.mark.parametrize("case", [CASE, PER_EXPERT])
def test_a_factor_of_the_wrong_shape_is_refused_by_name(case: str) -> None:
    for key, tensor in tiny.tensors_of(case).items():
        if "layers.0" not in key:
            continue
        for wrong in (tensor[:-1], tensor[:, :-1], tensor[None], tensor[0], tensor[:0]):
            with pytest.raises(AdapterError, match="can't be served") as caught:
                bind({**tiny.tensors_of(case), key: wrong.clone()}, tiny.config_of(case))
            assert "layers.0" in str(caught.value)


@pytest.mark.parametrize("case", [CASE, PER_EXPERT])
@pytest.mark.parametrize("prefix", ["", "base_model.model.", "base_model.model.language_model."])
def test_the_same_module_twice_in_one_file_is_refused(case: str, prefix: str) -> None:
    for part in ("q_proj", "experts"):
        chosen = {
            k: t for k, t in tiny.tensors_of(case).items() if f"layers.0.{part}" in k or part in k
        }
        if not chosen:
            continue
        again = {
            k.replace("base_model.model.", prefix or "", 1).replace(".weight", ".x.weight"): t + 1
            for k, t in chosen.items()
        }
        with pytest.raises(AdapterError, match=r"a second|same place"):
            bind({**tiny.tensors_of(case), **again}, tiny.config_of(case))


def test_fused_and_per_expert_factors_of_one_module_are_refused() -> None:
    tensors = {**tiny.tensors_of(CASE), **tiny.tensors_of(PER_EXPERT)}
    with pytest.raises(AdapterError, match="already has factors in another layout"):
        bind(tensors, tiny.config_of(CASE))


def test_vision_audio_and_draft_keys_never_bind_to_text_layers(expected: BoundAdapter) -> None:
    towers = ("visual", "vision_tower", "audio_tower", "vpm.encoder", "talker.model", "mtp", "vit")
    for tower in towers:
        tensors = renamed(tiny.tensors_of(CASE), "base_model.model.model.", f"{tower}.")
        with pytest.raises(AdapterError, match="bound 0 of 16"):
            bind(tensors, tiny.config_of(CASE))
        both = {**tiny.tensors_of(CASE), **tensors}
        with pytest.raises(AdapterError, match="16 of 32 tensors can't be served"):
            bind(both, tiny.config_of(CASE))
        excused = bind(both, tiny.config_of(CASE), ReadOptions(skip=(f"^{tower}",)))
        tiny.assert_same(excused, expected)


def test_a_module_with_two_names_is_one_place() -> None:
    site = linear_site("model.layers.0.mlp.gate", 8, 4, "router")
    site = type(site)(site.name, site.kind, site.projections, aliases=("model.layers.0.router",))
    spec = ModelSpec((site,))
    pair = {"lora_A.weight": torch.ones(2, 8), "lora_B.weight": torch.ones(4, 2)}
    for path in ("model.layers.0.mlp.gate", "model.layers.0.router", "layers.0.router"):
        bound = bind({f"{path}.{k}": t for k, t in pair.items()}, {"r": 2}, spec=spec)
        assert set(bound.factors) == {"model.layers.0.mlp.gate"}
    both = {f"{site.name}.{k}": t for k, t in pair.items()}
    both |= {f"model.layers.0.router.{k}": t for k, t in pair.items()}
    with pytest.raises(AdapterError, match="a second adapter for model"):
        bind(both, {"r": 2}, spec=spec)


def test_a_rank_over_the_banks_maximum_is_refused(expected: BoundAdapter) -> None:
    spec = tiny.spec_of("qwen3_moe")
    store = AdapterStore(
        AdapterBank(spec.sites, num_slots=2, max_rank=2, dtype=torch.float32, device="cpu")
    )
    with pytest.raises(AdapterError, match="rank 3, over the bank's maximum of 2"):
        store.add("x", expected)
    assert len(store) == 0


def test_a_layout_needs_only_what_the_adapter_targets() -> None:
    experts = expert_site("model.layers.1.mlp.experts", 4, 8, 6, WeightLayout())
    spec = ModelSpec((linear_site("model.layers.0.self_attn.q_proj", 8, 8), experts))
    pair = {"lora_A.weight": torch.ones(2, 8), "lora_B.weight": torch.ones(8, 2)}
    tensors = {f"model.layers.0.self_attn.q_proj.{k}": t for k, t in pair.items()}
    assert set(bind(tensors, {"r": 2}, spec=spec).factors) == {"model.layers.0.self_attn.q_proj"}


@pytest.mark.parametrize("alpha", [4e38, 1e300])
def test_a_scale_that_overflows_is_refused(alpha: float) -> None:
    with pytest.raises(AdapterError, match=r"the scale .* overflows"):
        bind(tiny.tensors_of(CASE), tiny.config_of(CASE, lora_alpha=alpha, r=1, rank_pattern={}))


def test_values_beyond_the_models_dtype_are_refused() -> None:
    spec = tiny.spec_of("qwen3_moe")
    tensors = dict(tiny.tensors_of(CASE))
    key = next(iter(tensors))
    tensors[key] = tensors[key] * 1e6
    bound = bind(tensors, tiny.config_of(CASE))
    store = AdapterStore(AdapterBank(spec.sites, num_slots=1, max_rank=4, dtype=torch.float16))
    with pytest.raises(AdapterError, match="beyond float16's range"):
        store.add("x", bound)
    assert len(store) == 0


def test_float32_values_beyond_bfloat16_are_refused_on_a_bfloat16_model() -> None:
    spec = tiny.spec_of("qwen3_moe")
    tensors = {key: tensor.clone() for key, tensor in tiny.tensors_of(CASE).items()}
    key = next(iter(tensors))
    tensors[key] = torch.full_like(tensors[key], 3.4e38)
    bound = bind(tensors, tiny.config_of(CASE))
    store = AdapterStore(AdapterBank(spec.sites, num_slots=1, max_rank=4, dtype=torch.bfloat16))
    with pytest.raises(AdapterError, match=r"beyond bfloat16's range of 3\.38.*in float32"):
        store.add("x", bound)
    assert len(store) == 0
    bound.factors[next(iter(bound.factors))].projections["down"].lora_A.fill_(float("nan"))
    with pytest.raises(AdapterError, match="NaN or infinite values"):
        store.add("x", bound)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16,) * 2])
@pytest.mark.parametrize("other", [torch.float16, torch.float32])
def test_experts_of_several_dtypes_keep_every_value(
    dtypes: tuple[torch.dtype, torch.dtype], other: torch.dtype
) -> None:
    values = (1 + 2**-10, 2.0**20)  # an A that bfloat16 would round, a B that float16 can't hold
    tensors = {}
    for expert, (dtype_a, dtype_b) in enumerate([dtypes, (other, torch.float32), dtypes]):
        path = f"model.layers.0.mlp.experts.{expert}.down_proj"
        rank = 1 + expert % 2
        tensors[f"{path}.lora_A.weight"] = torch.full((rank, 16), values[0]).to(dtype_a)
        tensors[f"{path}.lora_B.weight"] = torch.full((24, rank), values[1]).to(dtype_b)
    bound = bind(tensors, {"r": 1})
    factors = bound.factors["model.layers.0.mlp.experts"]
    factor = factors.projections["down"]
    for expert in range(3):
        path, rank = f"model.layers.0.mlp.experts.{expert}.down_proj", 1 + expert % 2
        found_a = factor.lora_A[factors.entry(expert), :rank]
        found_b = factor.lora_B[factors.entry(expert), :, :rank]
        assert torch.equal(found_a.double(), tensors[f"{path}.lora_A.weight"].double())
        assert torch.equal(found_b.double(), tensors[f"{path}.lora_B.weight"].double())


def test_a_refusal_stays_short_however_many_tensors_are_refused() -> None:
    tensors = {
        f"model.layers.0.mlp.experts.{100 + e}.{p}_proj.lora_{x}.weight": torch.ones(2, 2)
        for e in range(50)
        for p in ("gate", "up", "down")
        for x in "AB"
    }
    with pytest.raises(AdapterError, match="more reasons") as caught:
        bind({**tiny.tensors_of(CASE), **tensors}, tiny.config_of(CASE))
    assert len(str(caught.value)) < 3000


def test_a_linear_for_a_matrix_of_exchanged_sizes_is_refused() -> None:
    spec = ModelSpec((linear_site("model.layers.0.self_attn.q_proj", 8, 4),))
    pair = {"lora_A.weight": torch.ones(2, 4), "lora_B.weight": torch.ones(8, 2)}
    with pytest.raises(AdapterError, match=r"it is for a 4 -> 8 matrix.* is 8 -> 4"):
        bind({f"{spec.sites[0].name}.{k}": t for k, t in pair.items()}, {"r": 2}, spec=spec)


#: One module per layout that reads lora_A and lora_B.
MODULES = {
    "per_expert": "model.layers.0.mlp.experts.0.up_proj",
    "per_projection": "model.layers.0.mlp.experts.up_proj",
    "peft_fused": "model.layers.0.mlp.experts",
    "linear": "model.layers.0.self_attn.q_proj",
    "router": "model.layers.0.mlp.gate",
    "fused_linear": "model.layers.0.self_attn.qkv_proj",
}


@pytest.mark.parametrize("shape_b", [(), (3,), (16, 3)])
@pytest.mark.parametrize("shape_a", [(), (3,), (3, 24, 16)])
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_factors_with_other_dimensions_are_refused_by_name(
    module: str, shape_a: tuple[int, ...], shape_b: tuple[int, ...]
) -> None:
    pair = {f"{module}.lora_A.weight": shape_a, f"{module}.lora_B.weight": shape_b}
    tensors = {key: torch.ones(shape) for key, shape in pair.items()}
    bound = bind_source(make_source(tensors, {}), tiny.spec_of("qwen3_moe"))
    assert bound.report.bound == 0 and set(bound.report.refused) == set(tensors)
    assert all(bound.report.refused.values()) and not bound.factors
