"""Tiny checkpoints with quantised experts, in the layouts of the programs that write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import moegraft
from families import adapter_for, merged
from moegraft.adapters import bind, make_source
from moegraft.hosts.transformers import load_quantised, model_spec
from moegraft.quant import format_of
from moegraft.quant.checkpoint import place_of
from moegraft.quant.matrices import dequantise, quantise
from moegraft.testing import assert_close

IDS = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=40,
    max_position_embeddings=64,
    num_experts_per_tok=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
#: Model type -> config. Half a block of 128 is left over in H and I.
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=4, moe_intermediate_size=192, intermediate_size=40),
    "gpt_oss": dict(num_local_experts=4, intermediate_size=192, swiglu_limit=0.5),
    "mixtral": dict(num_local_experts=4, intermediate_size=192),
    "deepseek_v3": dict(
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=2,
        first_k_dense_replace=1,
        moe_intermediate_size=192,
        intermediate_size=256,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=24,
        v_head_dim=40,
        head_dim=16,
    ),
    "nemotron_h": dict(
        layers_block_type=["attention", "moe"],
        n_routed_experts=4,
        n_group=2,
        topk_group=2,
        moe_intermediate_size=192,
        moe_shared_expert_intermediate_size=40,
        intermediate_size=40,
    ),
}


def make_model(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model with seeded weights."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **TYPES[model_type]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def save(model: Any, folder: Path) -> Path:
    """Save as transformers does."""
    model.save_pretrained(folder)
    return folder


def rewrite(
    folder: Path, out: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
) -> Path:
    """A copy of a folder whose tensors are changed one by one, as one file."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for key, tensor in load_file(path).items():
            tensors.update(change(key, tensor))
    save_file(tensors, out / "model.safetensors")
    return out


def set_config(folder: Path, **values: Any) -> None:
    """Set fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def block_fp8(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every matrix of attention and experts as DeepSeek stores them."""
    if tensor.dim() != 2 or not ("_proj" in key or "experts" in key):
        return {key: tensor}
    found = quantise(tensor, format_of("fp8-block"))
    return {key: found.values, f"{key}_scale_inv": found.scales}


def nvfp4_of_compressed_tensors(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts as compressed-tensors stores NVFP4, with a scale of static activations."""
    if place_of(key) is None:
        return {key: tensor}
    found = quantise(tensor, format_of("nvfp4"))
    assert found.global_scale is not None
    stem = key.removesuffix(".weight")
    return {
        f"{stem}.weight_packed": found.values,
        f"{stem}.weight_scale": found.scales,
        f"{stem}.weight_global_scale": (1.0 / found.global_scale).reshape(1),
        f"{stem}.input_global_scale": torch.tensor([7.0]),
    }


def rounded(model: Any, name: str, dense: bool = False) -> Any:
    """Round a model's weights to what a format holds: experts, and other matrices if ``dense``."""
    found = format_of(name)
    with torch.no_grad():
        for path, module in model.named_modules():
            if hasattr(module, "_apply_gate"):
                for leaf in ("gate_up_proj", "up_proj", "down_proj"):
                    parameter = module._parameters.get(leaf)
                    if parameter is not None:
                        _round_experts(parameter, leaf, module, found)
            elif dense and isinstance(module, torch.nn.Linear) and "_proj" in path:
                module.weight.copy_(dequantise(quantise(module.weight, found), found))
    return model


def _round_experts(parameter: torch.Tensor, leaf: str, module: Any, found: Any) -> None:
    halves = 2 if leaf == "gate_up_proj" and module.is_concatenated else 1
    for matrix in parameter:
        turned = matrix.T if module.is_transposed else matrix
        parts = [dequantise(quantise(part, found), found) for part in turned.chunk(halves)]
        new = torch.cat(parts)
        matrix.copy_(new.T if module.is_transposed else new)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def check_served(folder: Path, expected: Any, weight_format: str | None = None) -> Any:
    """Check a loaded model with an adapter against a plain one with the stored values."""
    model = load_quantised(folder, dtype=torch.float32, weight_format=weight_format)
    graft = moegraft.attach(model)
    tensors = adapter_for(graft.spec, 1)
    graft.load_tensors("a", tensors, {"r": 3, "lora_alpha": 6})
    bound = bind(make_source(tensors, {"r": 3, "lora_alpha": 6}), model_spec(expected))
    found = graft.forward(input_ids=IDS, adapters=["a", None, "a"]).logits
    base = logits(expected)
    with_adapter = logits(merged(expected, bound))
    assert_close(found[1], base[1], torch.float32)
    assert_close(found[0], with_adapter[0], torch.float32)
    assert (with_adapter - base)[0].norm() > 0.1 * base[0].norm()
    return graft
