"""Quantised checkpoints of other programs become experts that run as they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import moegraft
from moegraft.errors import MoegraftError, UnsupportedError
from moegraft.hosts.transformers import load_quantised
from moegraft.quant import FORMATS, format_of
from moegraft.quant.checkpoint import Checkpoint
from moegraft.quant.experts import expert_matrix
from moegraft.quant.load import load_experts
from moegraft.quant.stored import LAYOUTS
from moegraft.quant.write import quantise_checkpoint
from moegraft.testing import LAYOUTS as WEIGHT_LAYOUTS
from moegraft.testing import assert_close
from quantised_models import (
    IDS,
    block_fp8,
    check_served,
    logits,
    make_model,
    nvfp4_of_compressed_tensors,
    rewrite,
    rounded,
    save,
    set_config,
)

#: Formats whose base products see the activations as they are.
A16 = [name for name, found in FORMATS.items() if found.activation_group is None]


@pytest.mark.parametrize("name", A16)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "nemotron_h"])
def test_what_quantise_writes_is_served_with_adapters(
    model_type: str, name: str, tmp_path: Path
) -> None:
    folder = save(make_model(model_type), tmp_path / "plain")
    written = quantise_checkpoint(folder, tmp_path / "out", name)
    expected = rounded(make_model(model_type), name)
    stored = None if name != "fp8-block-w8a16" else name
    graft = check_served(tmp_path / "out", expected, stored)
    weights = next(iter(graft.layers.values())).weights
    assert weights.weight_format == name and weights.dtype == torch.float32
    assert 0 < written.largest_error < (0.05 if format_of(name).bits == 8 else 0.2)
    assert written.expert_bytes < 0.36 * written.source_bytes


def test_w8a8_is_what_block_fp8_runs_as_unless_told(tmp_path: Path) -> None:
    folder = save(make_model("qwen3_moe"), tmp_path / "plain")
    quantise_checkpoint(folder, tmp_path / "out", "fp8-block")
    expected = logits(rounded(make_model("qwen3_moe"), "fp8-block"))
    found: dict[str | None, torch.Tensor] = {}
    for name in (None, "fp8-block-w8a16"):
        model = load_quantised(tmp_path / "out", dtype=torch.float32, weight_format=name)
        found[name] = moegraft.attach(model).forward(input_ids=IDS).logits
    assert_close(found["fp8-block-w8a16"], expected, torch.float32)
    error = (found[None] - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1
    with pytest.raises(MoegraftError, match="can't be read as 'nvfp4'"):
        load_quantised(tmp_path / "out", weight_format="nvfp4")


def test_a_checkpoint_as_deepseek_stores_it_attention_included(tmp_path: Path) -> None:
    folder = rewrite(save(make_model("deepseek_v3"), tmp_path / "plain"), tmp_path / "q", block_fp8)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    set_config(folder, quantization_config=config)
    expected = rounded(make_model("deepseek_v3"), "fp8-block", dense=True)
    check_served(folder, expected, "fp8-block-w8a16")


def test_nvfp4_of_compressed_tensors_divides_by_its_global_scale(tmp_path: Path) -> None:
    plain = save(make_model("qwen3_moe"), tmp_path / "plain")
    folder = rewrite(plain, tmp_path / "q", nvfp4_of_compressed_tensors)
    check_served(folder, rounded(make_model("qwen3_moe"), "nvfp4"))
    with Checkpoint(folder) as checkpoint:
        unused = checkpoint.experts()[0].unused
    assert len(unused) == 12 and all(key.endswith("input_global_scale") for key in unused)


def test_mxfp4_of_gpt_oss_with_interleaved_rows_biases_and_clamp(tmp_path: Path) -> None:
    plain = save(make_model("gpt_oss"), tmp_path / "plain")
    quantise_checkpoint(plain, tmp_path / "q", "mxfp4", interleaved=True, transposed=True)
    keys = load_file(tmp_path / "q" / "model-00001-of-00001.safetensors")
    assert keys["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (4, 384, 5, 16)
    assert keys["model.layers.0.mlp.experts.down_proj_scales"].shape == (4, 160, 6)
    graft = check_served(tmp_path / "q", rounded(make_model("gpt_oss"), "mxfp4"))
    weights = next(iter(graft.layers.values())).weights
    assert weights.layout == WEIGHT_LAYOUTS["interleaved"] and weights.gate_up_bias is not None
    with pytest.raises(MoegraftError, match="mxfp4 only"):
        quantise_checkpoint(plain, tmp_path / "x", "nvfp4", interleaved=True, transposed=True)


def test_blocks_of_gpt_oss_mean_what_transformers_makes_of_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = save(make_model("gpt_oss"), tmp_path / "plain")
    quantise_checkpoint(plain, tmp_path / "q", "mxfp4", interleaved=True, transposed=True)
    with Checkpoint(tmp_path / "q") as checkpoint:
        stored = checkpoint.experts()[1]
        weights = load_experts(checkpoint, stored, WEIGHT_LAYOUTS["interleaved"])
        for side in ("gate_up", "down"):
            parts = (
                checkpoint.get(f"{stored.path}.{side}_proj_{leaf}") for leaf in ("blocks", "scales")
            )
            theirs = convert_moe_packed_tensors(*parts, dtype=torch.float32)
            ours = torch.stack([expert_matrix(weights, side, e) for e in range(4)])  # type: ignore[arg-type]
            assert torch.equal(ours.transpose(1, 2), theirs)


def test_block_fp8_means_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    if not hasattr(Fp8Dequantize, "_dequantize_one"):
        pytest.skip("this transformers dequantises elsewhere")
    plain = save(make_model("qwen3_moe"), tmp_path / "plain")
    folder = rewrite(plain, tmp_path / "q", block_fp8)
    with Checkpoint(folder) as checkpoint:
        stored = checkpoint.experts()[0]
        weights = load_experts(checkpoint, stored, WEIGHT_LAYOUTS["gate_first"])
        key = f"{stored.path}.2.down_proj.weight"
        values, scales = checkpoint.get(key), checkpoint.get(f"{key}_scale_inv")
    try:
        theirs = Fp8Dequantize(None)._dequantize_one(
            values[:128, :128], scales[:1, :1], torch.float32
        )
    except TypeError:
        theirs = Fp8Dequantize(None)._dequantize_one(values[:128, :128], scales[:1, :1])
    assert torch.equal(expert_matrix(weights, "down", 2)[:128, :128], theirs.float())


def test_the_models_own_experts_take_no_memory(tmp_path: Path) -> None:
    folder = save(make_model("qwen3_moe"), tmp_path / "plain")
    quantise_checkpoint(folder, tmp_path / "q", "nvfp4")
    seen: list[tuple[int, int]] = []
    model = load_quantised(tmp_path / "q", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    experts = model.model.layers[0].mlp.experts
    assert all(parameter.is_meta for parameter in experts.parameters())
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    assert others and all(p.device.type == "cpu" and p.dtype == torch.bfloat16 for p in others)
    made = make_model("qwen3_moe").model.layers[0].mlp.experts
    assert not any(parameter.is_meta for parameter in made.parameters())


def test_unquantised_layers_beside_quantised_ones_keep_their_dtype(tmp_path: Path) -> None:
    plain = save(make_model("qwen3_moe"), tmp_path / "plain")

    def first_only(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return nvfp4_of_compressed_tensors(key, tensor) if "layers.0." in key else {key: tensor}

    folder = rewrite(plain, tmp_path / "q", first_only)
    expected, untouched = make_model("qwen3_moe"), make_model("qwen3_moe")
    rounded(expected, "nvfp4")
    expected.model.layers[1] = untouched.model.layers[1]
    graft = check_served(folder, expected)
    formats = [layer.weights.weight_format for layer in graft.layers.values()]
    assert formats == ["nvfp4", "unquantized"]


def test_tensors_without_a_place_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def more(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {key: tensor, key.replace("model.layers.1.", "mtp.layers.0."): tensor.clone()}
        return {**found, "model.layers.0.self_attn.k_scale": torch.ones(1)}

    folder = rewrite(save(make_model("qwen3_moe"), tmp_path / "plain"), tmp_path / "q", more)
    load_quantised(folder)
    assert "k_scale" in caplog.text and "no mtp.layers.0.mlp.experts" in caplog.text


def _drop(pattern: str) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
    return lambda key, tensor: {} if pattern in key else {key: tensor}


def _rename(old: str, new: str) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
    return lambda key, tensor: {key.replace(old, new): tensor}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_drop("experts.2."), "tensors of experts 0, 1, 3"),
        (_drop("experts.3.up_proj"), r"experts.3 has down, gate"),
        (_drop("layers.1.mlp.experts."), "no experts for model.layers.1"),
        (_drop("q_proj.weight"), "no tensors for 2 of the model's .*q_proj"),
        (_rename("experts.1.down_proj.weight", "experts.1.down_proj.qweight"), "AWQ or GPTQ"),
        (_rename("experts.1.down_proj.weight", "experts.1.down_proj.absmax"), "bitsandbytes"),
        (_rename("experts.1.down_proj.weight", "experts.1.down_proj.odd"), "no format known"),
        (
            lambda k, t: (
                {k: t.half()}
                if "experts.1.up" in k
                else {k: t[:, :8].clone()}
                if ".1.down" in k
                else {k: t}
            ),
            "another",
        ),
        (lambda k, t: block_fp8(k, t) if "experts.1.down" in k else {k: t}, "mixes formats"),
    ],
)
def test_broken_checkpoints_are_refused_by_name(change: Any, says: str, tmp_path: Path) -> None:
    folder = rewrite(save(make_model("qwen3_moe"), tmp_path / "plain"), tmp_path / "q", change)
    with pytest.raises(MoegraftError, match=says):
        load_quantised(folder)


def test_a_folder_without_files_or_with_a_bad_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoegraftError, match=r"no config\.json"):
        load_quantised(tmp_path)
    plain = save(make_model("qwen3_moe"), tmp_path / "plain")
    with pytest.raises(MoegraftError, match="no experts: no tensor's name"):
        quantise_checkpoint(
            rewrite(plain, tmp_path / "d", _drop("experts")), tmp_path / "x", "nvfp4"
        )
    (plain / "model.safetensors").write_bytes(b"no")
    with pytest.raises(MoegraftError, match="no readable safetensors"):
        load_quantised(plain)
    (plain / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b"}}))
    with pytest.raises(MoegraftError, match="weight_map"):
        load_quantised(plain)


def test_quantising_twice_or_over_something_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    plain = save(make_model("qwen3_moe"), tmp_path / "plain")
    quantise_checkpoint(plain, tmp_path / "q", "fp8-block")
    with pytest.raises(MoegraftError, match="stored as fp8-block already"):
        quantise_checkpoint(tmp_path / "q", tmp_path / "again", "nvfp4")
    with pytest.raises(MoegraftError, match="exists already"):
        quantise_checkpoint(plain, tmp_path / "q", "nvfp4")
    with pytest.raises(UnsupportedError, match="Blackwell"):
        quantise_checkpoint(plain, tmp_path / "again", "nvfp4-w4a4")

    def broken(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {key: tensor * float("nan") if "experts.3.up" in key else tensor}

    folder = rewrite(plain, tmp_path / "nan", broken)
    with pytest.raises(MoegraftError, match="not finite"):
        quantise_checkpoint(folder, tmp_path / "again", "nvfp4")
    assert not (tmp_path / "again").exists()


def test_files_are_cut_and_everything_else_is_copied(tmp_path: Path) -> None:
    plain = save(make_model("qwen3_moe"), tmp_path / "plain")
    (plain / "tokenizer.json").write_text("{}")
    written = quantise_checkpoint(plain, tmp_path / "q", "nvfp4", max_file_bytes=300_000)
    assert len(written.files) > 1
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(written.files)
    assert (tmp_path / "q" / "tokenizer.json").read_text() == "{}"
    assert not list((tmp_path / "q").glob("part-*"))
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4" and "lm_head" in config["ignore"]
    check_served(tmp_path / "q", rounded(make_model("qwen3_moe"), "nvfp4"))


def test_every_stored_layout_is_of_a_registered_format() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS) >= 8
