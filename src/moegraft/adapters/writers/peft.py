"""Fused 3-D expert parameters as PEFT >= 0.19.1 writes them.

See :mod:`moegraft.adapters.layouts.peft_fused`; the orientation is normal, B is rank-major.
"""

from __future__ import annotations

import torch

from moegraft.adapters.layouts.stacking import common_dtype
from moegraft.adapters.writers.base import ExpertNames, Pair, Written, apart, pair_keys
from moegraft.sites import Site
from moegraft.types import SiteFactors


class PeftWriter:
    """Writer of PEFT's ``target_parameters``."""

    name = "peft"
    peft_version = "0.19.1"

    def pairs(self, site: Site, factors: SiteFactors, notes: list[str]) -> list[Pair]:
        """Return ``gate_up`` and ``down``.

        A gate and an up with one A keep it. Else their ranks lie side by side: the fused rank is
        the sum, and each half of B has zeros at the other's ranks.
        """
        found = {pair.role: pair for pair in apart(site, factors)}
        halves = [found[name] for name in ("gate", "up") if name in found]
        pairs = [_fused(site, halves, notes)] if halves else []
        return [*pairs, *([found["down"]] if "down" in found else [])]

    def write(self, site: Site, pairs: list[Pair], names: ExpertNames) -> list[Written]:
        """See :class:`moegraft.adapters.writers.base.Writer`."""
        found = []
        for pair in pairs:
            # PEFT wraps one parameter after the other: the first one, gate_up, is the innermost.
            inner = pair.role == "gate_up" and len(pairs) == 2
            up = "gate_up_proj" if site.gated else "up_proj"
            name = f"{site.name}.{'down_proj' if pair.role == 'down' else up}"
            lora_a = pair.lora_A.reshape(-1, pair.lora_A.shape[2])
            lora_b = pair.lora_B.permute(1, 2, 0).reshape(pair.lora_B.shape[1], -1)
            tensors = pair_keys(f"{site.name}{'.base_layer' if inner else ''}", lora_a, lora_b)
            found.append(Written(name, "parameter", pair.rank, pair.scale, tensors))
        return found


def _fused(site: Site, halves: list[Pair], notes: list[str]) -> Pair:
    up = site.projection("up")
    first, last = halves[0], halves[-1]
    one_a = first.scale == last.scale and torch.equal(first.lora_A, last.lora_A)
    if one_a:
        scale, lora_a = first.scale, first.lora_A
        starts = [0, 0]
    else:
        scale = max((half.scale for half in halves), key=abs)
        lora_a = torch.cat([half.lora_A for half in halves], 1)
        starts = [0, first.rank]
    parts = [_at_scale(site, half, scale, notes) for half in halves]
    dtype = common_dtype(parts)
    rows = up.out_features * (2 if site.gated else 1)
    lora_b = torch.zeros(site.num_experts, rows, lora_a.shape[1], dtype=dtype)
    for half, part, start in zip(halves, parts, starts, strict=False):
        columns = site.layout.columns(half.role, up.out_features)
        lora_b[:, columns, start : start + half.rank] = part.to(dtype)
    return Pair("gate_up", lora_a, lora_b, scale)


def _at_scale(site: Site, half: Pair, scale: float, notes: list[str]) -> torch.Tensor:
    """Return B for another scale of the pair; in fp32 where they differ."""
    if half.scale == scale:
        return half.lora_B
    ratio = half.scale / scale
    notes.append(
        f"{site.name}: gate and up have different scales, a fused file has one: B of {half.role} "
        f"is multiplied by {ratio:g}, rounded in float32"
    )
    return half.lora_B.float() * ratio
