"""Add an adapter to a model's weights: a plain checkpoint, tensor by tensor, in its own names.

A checkpoint may name experts one by one (``experts.3.gate_proj.weight [I, H]``) or hold them as one
parameter (``experts.gate_up_proj [E, 2I, H]`` or ``[E, H, 2I]``). The sum is made in fp32 and
rounded once to the dtype of the weight.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from moegraft.adapters.bind import BoundAdapter
from moegraft.adapters.checkpoint import (
    CheckpointTensor,
    other_files,
    stored_tensors,
    weight_files,
)
from moegraft.adapters.dora import row_scales
from moegraft.adapters.merge_places import (
    BIAS,
    Place,
    check_all_found,
    find_place,
    has_factor,
    stack_order,
)
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import AdapterError
from moegraft.sites import LINEAR_PROJECTION, Site, VectorKind, vector_name
from moegraft.types import LoraFactor


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    Attributes:
        files: weight files written; num_bytes: their size.
        changed: keys of the checkpoint that were changed, in order.
        total: tensors of the checkpoint.
    """

    files: tuple[str, ...]
    num_bytes: int
    changed: tuple[str, ...]
    total: int


def merge(model: str | Path, bound: BoundAdapter, spec: ModelSpec, out: str | Path) -> Merged:
    """Write a copy of a model folder with an adapter added to its weights.

    One tensor (of stacked experts: one expert) is in memory at a time.

    Args:
        model: folder with a safetensors checkpoint.
        bound: the adapter, bound in full to ``spec``.
        spec: what the model of that folder offers.
        out: folder to make; must not exist.

    Raises:
        AdapterError: ``out`` exists, the checkpoint is quantised or can't be read, or it lacks a
            weight that the adapter changes. Nothing is written then.
    """
    model, out = Path(model), Path(out)
    if out.exists():
        raise AdapterError(f"{str(out)!r} exists already; give a folder that does not.")
    _check_unquantised(model)
    files = weight_files(model)
    tensors = {path: stored_tensors(path) for path in files}
    every = [tensor for found in tensors.values() for tensor in found]
    places = [place for tensor in every if (place := find_place(tensor, spec)) is not None]
    changes = {place.tensor: place for place in places if place.is_changed_by(bound.factors)}
    check_all_found(list(changes.values()), bound.factors, spec)
    out_major = stack_order(places, list(changes.values()))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as made:
            new = Path(made) / out.name
            new.mkdir()
            for path in other_files(model):
                shutil.copyfile(path, new / path.name)
            for path in files:
                shutil.copyfile(path, new / path.name)
                with (new / path.name).open("r+b") as file:
                    for tensor in tensors[path]:
                        if tensor in changes:
                            change = changes[tensor]
                            _apply(file, change, bound, out_major)
            new.rename(out)
    except OSError as error:
        raise AdapterError(f"{str(out)!r} can't be written: {error}.") from error
    size = sum((out / path.name).stat().st_size for path in files)
    changed = tuple(tensor.name for tensor in changes)
    return Merged(tuple(path.name for path in files), size, changed, len(every))


def _check_unquantised(model: Path) -> None:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{str(model / 'config.json')!r} can't be read: {error}.") from error
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise AdapterError(
            f"{str(model)!r} is quantised ({method}): an adapter can be merged into float32, "
            "bfloat16 and float16 weights only; use the checkpoint that was quantised."
        )


def _apply(file: BinaryIO, change: Place, bound: BoundAdapter, out_major: bool | None) -> None:
    """Change one tensor in the file."""
    tensor, site = change.tensor, change.site
    if change.role == BIAS:
        _write(file, tensor, tensor.read(file).float() + vector(bound, site, "lora_bias"))
        return
    factors = bound.factors[site.name]
    halves = ("gate", "up") if change.role == "gate_up" else (change.role,)
    for expert in range(site.num_experts) if change.is_stack else (change.expert or 0,):
        live = [half for half in halves if has_factor(factors, half, expert)]
        if not live:
            continue
        entry = expert if change.is_stack else None
        weight = tensor.read(file, entry).float()
        rows = weight.T if change.is_stack and not out_major else weight  # [out, in], a view
        for half in live:
            place = rows
            if change.role == "gate_up":
                place = rows[site.layout.columns(half, site.projection("up").out_features)]
            place += delta(factors.projections[half], factors.entry(expert))
        if site.name in bound.magnitudes:
            rows *= row_scales(rows, vector(bound, site, "dora"), site.name)[:, None]
        _write(file, tensor, weight, entry)


def _write(
    file: BinaryIO, tensor: CheckpointTensor, value: torch.Tensor, entry: int | None = None
) -> None:
    """Write a merged value, rounded to the tensor's dtype."""
    rounded = value.to(tensor.torch_dtype)
    if not bool(torch.isfinite(rounded).all()):
        raise AdapterError(f"{tensor.name} overflows {tensor.dtype} with the adapter's delta.")
    tensor.write(file, rounded, entry)


def delta(factor: LoraFactor, entry: int) -> torch.Tensor:
    """Return ``scale * B @ A`` of one entry, fp32 ``[out, in]``."""
    a, b = (t[min(entry, t.shape[0] - 1)].float() for t in (factor.lora_A, factor.lora_B))
    return factor.scale * (b @ a)


def vector(bound: BoundAdapter, site: Site, kind: VectorKind) -> torch.Tensor:
    """Return a linear's vector, scaled, fp32 ``[out]``."""
    factor = bound.factors[vector_name(site.name, kind)].projections[LINEAR_PROJECTION]
    return delta(factor, 0)[:, 0]
