"""Add an adapter to a model's weights: a plain checkpoint, tensor by tensor, in its own names.

A checkpoint may name experts one by one (``experts.3.gate_proj.weight [I, H]``) or hold them as one
parameter (``experts.gate_up_proj [E, 2I, H]`` or ``[E, H, 2I]``). The sum is made in fp32 and
rounded once to the dtype of the weight.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from moegraft.adapters.bind import BoundAdapter
from moegraft.adapters.checkpoint import (
    StoredTensor,
    other_files,
    stored_tensors,
    weight_files,
)
from moegraft.adapters.layouts.base import EXPERT_NAMES
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import AdapterError, shorten
from moegraft.sites import LINEAR_PROJECTION, Site
from moegraft.types import LoraFactor, SiteFactors

_EXPERT = re.compile(r"^(?P<experts>.*\bexperts)\.(?P<expert>\d{1,9})\.(?P<name>\w+)\.weight$")
_STACKED = re.compile(r"^(?P<experts>.*\bexperts)\.(?P<name>gate_up_proj|up_proj|down_proj)$")


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


@dataclass(frozen=True)
class _Place:
    """One stored tensor that an adapter can change.

    ``role`` is ``gate``, ``up``, ``down``, ``gate_up`` or ``linear``. ``expert`` is None where the
    tensor holds all experts (or is no expert's).
    """

    tensor: StoredTensor
    site: Site
    role: str
    expert: int | None

    def parts(self) -> Iterator[tuple[str, int]]:
        """Yield the (projection, expert) that it covers."""
        projections = ("gate", "up") if self.role == "gate_up" else (self.role,)
        experts = range(self.site.num_experts) if self.expert is None else (self.expert,)
        for projection in projections:
            for expert in experts:
                yield projection, expert

    def is_changed_by(self, factors: Mapping[str, SiteFactors]) -> bool:
        """True when an adapter has a factor for any part."""
        found = factors.get(self.site.name)
        return found is not None and any(_has(found, *part) for part in self.parts())

    @property
    def is_stack(self) -> bool:
        """True for one tensor that holds all experts."""
        return self.expert is None and self.site.kind == "experts"

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in) of one matrix."""
        if self.role == "gate_up":
            up = self.site.projection("up")
            return 2 * up.out_features, up.in_features
        projection = self.site.projection(self.role)
        return projection.out_features, projection.in_features


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
    places = [place for tensor in every if (place := _place(tensor, spec)) is not None]
    changes = {place.tensor: place for place in places if place.is_changed_by(bound.factors)}
    _check_all_found(list(changes.values()), bound.factors, spec)
    out_major = _out_major(places, list(changes.values()))
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
                            _apply(file, change, bound.factors[change.site.name], out_major)
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


def _place(tensor: StoredTensor, spec: ModelSpec) -> _Place | None:
    """Find the place of a checkpoint's tensor; None for none that takes an adapter."""
    single = _EXPERT.match(tensor.name)
    if single:
        site, role = spec.resolve_experts(single["experts"]), EXPERT_NAMES.get(single["name"])
        if site is None or role not in {p.name for p in site.projections}:
            return None
        return _Place(tensor, site, str(role), int(single["expert"]))
    stacked = _STACKED.match(tensor.name)
    if stacked:
        site = spec.resolve_experts(stacked["experts"])
        role = {"gate_up_proj": "gate_up", "up_proj": "up", "down_proj": "down"}[stacked["name"]]
        return None if site is None else _Place(tensor, site, role, None)
    path, _, leaf = tensor.name.rpartition(".")
    site = spec.resolve(path) if leaf == "weight" else None
    if site is None or site.kind == "experts":
        return None
    return _Place(tensor, site, LINEAR_PROJECTION, None)


def _has(factors: SiteFactors, projection: str, expert: int) -> bool:
    return projection in factors.projections and factors.entry(expert) >= 0


def _check_all_found(
    changes: list[_Place], factors: Mapping[str, SiteFactors], spec: ModelSpec
) -> None:
    """Raise unless every factor has a weight in the checkpoint, of the right sizes."""
    found: set[tuple[str, str, int]] = set()
    for change in changes:
        _check_shape(change)
        found |= {(change.site.name, *part) for part in change.parts()}
    lost = [
        f"{site.name} {projection}" + (f" of expert {expert}" if site.num_experts > 1 else "")
        for site in spec.sites
        if site.name in factors
        for projection in factors[site.name].projections
        for expert in range(site.num_experts)
        if _has(factors[site.name], projection, expert)
        and (site.name, projection, expert) not in found
    ]
    if lost:
        raise AdapterError(
            f"The checkpoint has no weight that is known as {shorten(lost)}: its names are not "
            "those of the model's save_pretrained. Load it with transformers, save it again, and "
            "merge into that."
        )


def _check_shape(place: _Place) -> None:
    rows, columns = place.sizes
    allowed: list[tuple[int, ...]] = [(rows, columns)]
    if place.is_stack:
        experts = place.site.num_experts
        allowed = [(experts, rows, columns), (experts, columns, rows)]
    if place.tensor.shape not in allowed:
        raise AdapterError(
            f"{place.tensor.name} has shape {place.tensor.shape}, the model of this config needs "
            f"{allowed[0]}."
        )


def _out_major(places: list[_Place], changes: list[_Place]) -> bool | None:
    """Tell whether stacked experts lie as ``[E, out, in]``; None where none is changed.

    Raises:
        AdapterError: no shape tells, or some say one thing and some another.
    """
    stacked = [change for change in changes if change.is_stack]
    if not stacked:
        return None
    shapes = {(place.tensor.shape[1:], place.sizes) for place in places if place.is_stack}
    votes = {shape == sizes for shape, sizes in shapes if sizes[0] != sizes[1]}
    if len(votes) != 1:
        why = "shapes of both orders" if votes else "square matrices only"
        raise AdapterError(
            f"Whether {stacked[0].tensor.name} is stored as [E, out, in] or [E, in, out] can't be "
            f"told: the checkpoint's experts have {why}. Save the model with one matrix per expert."
        )
    return votes.pop()


def _apply(file: BinaryIO, change: _Place, factors: SiteFactors, out_major: bool | None) -> None:
    """Change one tensor in the file."""
    tensor, site = change.tensor, change.site
    halves = ("gate", "up") if change.role == "gate_up" else (change.role,)
    for expert in range(site.num_experts) if change.is_stack else (change.expert or 0,):
        live = [half for half in halves if _has(factors, half, expert)]
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
        merged = weight.to(tensor.torch_dtype)
        if not bool(torch.isfinite(merged).all()):
            raise AdapterError(f"{tensor.name} overflows {tensor.dtype} with the adapter's delta.")
        tensor.write(file, merged, entry)


def delta(factor: LoraFactor, entry: int) -> torch.Tensor:
    """Return ``scale * B @ A`` of one entry, fp32 ``[out, in]``."""
    a, b = (t[min(entry, t.shape[0] - 1)].float() for t in (factor.lora_A, factor.lora_B))
    return factor.scale * (b @ a)
