"""Linears that one side has fused and the other has apart, such as ``qkv_proj`` and q, k, v.

The file has them fused, the model apart::

    ...self_attn.qkv_proj.lora_A.weight [r, in]    .lora_B.weight [q + k + v, r]

The rows of B are those of the parts, one after the other, as the name says; each part gets its rows
and the same A. The file has them apart, the model fused: the ranks of the parts lie side by side,
and each has zeros in the others' rows. Both are exact. A part that a file leaves out adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moegraft.adapters.layouts.base import (
    LayoutResult,
    ReadOptions,
    missing_partner,
    not_a_pair,
    pair_up,
)
from moegraft.adapters.layouts.stacking import common_dtype
from moegraft.adapters.read import AdapterSource
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import count
from moegraft.sites import LINEAR_PROJECTION, Site
from moegraft.types import LoraFactor, SiteFactors

#: Name of the fused linear -> its parts, in the order of its rows.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_PARTS = {part: fused for fused, parts in FUSED.items() for part in parts}


@dataclass(frozen=True)
class _Part:
    """One part that the file has apart: its keys and factors."""

    name: str
    keys: list[str]
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scale: float

    @property
    def rows(self) -> int:
        return self.lora_b.shape[0]


class FusedLinear:
    """Reader for linears that are fused in the file or in the model, but not in both."""

    name = "fused_linear"

    def read(
        self, source: AdapterSource, pending: set[str], spec: ModelSpec, options: ReadOptions
    ) -> LayoutResult:
        """See :class:`moegraft.adapters.layouts.base.Layout`."""
        result = LayoutResult()
        found: dict[str, int] = {}
        apart: dict[str, list[_Part]] = {}
        for module, parts in pair_up(source, pending).items():
            parent, _, last = module.rpartition(".")
            if spec.resolve(module) is not None:
                continue
            keys = [key for key, _ in parts.values()]
            sites = _linears(spec, parent, FUSED.get(last, ()))
            whole = _linears(spec, parent, (_PARTS[last],)) if last in _PARTS else []
            if not sites and not whole:
                continue
            missing = missing_partner(parts)
            problem = f"its partner {module}.{missing} is missing" if missing else ""
            if not problem:
                lora_a, lora_b = parts["lora_A"][1], parts["lora_B"][1]
                problem = not_a_pair(lora_a, lora_b)
            if problem:
                result.refuse(keys, problem)
                continue
            scale = source.config.scale_for(module, lora_a.shape[0])
            part = _Part(last, keys, lora_a, lora_b, scale)
            if whole:
                apart.setdefault(f"{parent}.{_PARTS[last]}", []).append(part)
            elif _split(part, sites, result):
                how = f"{last} is {', '.join(FUSED[last])} of the model, rows of B in this order"
                found[how] = found.get(how, 0) + 1
        for path, members in apart.items():
            site = spec.resolve(path)
            assert site is not None
            last = path.rpartition(".")[2]
            if _join(members, site, FUSED[last], result):
                how = f"{', '.join(m.name for m in members)} are rows of the model's {last}"
                found[how] = found.get(how, 0) + 1
        result.evidence = "; ".join(f"{how} ({count(n, 'place')})" for how, n in found.items())
        return result


def _linears(spec: ModelSpec, parent: str, names: tuple[str, ...]) -> list[Site]:
    """Return the linears of these names beside each other; none unless the model has them all."""
    sites = [spec.resolve(f"{parent}.{name}") for name in names]
    found = [site for site in sites if site is not None and site.kind == "linear"]
    return found if len(found) == len(names) else []


def _split(part: _Part, sites: list[Site], result: LayoutResult) -> bool:
    """Give each linear its rows; False when they don't fit."""
    sizes = [site.projections[0] for site in sites]
    widths = {size.in_features for size in sizes}
    rows = sum(size.out_features for size in sizes)
    if widths != {part.lora_a.shape[1]} or part.rows != rows:
        names = ", ".join(site.name for site in sites)
        result.refuse(
            part.keys,
            f"{part.name} is for a {part.lora_a.shape[1]} -> {part.rows} matrix; the model's "
            f"{names} together are {', '.join(map(str, sorted(widths)))} -> {rows}",
        )
        return False
    taken = [site.name for site in sites if site.name in result.factors]
    if taken:
        result.refuse(part.keys, f"a second adapter for {', '.join(taken)} in the same file")
        return False
    start = 0
    for site, size in zip(sites, sizes, strict=True):
        lora_b = part.lora_b[start : start + size.out_features]
        factor = LoraFactor(part.lora_a[None], lora_b[None], part.scale)
        result.factors[site.name] = SiteFactors({LINEAR_PROJECTION: factor})
        start += size.out_features
    result.used.update(part.keys)
    return True


def _join(members: list[_Part], site: Site, order: tuple[str, ...], result: LayoutResult) -> bool:
    """Put the parts side by side into one linear; False when they don't fit."""
    keys = [key for member in members for key in member.keys]
    size = site.projections[0]
    starts = _starts({m.name: m.rows for m in members}, order, size.out_features)
    widths = sorted({member.lora_a.shape[1] for member in members})
    twice = len({member.name for member in members}) != len(members)
    if starts is None or widths != [size.in_features] or twice:
        shapes = ", ".join(f"{m.name} {m.lora_a.shape[1]} -> {m.rows}" for m in members)
        result.refuse(
            keys,
            f"{shapes} don't tell rows of the model's {site.name}, "
            f"{size.in_features} -> {size.out_features}, which is {', '.join(order)}",
        )
        return False
    scale = max((member.scale for member in members), key=abs)
    mixed = len({member.scale for member in members}) > 1
    dtype_a = common_dtype(member.lora_a for member in members)
    dtype = torch.float32 if mixed else common_dtype(member.lora_b for member in members)
    lora_a = torch.cat([member.lora_a.to(dtype_a) for member in members])
    lora_b = torch.zeros(size.out_features, lora_a.shape[0], dtype=dtype, device=lora_a.device)
    column = 0
    for member in members:
        rank = member.lora_a.shape[0]
        values = member.lora_b.to(dtype)
        if member.scale != scale:
            values = values * (member.scale / scale)
        row = starts[member.name]
        lora_b[row : row + member.rows, column : column + rank] = values
        column += rank
    if mixed:
        result.notes.append(f"{site.name}: its parts have different scales; B carries them")
    factor = LoraFactor(lora_a[None], lora_b[None], scale)
    result.factors[site.name] = SiteFactors({LINEAR_PROJECTION: factor})
    result.used.update(keys)
    return True


def _starts(rows: dict[str, int], order: tuple[str, ...], total: int) -> dict[str, int] | None:
    """Return where each part's rows begin; None when the sizes don't tell.

    One part that is left out has the rows that are over. With more than one left out only those at
    either end can be placed.
    """
    lacking = [name for name in order if name not in rows]
    rest = total - sum(rows.values())
    if rest < 0 or (rest > 0) != bool(lacking):
        return None
    if order == FUSED["gate_up_proj"] and any(2 * size != total for size in rows.values()):
        return None
    starts, row = {}, 0
    if len(lacking) > 1:
        only = next(iter(rows))
        if only == order[0]:
            return {only: 0}
        return {only: total - rows[only]} if only == order[-1] else None
    for name in order:
        starts[name] = row
        row += rows.get(name, rest)
    return starts
