"""Under which names, and with which words in the config, a quantised checkpoint is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moegraft.quant.checkpoint import Checkpoint, StoredExperts, place_of
from moegraft.quant.formats import WeightFormat
from moegraft.quant.matrices import QuantisedMatrix

#: Part of an expert -> its name in checkpoints.
PROJECTIONS = {
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "gate_up": "gate_up_proj",
}


def leaves_of(
    name: str, matrix: QuantisedMatrix, weight_format: WeightFormat
) -> dict[str, torch.Tensor]:
    """Return one matrix's tensors under the names of the layout that is written."""
    if weight_format.name.startswith("fp8-block"):
        return {f"{name}.weight": matrix.values, f"{name}.weight_scale_inv": matrix.scales}
    if weight_format.name == "nvfp4":
        assert matrix.global_scale is not None
        return {
            f"{name}.weight": matrix.values,
            f"{name}.weight_scale": matrix.scales,
            f"{name}.weight_scale_2": matrix.global_scale,
        }
    value = "weight_packed" if weight_format.name == "mxfp4" else "weight"
    scales = matrix.scales
    if weight_format.name == "fp8-tensor":
        scales = scales.reshape(1)
    return {f"{name}.{value}": matrix.values, f"{name}.weight_scale": scales}


def quantization_config(
    checkpoint: Checkpoint, weight_format: WeightFormat, layers: tuple[StoredExperts, ...]
) -> dict[str, Any]:
    """Return what ``config.json`` says of the format, as the layout's own program writes it."""
    rest = sorted(
        key.removesuffix(".weight")
        for key in checkpoint.files
        if key.endswith(".weight")
        and place_of(key) is None
        and len(checkpoint.shape(key).shape) == 2
    )
    name = weight_format.name
    if name.startswith("fp8-block"):
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": list(weight_format.block),
            "modules_to_not_convert": rest,
        }
    if name == "nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": rest}
    if name == "mxfp4" and all(stored.fused for stored in layers):
        return {"quant_method": "mxfp4", "modules_to_not_convert": rest}
    weights: Mapping[str, Any] = {
        "fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        "fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
        "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    }[name]
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized" if name == "mxfp4" else "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": rest,
    }
