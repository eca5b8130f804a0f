"""A tiny random Qwen3-MoE, adapters of every kind for it, and the models that they are merged into.

Files are written as their programs write them: attention and fused experts by PEFT itself, the
others tensor by tensor. Merged weights are computed here, from the formula, in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

E, H, INNER, LAYERS, VOCAB = 8, 64, 32, 2, 512
RANK, ALPHA = 4, 8.0
SCALE = ALPHA / RANK
BASE = "base"
ALL_KINDS = ("attention", "fused", "per_expert", "half", "shared_outer")
_EXPERTS = "base_model.model.model.layers.{}.mlp.experts"

Tensors = dict[str, torch.Tensor]


class Models:
    """Folders under ``root``: ``base``, one per adapter, and ``NAME-merged``.

    Example: ``Models(path).adapter("half")`` is the folder of an adapter over half of the experts.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / BASE
        _new_model().save_pretrained(self.base)
        self._write_peft("attention", 1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        self._write_peft("fused", 2, target_modules=["q_proj"], target_parameters=parameters)
        self._write("per_expert", 3, lambda add: _per_expert(add, range(E)))
        self._write("half", 4, lambda add: _per_expert(add, range(0, E, 2)))
        self._write("shared_outer", 5, _shared_outer)

    def adapter(self, name: str) -> Path:
        """The folder of an adapter."""
        return self.root / name

    @cache  # noqa: B019 - one object per session
    def merged(self, name: str) -> Any:
        """The transformers model that an adapter gives, or the base model."""
        folder = self.base if name == BASE else self.root / f"{name}-merged"
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, name: str, prompt: list[int], tokens: int) -> list[int]:
        """What the merged model writes after a prompt."""
        with torch.no_grad():
            ids = self.merged(name).generate(
                torch.tensor([prompt]),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        return ids[0, len(prompt) :].tolist()

    def _write_peft(self, name: str, seed: int, **targets: Any) -> None:
        torch.manual_seed(seed)
        wrapped = get_peft_model(
            AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32),
            LoraConfig(r=RANK, lora_alpha=int(ALPHA), **targets),
        )
        for key, parameter in wrapped.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        wrapped.save_pretrained(self.adapter(name))
        wrapped.merge_and_unload().save_pretrained(self.root / f"{name}-merged")

    def _write(self, name: str, seed: int, fill: Callable[[_Writer], None]) -> None:
        writer = _Writer(AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32), seed)
        fill(writer)
        write_adapter(self.adapter(name), writer.tensors)
        writer.model.save_pretrained(self.root / f"{name}-merged")


def write_adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Write an adapter's two files."""
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    names = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**known, **names, **config}))
    return folder


class _Writer:
    """Collects factors, and adds what they say to a model."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model = model
        self.tensors: Tensors = {}
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> torch.Tensor:
        """Values of an adapter."""
        return torch.randn(*shape, generator=self._generator) * 0.1

    def put(self, name: str, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        """Write a pair of tensors."""
        self.tensors[f"{name}.lora_A.weight"] = lora_a.contiguous()
        self.tensors[f"{name}.lora_B.weight"] = lora_b.contiguous()

    def merge(
        self, layer: int, expert: int, side: str, lora_a: torch.Tensor, lora_b: torch.Tensor
    ) -> None:
        """Add ``scale * B A`` to one expert's matrix."""
        experts = self.model.model.layers[layer].mlp.experts
        weight = experts.down_proj if side == "down" else experts.gate_up_proj
        rows = {"gate": slice(0, INNER), "up": slice(INNER, 2 * INNER), "down": slice(0, H)}[side]
        weight.data[expert, rows] += SCALE * lora_b @ lora_a


_SIZES = {"gate": (H, INNER), "up": (H, INNER), "down": (INNER, H)}


def _per_expert(writer: _Writer, experts: Iterable[int]) -> None:
    chosen = list(experts)
    for layer in range(LAYERS):
        for expert in chosen:
            for side, (num_in, num_out) in _SIZES.items():
                lora_a, lora_b = writer.random(RANK, num_in), writer.random(num_out, RANK)
                writer.put(f"{_EXPERTS.format(layer)}.{expert}.{side}_proj", lora_a, lora_b)
                writer.merge(layer, expert, side, lora_a, lora_b)


def _shared_outer(writer: _Writer) -> None:
    for layer in range(LAYERS):
        for side, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            num_in, num_out = _SIZES[side]
            lora_a = writer.random(E if side == "down" else 1, RANK, num_in)
            lora_b = writer.random(1 if side == "down" else E, num_out, RANK)
            writer.put(f"{_EXPERTS.format(layer)}.{name}", lora_a, lora_b)
            for expert in range(E):
                a = lora_a[expert if side == "down" else 0]
                b = lora_b[0 if side == "down" else expert]
                writer.merge(layer, expert, side, a, b)


def _new_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=H,
        intermediate_size=2 * H,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=E,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # wide enough that tokens depend on everything
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() == 3 else 0.15)
    return model
