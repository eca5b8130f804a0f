"""What ``bench load`` loads: a large expert adapter in a file, and many small ones in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from moegraft.adapters import ModelSpec
from moegraft.adapters.read import CONFIG_FILE, WEIGHTS_FILE
from moegraft.errors import MoegraftError
from moegraft.sites import expert_site, linear_site

_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class LoadCase:
    """Sizes of the model and of the large adapter, bf16.

    Example: the default is Qwen3-30B-A3B at rank 16: 36,864 tensors of single experts, 1.66 GB.
    """

    layers: int = 48
    experts: int = 128
    hidden: int = 2048
    intermediate: int = 768
    rank: int = 16

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "hidden", "intermediate", "rank"):
            if getattr(self, name) < 1:
                raise MoegraftError(f"--{name} must be at least 1, got {getattr(self, name)}.")

    @property
    def spec(self) -> ModelSpec:
        """The model's sites: experts and attention of every layer."""
        sites = []
        for i in range(self.layers):
            path = f"model.layers.{i}"
            sites += [
                linear_site(f"{path}.self_attn.{name}", self.hidden, self.hidden)
                for name in _LINEARS
            ]
            experts = f"{path}.mlp.experts"
            sites.append(expert_site(experts, self.experts, self.hidden, self.intermediate))
        return ModelSpec(tuple(sites))

    @property
    def config(self) -> dict[str, object]:
        """The JSON of every adapter's config."""
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.rank}

    def write(self, folder: Path) -> Path:
        """Write the large adapter with a pair of tensors per expert; returns its folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(self.layers):
            stacked = self.stacked(layer)
            for projection, (lora_a, lora_b) in stacked.items():
                for expert in range(self.experts):
                    path = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}"
                    name = f"{path}.{_NAMES[projection]}"
                    tensors[f"{name}.lora_A.weight"] = lora_a[expert].clone()
                    tensors[f"{name}.lora_B.weight"] = lora_b[expert].clone()
        try:
            save_file(tensors, folder / WEIGHTS_FILE)
            (folder / CONFIG_FILE).write_text(json.dumps(self.config))
        except OSError as error:
            raise MoegraftError(f"The adapter can't be written to {folder}: {error}.") from error
        return folder

    def stacked(self, layer: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return one layer's factors: projection -> A ``[E, r, in]``, B ``[E, out, r]``."""
        generator = torch.Generator().manual_seed(layer)
        e, h, i, r = self.experts, self.hidden, self.intermediate, self.rank
        found = {}
        for projection, (num_in, num_out) in {"gate": (h, i), "up": (h, i), "down": (i, h)}.items():
            a, b = (
                torch.randint(-(1 << 15), 1 << 15, size, generator=generator, dtype=torch.int16)
                for size in ((e, r, num_in), (e, num_out, r))
            )
            # Uniform values in steps of 2^-23; a normal distribution takes ten times as long.
            found[projection] = ((a * 2.0**-23).bfloat16(), (b * 2.0**-23).bfloat16())
        return found

    def stacked_tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the large adapter as 3-D tensors per projection, on a device."""
        return {
            f"model.layers.{layer}.mlp.experts.{_NAMES[projection]}.{leaf}.weight": tensor.to(
                device
            )
            for layer in range(self.layers)
            for projection, pair in self.stacked(layer).items()
            for leaf, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
        }

    def single_experts(self, stacked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return :meth:`stacked_tensors` as tensors of single experts, each in its own memory."""
        return {
            name.replace(".experts.", f".experts.{expert}."): tensor[expert].clone()
            for name, tensor in stacked.items()
            for expert in range(self.experts)
        }

    def small(self, seed: int) -> dict[str, torch.Tensor]:
        """Return a small adapter: rank 4 on every second attention projection."""
        generator = torch.Generator().manual_seed(seed)
        return {
            f"model.layers.{layer}.self_attn.{name}.lora_{leaf}.weight": torch.randn(
                (4, self.hidden) if leaf == "A" else (self.hidden, 4), generator=generator
            ).bfloat16()
            for layer in range(self.layers)
            for name in _LINEARS[::2]
            for leaf in "AB"
        }
