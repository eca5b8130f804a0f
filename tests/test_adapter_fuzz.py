"""Any keys, shapes and configs: an adapter binds, is reported, or is an AdapterError; no crash."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tiny
from moegraft.adapters import AdapterBank, AdapterStore, ReadOptions, bind, check_bound, make_source
from moegraft.errors import AdapterError

MODULES = st.sampled_from(
    [
        "model.layers.0.mlp.experts",
        "model.layers.0.mlp.experts.base_layer",
        "model.layers.0.mlp.experts.base_layer.base_layer",
        *(f"model.layers.0.mlp.experts.{e}.{p}_proj" for e in (0, 3, 4) for p in ("up", "down")),
        *(f"model.layers.0.mlp.experts.{n}" for n in ("w1", "w2", "up_proj", "gate_up_proj")),
        "model.layers.0.block_sparse_moe.experts.1.w1",
        "model.layers.0.mlp.gate",
        "model.layers.0.self_attn.q_proj",
        "visual.layers.0.self_attn.q_proj",
        "model.embed_tokens",
        "lm_head",
        "experts",
        "layers.0.experts",
        "",
    ]
)
PREFIXES = st.sampled_from(["", "base_model.model.", "base_model.", "model.language_model."])
LEAVES = st.sampled_from(
    [
        *("lora_A.weight", "lora_B.weight", "lora_A.default.weight", "lora_B.other.weight"),
        *("lora_A", "lora_B.bias", "lora_magnitude_vector", "lora_embedding_A", "weight", "bias"),
    ]
)
KEYS = st.one_of(
    st.builds(lambda p, m, leaf: f"{p}{m}.{leaf}", PREFIXES, MODULES, LEAVES),
    st.text(max_size=30),
)
SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 12, 16, 24, 32])
SHAPES = st.lists(SIZES, max_size=4).map(tuple)
TENSORS = st.dictionaries(KEYS, SHAPES.map(lambda shape: torch.ones(shape)), max_size=8)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(10**400)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters"),
        *("peft_version", "peft_type", "lora_B_layout", "auto_mapping", "layer_replication"),
        *("init_lora_weights", "modules_to_save", "bias", "veomni_lora"),
    ]
)
CONFIGS = st.dictionaries(FIELDS, VALUES, max_size=6)
OPTIONS = st.builds(
    ReadOptions,
    orientation=st.sampled_from([None, "normal", "swapped"]),
    expert_b_layout=st.sampled_from([None, "rank_major", "grouped_by_expert"]),
    gate_up_rows=st.sampled_from([None, "concatenated", "interleaved"]),
    skip=st.sampled_from([(), ("q_proj",), (r"experts\.3",)]),
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ONE_RANK_ZERO = {
    "model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(0, 24),
    "model.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(16, 0),
}
ONE_EXPERT_RANK_ZERO = {
    "model.layers.0.mlp.experts.0.up_proj.lora_A.weight": torch.ones(0, 24),
    "model.layers.0.mlp.experts.0.up_proj.lora_B.weight": torch.ones(16, 0),
}
UP = "model.layers.0.mlp.experts.0.up_proj"
NO_DIMENSIONS = {f"{UP}.lora_{x}.weight": torch.ones(()) for x in "AB"}
ONE_DIMENSION = {f"{UP}.lora_{x}.weight": torch.ones(3) for x in "AB"}
#: Three and one dimension, whose sizes read in a row are those of a good pair.
THREE_AND_ONE = {
    f"{UP}.lora_A.weight": torch.ones(3, 24, 16),
    f"{UP}.lora_B.weight": torch.ones(3),
}


def try_to_load(tensors: dict[str, Any], config: dict[str, Any], options: ReadOptions) -> None:
    """All that a load does; every tensor must be accounted for."""
    spec = tiny.spec_of("qwen3_moe")
    bank = AdapterBank(spec.sites, num_slots=1, max_rank=8, dtype=torch.float32)
    store = AdapterStore(bank)
    try:
        bound = bind(make_source(tensors, config), spec, options)
        report = bound.report
        assert report.bound + len(report.refused) + len(report.skipped) == report.total
        assert all(report.refused.values())
        report.summary()
        check_bound(report, spec)
        store.add("x", bound)
    except AdapterError as error:
        assert str(error) and len(store) == 0
        return
    with store.use(["x"]):
        assert store.info("x").slot == 0


@QUICK
@example(ONE_RANK_ZERO, {}, ReadOptions())
@example(ONE_EXPERT_RANK_ZERO, {}, ReadOptions())
@example(NO_DIMENSIONS, {}, ReadOptions())
@example(ONE_DIMENSION, {}, ReadOptions())
@example(THREE_AND_ONE, {}, ReadOptions())
@given(TENSORS, CONFIGS, OPTIONS)
def test_any_keys_shapes_and_config_end_in_a_report_or_an_adapter_error(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], options: ReadOptions
) -> None:
    try_to_load(tensors, config, options)


@QUICK
@example((4, 3, 24), (1, 32, 3), False, {})
@given(SHAPES, SHAPES, st.booleans(), CONFIGS)
def test_3d_factors_of_any_shape_and_config_end_in_a_report_or_an_adapter_error(
    shape_a: tuple[int, ...], shape_b: tuple[int, ...], marked: bool, config: dict[str, Any]
) -> None:
    module = "model.layers.0.mlp.experts.gate_up_proj"
    pair = {
        f"{module}.lora_{x}": torch.ones(s) for x, s in zip("AB", (shape_a, shape_b), strict=True)
    }
    mark = {"veomni_lora": {"moe_mode": "shared"}} if marked else {}
    try_to_load(pair, {**config, **mark}, ReadOptions())


@QUICK
@given(CONFIGS, OPTIONS)
def test_a_good_file_with_any_config_ends_in_a_report_or_an_adapter_error(
    config: dict[str, Any], options: ReadOptions
) -> None:
    try_to_load(tiny.tensors_of("peft/0.21.2/qwen3_moe/experts"), config, options)


@QUICK
@given(st.data(), OPTIONS)
def test_a_good_file_with_one_tensor_renamed_or_reshaped_never_binds_in_part(
    data: st.DataObject, options: ReadOptions
) -> None:
    tensors = dict(tiny.tensors_of("peft/0.21.2/qwen3_moe/router"))
    key = data.draw(st.sampled_from(sorted(tensors)))
    tensor = tensors.pop(key)
    if data.draw(st.booleans()):
        tensors[data.draw(KEYS)] = tensor
    else:
        tensors[key] = torch.ones(data.draw(SHAPES))
    try_to_load(tensors, {"r": 3, "lora_alpha": 6, "peft_version": "0.21.2"}, options)
