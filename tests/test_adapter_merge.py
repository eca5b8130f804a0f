"""Merged checkpoints: loaded by transformers they equal the served adapter and PEFT's merge."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from moegraft.adapters import BoundAdapter, ModelSpec, bind, make_source
from moegraft.adapters.merge import Merged, merge
from moegraft.errors import AdapterError
from moegraft.hosts.transformers import model_spec
from moegraft.sites import expert_site
from moegraft.testing import assert_bit_equal, assert_close, relative_error
from moegraft.types import WeightLayout
from stacked import CONFIG, experts_of, random_pairs, stacked_form
from tiny_grafts import graft_of, new_graft, prompts

TOLERANCE = 1e-5
MODELS = tiny.FIXTURES / "models"


def merged_folder(case: str, out: Path, model_folder: Path | None = None) -> Merged:
    """Merge a fixture into its model."""
    model = tiny.model_of(case)
    folder = model_folder or MODELS / model
    return merge(folder, tiny.bound_case(case), tiny.spec_of(model), out)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """What transformers makes of a folder; every tensor must have found its place."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def in_one_parameter(model: str, out: Path, out_major: bool) -> Path:
    """A checkpoint with all experts in one parameter, as the model holds them or transposed."""
    state = {k: v.clone().contiguous() for k, v in tiny.base_model(model).state_dict().items()}
    for key, value in state.items():
        if ".experts." in key and not out_major:
            state[key] = value.transpose(1, 2).contiguous()
    out.mkdir()
    shutil.copy(MODELS / model / "config.json", out)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out


def sharded(model: str, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The model in many small files with an index, as save_pretrained makes them."""
    tiny.new_model(model, dtype).save_pretrained(out, max_shard_size="10KB")
    assert len(list(out.glob("*.safetensors"))) > 2
    return out


@pytest.mark.parametrize("case", tiny.SERVED_CASES)
def test_transformers_loads_the_merged_weights_of_peft(case: str, tmp_path: Path) -> None:
    merged_folder(case, tmp_path / "out")
    model, expected = loaded(tmp_path / "out"), tiny.merged_parameters(case)
    base = tiny.base_model(tiny.model_of(case))
    for key, value in model.state_dict().items():
        if key in expected:
            assert relative_error(value, expected[key]) <= TOLERANCE, key
        else:
            assert_bit_equal(value, base.state_dict()[key], key)


@pytest.mark.parametrize("model", tiny.MODELS)
def test_the_merged_model_says_what_the_served_adapter_says(model: str, tmp_path: Path) -> None:
    case = f"peft/0.21.2/{model}/experts"
    merged_folder(case, tmp_path / "out")
    inputs = prompts(3)
    served = graft_of(model).forward(**inputs, adapters=case).logits
    with torch.no_grad():
        merged = loaded(tmp_path / "out")(**inputs).logits
        base = tiny.base_model(model)(**inputs).logits
    mask = inputs["attention_mask"].bool()
    assert_close(served[mask], merged[mask], torch.float32)
    assert relative_error(merged[mask], base[mask]) > 0.05


@pytest.mark.parametrize("half", ["gate", "up", "down"])
@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_each_half_goes_to_its_own_rows(model: str, half: str, tmp_path: Path) -> None:
    site = experts_of(model)
    tensors = stacked_form(site, random_pairs(site, names=(half,)))
    spec = tiny.spec_of(model)
    merge(MODELS / model, bind(make_source(tensors, CONFIG), spec), spec, tmp_path / "out")
    graft = new_graft(model)
    graft.load_tensors("half", tensors, CONFIG)
    inputs = prompts(2)
    served = graft.forward(**inputs, adapters="half").logits
    with torch.no_grad():
        merged = loaded(tmp_path / "out")(**inputs).logits
    mask = inputs["attention_mask"].bool()
    assert_close(served[mask], merged[mask], torch.float32)


@pytest.mark.parametrize("out_major", [True, False])
@pytest.mark.parametrize("model", ["qwen3_moe", "olmoe"])
def test_experts_in_one_parameter_are_merged_in_the_order_of_the_file(
    model: str, out_major: bool, tmp_path: Path
) -> None:
    case = f"peft/0.21.2/{model}/experts"
    source = in_one_parameter(model, tmp_path / "in", out_major)
    merged_folder(case, tmp_path / "out", source)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in tiny.merged_parameters(case).items():
        got = found[key].transpose(1, 2) if ".experts." in key and not out_major else found[key]
        assert relative_error(got, value) <= TOLERANCE, key


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_shards_stay_the_same_files_with_the_same_index(model: str, tmp_path: Path) -> None:
    case = f"peft/0.21.2/{model}/experts"
    source = sharded(model, tmp_path / "in")
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"old")
    merged = merged_folder(case, tmp_path / "out", source)
    names = {p.name for p in source.iterdir()} - {"pytorch_model.bin"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names
    assert set(merged.files) == {p.name for p in source.glob("*.safetensors")}
    index = "model.safetensors.index.json"
    assert (source / index).read_bytes() == (tmp_path / "out" / index).read_bytes()
    for name in merged.files:
        before, after = load_file(source / name), load_file(tmp_path / "out" / name)
        for key, value in before.items():
            assert torch.equal(value, after[key]) == (key not in merged.changed), key
    expected = tiny.merged_parameters(case)
    for key, value in loaded(tmp_path / "out").state_dict().items():
        if key in expected:
            assert relative_error(value, expected[key]) <= TOLERANCE, key


def test_a_bf16_checkpoint_is_rounded_once(tmp_path: Path) -> None:
    case, model = tiny.EXPERTS, "qwen3_moe"
    source = sharded(model, tmp_path / "in", torch.bfloat16)
    merged_folder(case, tmp_path / "out", source)
    deltas = tiny.all_deltas(tiny.bound_case(case), tiny.spec_of(model))
    base = tiny.base_model(model, torch.bfloat16).state_dict()
    for key, value in loaded(tmp_path / "out", torch.bfloat16).state_dict().items():
        expected = (base[key].float() + deltas[key]).bfloat16() if key in deltas else base[key]
        assert_bit_equal(value, expected, key)


def test_experts_without_a_factor_keep_their_bits(tmp_path: Path) -> None:
    merged = merged_folder("per_expert/mixtral/subset", tmp_path / "out")
    touched = {key.split("experts.")[1].partition(".")[0] for key in merged.changed}
    assert touched == {"0", "2"}
    assert len(merged.changed) == 2 * 2 * 3 and merged.total == 41


def bound_down(model: str, factor: float = 1.0) -> BoundAdapter:
    """An adapter on down of the first layer."""
    site = experts_of(model)
    tensors = stacked_form(site, random_pairs(site, names=("down",)))
    source = make_source({key: factor * tensor for key, tensor in tensors.items()}, CONFIG)
    return bind(source, tiny.spec_of(model))


def refused(model_folder: Path, bound: BoundAdapter, out: Path, model: str) -> str:
    """The one-line reason of a refusal that leaves nothing behind."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(AdapterError) as caught:
        merge(model_folder, bound, tiny.spec_of(model), out)
    assert sorted(out.parent.iterdir()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_checkpoints_that_can_not_take_the_delta_are_refused(tmp_path: Path) -> None:
    model, bound, out = "gpt_oss", bound_down("gpt_oss"), tmp_path / "out"
    source = tmp_path / "in"
    shutil.copytree(MODELS / model, source)
    weights = load_file(source / "model.safetensors")
    key = "model.layers.0.mlp.experts.down_proj"

    def store(**changes: torch.Tensor) -> None:
        kept = {k: v for k, v in {**weights, **changes}.items() if v.numel()}
        save_file(kept, source / "model.safetensors", metadata={"format": "pt"})

    store(**{key: weights[key].to(torch.int8)})
    assert "stored as I8" in refused(source, bound, out, model)
    store(**{key: torch.empty(0)})
    lost = refused(source, bound, out, model)
    assert "no weight that is known as model.layers.0.mlp.experts down of expert 0" in lost
    store(**{key: weights[key][:, :, :7].contiguous()})
    assert "has shape (4, 20, 7)" in refused(source, bound, out, model)
    store(**{key: weights[key].transpose(1, 2).contiguous()})
    assert "shapes of both orders" in refused(source, bound, out, model)
    store(**{key: weights[key].half()})
    assert "overflows F16" in refused(source, bound_down(model, 1000.0), out, model)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps(config))
    assert "is quantised (mxfp4)" in refused(source, bound, out, model)


@pytest.mark.parametrize(
    ("width", "cut", "reason"),
    [
        (8, 0, "experts have square matrices only"),
        (6, 200, "up_proj: the file ends before it does"),
    ],
)
def test_square_stacks_and_short_files_are_refused(
    width: int, cut: int, reason: str, tmp_path: Path
) -> None:
    site = expert_site("layers.0.mlp.experts", 2, 8, width, WeightLayout("no_gate"))
    spec, source = ModelSpec((site,)), tmp_path / "in"
    tensors = stacked_form(site, random_pairs(site, names=("up",)), {"up": "w1"})
    bound = bind(make_source(tensors, CONFIG), spec)
    source.mkdir()
    (source / "config.json").write_text("{}")
    weights = {f"{site.name}.up_proj": torch.zeros(2, width, 8)}
    save_file(weights, source / "model.safetensors")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[: len(whole) - cut])
    with pytest.raises(AdapterError, match=reason):
        merge(source, bound, spec, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_head_that_is_tied_to_the_embedding_is_not_merged(tmp_path: Path) -> None:
    source = tmp_path / "in"
    config = AutoConfig.from_pretrained(MODELS / "qwen3_moe", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(source)
    spec = model_spec(model)
    pair = {"lm_head.lora_A": torch.ones(3, 24), "lm_head.lora_B": torch.ones(64, 3)}
    bound = bind(make_source(pair, CONFIG), spec)
    with pytest.raises(AdapterError, match=r"known as lm_head linear.* tied to the embedding"):
        merge(source, bound, spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    model, bound, out = "gpt_oss", bound_down("gpt_oss"), tmp_path / "out"
    assert "config.json" in refused(tmp_path / "none", bound, out, model)
    (source := tmp_path / "in").mkdir()
    shutil.copy(MODELS / model / "config.json", source)
    assert "lacks model.safetensors" in refused(source, bound, out, model)
    (source / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "not a readable safetensors file" in refused(source, bound, out, model)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    assert "outside of its folder" in refused(source, bound, out, model)
    for text in ("[]", '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        assert "not a readable index" in refused(source, bound, out, model)
    (tmp_path / "there").mkdir()
    assert "exists already" in refused(MODELS / model, bound, tmp_path / "there", model)


def test_a_merge_needs_the_memory_of_one_tensor_not_of_the_model(tmp_path: Path) -> None:
    code = f"""
import torch
from pathlib import Path
from safetensors.torch import save_file
from moegraft.adapters import ModelSpec, bind, make_source
from moegraft.adapters.merge import merge
from moegraft.sites import expert_site
folder = Path({str(tmp_path)!r}) / "in"
folder.mkdir()
(folder / "config.json").write_text("{{}}")
E, H, I = 64, 512, 256
spec = ModelSpec((expert_site("layers.0.mlp.experts", E, H, I),))
weights = {{"layers.0.mlp.experts.gate_up_proj": torch.zeros(E, 2 * I, H)}}
weights["layers.0.mlp.experts.down_proj"] = torch.zeros(E, H, I)
save_file(weights, folder / "model.safetensors")
size = sum(t.numel() * 4 for t in weights.values())
tensors = {{"layers.0.mlp.experts.w2.lora_A": torch.ones(E, 2, I)}}
tensors["layers.0.mlp.experts.w2.lora_B"] = torch.ones(E, H, 2)
bound = bind(make_source(tensors, {{"r": 2}}), spec)
del weights
balloon = int(open("/proc/self/statm").read().split()[1]) * 4096
peak = []
real = torch.frombuffer
def watched(*a, **k):
    peak.append(int(open("/proc/self/statm").read().split()[1]) * 4096)
    return real(*a, **k)
torch.frombuffer = watched
merge(folder, bound, spec, folder.parent / "out")
print(size, max(peak) - balloon, len(peak))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, grown, reads = map(int, done.stdout.split())
    assert size == 64 * 512 * 256 * 3 * 4 and reads == 64
    assert grown < size / 4
