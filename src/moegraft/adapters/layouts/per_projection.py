"""3-D factors per projection of a whole experts module.

::

    ...mlp.experts.w1.lora_A.weight            [E or 1, r, H]    .lora_B.weight  [E or 1, I, r]
    ...mlp.experts.w3.lora_A.weight            [E or 1, r, H]    .lora_B.weight  [E or 1, I, r]
    ...mlp.experts.w2.lora_A.weight            [E or 1, r, I]    .lora_B.weight  [E or 1, H, r]
    ...mlp.experts.gate_up_proj.lora_A.weight  [E or 1, r, H]    .lora_B.weight  [E or 1, 2I, r]

``gate_proj``, ``up_proj`` and ``down_proj`` are other names of w1, w3 and w2. An expert dimension
of 1 is one factor for all experts. B of ``gate_up_proj`` has its rows as [gate | up]; where the
model packs them otherwise nothing in the file tells which order is meant, so it is refused unless
``ReadOptions(gate_up_rows=..)`` says it.
Experts without a gate have w1 in up's place, and an empty w3.

With ``"veomni_lora": {"moe_mode": "shared"}`` in the config a pair is 2-D, for all experts. Without
that mark 2-D factors could be the stacked experts of another program, and are refused.

No program is known to exchange in and out here, or to transpose: what only fits so is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from moegraft.adapters.keys import EXPERT_NAMES
from moegraft.adapters.layouts.base import (
    LayoutResult,
    ReadOptions,
    missing_partner,
    pair_up,
)
from moegraft.adapters.read import AdapterSource
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import count
from moegraft.sites import Site
from moegraft.types import LoraFactor, SiteFactors, WeightLayout

_ROLES = {**EXPERT_NAMES, "gate_up_proj": "gate_up"}
_PATH = re.compile(rf"^(?P<experts>.*\bexperts)\.(?P<name>{'|'.join(_ROLES)})$")
_MARK = '"veomni_lora": {"moe_mode": "shared"}'

#: lora_A/lora_B -> (name in the file, tensor), as :func:`pair_up` gives them.
_Parts = dict[str, tuple[str, torch.Tensor]]


class PerProjection:
    """Reader for one pair of 3-D factors per projection."""

    name = "per_projection"

    def read(
        self, source: AdapterSource, pending: set[str], spec: ModelSpec, options: ReadOptions
    ) -> LayoutResult:
        """See :class:`moegraft.adapters.layouts.base.Layout`."""
        result = LayoutResult()
        modules: dict[str, dict[str, dict[str, _Parts]]] = {}  # site -> module -> name -> parts
        sites: dict[str, Site] = {}
        for module, parts in pair_up(source, pending).items():
            match = _PATH.match(module)
            site = spec.resolve_experts(match["experts"]) if match else None
            if match is not None and site is not None:
                sites[site.name] = site
                found = modules.setdefault(site.name, {}).setdefault(match["experts"], {})
                found[match["name"]] = parts
        seen: set[str] = set()
        for site_name, site in sites.items():
            for path, by_name in modules[site_name].items():
                for name, parts in by_name.items():
                    problem = _bind(source, site, f"{path}.{name}", name, by_name, options, result)
                    if problem:
                        result.refuse([key for key, _ in parts.values()], problem)
                    else:
                        result.used.update(key for key, _ in parts.values())
                        seen.add(name)
        if result.used:
            result.evidence = _evidence(source, result, seen, options)
        return result


def _bind(
    source: AdapterSource,
    site: Site,
    module: str,
    name: str,
    by_name: Mapping[str, _Parts],
    options: ReadOptions,
    result: LayoutResult,
) -> str:
    """Add one module's factors to ``result``; return why that can't be, "" when it is done."""
    parts = by_name[name]
    missing = missing_partner(parts)
    if missing:
        return f"its partner {module}.{missing} is missing"
    alone = all(_is_empty(other) for other in by_name.values())
    if not site.gated and name == "w3" and _is_empty(parts) and not alone:
        note = "an empty w3 adds nothing: the experts have no gate, w1 is their up"
        if note not in result.notes:
            result.notes.append(note)
        return ""
    role = _ROLES[name]
    if name == "w1" and not site.gated and ("w3" not in by_name or _is_empty(by_name["w3"])):
        role = "up"
    lora_a, lora_b = parts["lora_A"][1], parts["lora_B"][1]
    problem = _role_problem(site, name, role, options) or _two_d_problem(
        source, site, module, lora_a, lora_b
    )
    if problem:
        return problem
    if lora_a.dim() == lora_b.dim() == 2:
        lora_a, lora_b = lora_a[None], lora_b[None]
    problem = _shape_problem(site, role, lora_a, lora_b)
    if problem:
        return problem
    scale = source.config.scale_for(module, lora_a.shape[1])
    factors = _factors(site, role, lora_a, lora_b, scale, options)
    known = result.factors.get(site.name, SiteFactors({})).projections
    twice = [projection for projection in factors if projection in known]
    if twice:
        return f"a second {' and '.join(twice)} factor for {site.name} in the same file"
    result.factors[site.name] = SiteFactors({**known, **factors})
    return ""


def _is_empty(parts: _Parts) -> bool:
    """True when no tensor holds a value."""
    return all(tensor.numel() == 0 for _, tensor in parts.values())


def _role_problem(site: Site, name: str, role: str, options: ReadOptions) -> str:
    """Return why this model has no place for a projection, "" when it has."""
    if role in ("gate", "gate_up") and not site.gated:
        return f"{name} is not for this model: the experts of {site.name} have no gate"
    told = options.gate_up_rows is not None or site.layout.gate_up_order == "gate_first"
    if role == "gate_up" and not told:
        return (
            f"{site.name} packs gate and up as {site.layout.gate_up_order}, and a 3-D gate_up_proj "
            "does not say whether its rows are in that order or [gate | up]: pass "
            "gate_up_rows='concatenated' or 'interleaved' (command line: --gate-up-rows), or write "
            "the file with gate_proj and up_proj apart (the same lora_A, their rows of lora_B)"
        )
    return ""


def _two_d_problem(
    source: AdapterSource, site: Site, module: str, lora_a: torch.Tensor, lora_b: torch.Tensor
) -> str:
    """Return why a 2-D pair is not one for all experts, "" for a good one and for 3-D factors."""
    if not lora_a.dim() == lora_b.dim() == 2:
        return ""
    shapes = f"A {tuple(lora_a.shape)}, B {tuple(lora_b.shape)}"
    if _moe_mode(source) != "shared":
        return (
            f"{shapes} are 2-D, for all experts of {site.name} at once, and the config does not "
            f"say so: if one pair serves all experts put {_MARK} into adapter_config.json, else "
            "write the factors as [E, r, in] and [E, out, r]"
        )
    rank = source.config.rank_for(module, lora_a.shape[0])
    if site.num_experts > 1 and lora_a.shape[0] == lora_b.shape[1] == site.num_experts * rank:
        return (
            f"{shapes} could be one pair of rank {lora_a.shape[0]} for all experts, as the config "
            f"says, or {site.num_experts} stacked experts of its rank {rank}: write [E, r, in] and "
            "[E, out, r], or correct r"
        )
    return ""


def _moe_mode(source: AdapterSource) -> Any:
    marks = source.config.raw.get("veomni_lora")
    return marks.get("moe_mode") if isinstance(marks, Mapping) else None


def _sizes(site: Site, role: str) -> tuple[int, int]:
    """Return (in, out) of ``gate``, ``up``, ``down`` or ``gate_up``."""
    if role == "gate_up":
        up = site.projection("up")
        return up.in_features, 2 * up.out_features
    projection = site.projection(role)
    return projection.in_features, projection.out_features


def _shape_problem(site: Site, role: str, lora_a: torch.Tensor, lora_b: torch.Tensor) -> str:
    """Return why two tensors are not 3-D factors of a projection, "" when they are."""
    a, b = tuple(lora_a.shape), tuple(lora_b.shape)
    num_in, num_out = _sizes(site, role)
    wanted = (
        f"{role} of {site.name} takes A [{site.num_experts} or 1, r, {num_in}], "
        f"B [{site.num_experts} or 1, {num_out}, r], r >= 1"
    )
    got = f"A {a}, B {b}"
    if len(a) != 3 or len(b) != 3:
        return f"{got} are not both 3-D: {wanted}"
    if not {a[0], b[0]} <= {1, site.num_experts}:
        return f"{got} have {a[0]} and {b[0]} experts: {wanted}"
    plain = a[1] == b[2] > 0 and (a[2], b[1]) == (num_in, num_out)
    transposed = a[2] == b[1] > 0 and (a[1], b[2]) == (num_in, num_out)
    if plain and transposed:
        return f"{got} could as well be transposed, for r, in and out are equal: {wanted}"
    if plain:
        return ""
    if transposed:
        return f"{got} are transposed: {wanted}"
    if a[1] == b[2] > 0 and (a[2], b[1]) == (num_out, num_in):
        return f"{got} have in and out exchanged: {wanted}"
    if a[1] != b[2]:
        return f"{got} have ranks {a[1]} and {b[2]}: {wanted}"
    return f"{got} are for a {a[2]} -> {b[1]} matrix: {wanted}"


def _factors(
    site: Site,
    role: str,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scale: float,
    options: ReadOptions,
) -> dict[str, LoraFactor]:
    """Return canonical factors; gate and up of one ``gate_up_proj`` share the very same A."""
    if role != "gate_up":
        return {role: LoraFactor(lora_a, lora_b, scale)}
    width = site.projection("up").out_features
    interleaved = options.gate_up_rows == "interleaved"
    rows = WeightLayout("interleaved" if interleaved else "gate_first")
    return {
        half: LoraFactor(lora_a, lora_b[:, rows.columns(half, width)], scale)
        for half in ("gate", "up")
    }


def _evidence(
    source: AdapterSource, result: LayoutResult, seen: set[str], options: ReadOptions
) -> str:
    """Say what was found, as ``3-D factors per projection (w1, w2) on 2 experts modules``."""
    names = ", ".join(sorted(seen))
    where = count(len(result.factors), "experts module")
    order = "g0, u0, g1, .." if options.gate_up_rows == "interleaved" else "[gate | up]"
    by = " (by option)" if options.gate_up_rows else ""
    fused = f"; rows of gate_up_proj's B are {order}{by}" if "gate_up_proj" in seen else ""
    flat = any(source.tensors[key].dim() == 2 for key in result.used)
    mark = f"; 2-D ones serve all experts (the config's {_MARK})" if flat else ""
    return f"3-D factors per projection ({names}) on {where}{fused}{mark}"
