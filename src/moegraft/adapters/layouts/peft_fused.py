"""PEFT's ``target_parameters`` on fused 3-D expert parameters.

Keys carry no parameter name::

    ...mlp.experts.base_layer.lora_A.weight  [E*r, in]    first parameter (gate_up, inner wrapper)
    ...mlp.experts.base_layer.lora_B.weight  [out, r*E]
    ...mlp.experts.lora_A.weight, .lora_B.weight          last parameter (down, outer wrapper)

``A3 = A.view(E, r, in)``; ``B3 = B.view(out, r, E)``, expert index fastest (``rank_major``; files
marked ``grouped_by_expert`` have ``B.view(out, E, r)`` instead);
``dW[e] = scale * B3[:, :, e] @ A3[e]``.

*Swapped* files exchange in and out, since older PEFT took the stored dimensions by position:
A ``[E*r, out]``, B ``[in, r*E]`` and ``dW[e][o, i] = scale * sum_k B3[i, k, e] * A3[e, k, o]``.
Shapes decide where in != out; one unambiguous parameter decides for the whole adapter; else the
version that wrote the file:

==========  ========================  ======================
PEFT        host stores [E, out, in]  host stores [E, in, out]
==========  ========================  ======================
<= 0.18     swapped                   normal
0.19.0      swapped                   swapped
>= 0.19.1   normal                    normal
==========  ========================  ======================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from moegraft.adapters.layouts.base import LayoutResult, ReadOptions, missing_partner, pair_up
from moegraft.adapters.read import AdapterSource
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import count, shown
from moegraft.sites import Site
from moegraft.types import LoraFactor, SiteFactors

Orientation = Literal["normal", "swapped"]


@dataclass(frozen=True)
class _Fused:
    """One wrapped parameter of one experts module; ``role`` is ``gate_up`` or ``down``."""

    site: Site
    module: str
    role: str
    key_a: str
    key_b: str
    lora_a: torch.Tensor
    lora_b: torch.Tensor

    @property
    def keys(self) -> list[str]:
        return [self.key_a, self.key_b]

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0] // self.site.num_experts

    def fits(self) -> set[Orientation]:
        """Return the orientations that the shapes allow."""
        return _fits(self.site, self.role, self.lora_a, self.lora_b)


def _sizes(site: Site, role: str) -> tuple[int, int]:
    """Return (in, out) of a fused parameter."""
    if role == "down":
        down = site.projection("down")
        return down.in_features, down.out_features
    up = site.projection("up")
    return up.in_features, up.out_features * (2 if site.gated else 1)


def _fits(site: Site, role: str, lora_a: torch.Tensor, lora_b: torch.Tensor) -> set[Orientation]:
    if lora_a.dim() != 2 or lora_b.dim() != 2 or lora_a.shape[0] % site.num_experts:
        return set()
    if lora_a.shape[0] != lora_b.shape[1] or lora_a.shape[0] == 0:
        return set()
    shape = (lora_a.shape[1], lora_b.shape[0])
    sizes = _sizes(site, role)
    found: set[Orientation] = set()
    if shape == sizes:
        found.add("normal")
    if shape == (sizes[1], sizes[0]):
        found.add("swapped")
    return found


class PeftFused:
    """Reader for fused 3-D expert parameters."""

    name = "peft_fused"

    def read(
        self, source: AdapterSource, pending: set[str], spec: ModelSpec, options: ReadOptions
    ) -> LayoutResult:
        """See :class:`moegraft.adapters.layouts.base.Layout`."""
        result = LayoutResult()
        parameters = self._collect(source, pending, spec, result)
        if not parameters:
            return result
        orientation, evidence = self._orientation(source, parameters, options, result)
        if orientation is None:
            return result
        by_expert, order = self._b_layout(source, options, result)
        for parameter in parameters:
            if orientation not in parameter.fits():
                result.refuse(
                    parameter.keys,
                    f"its shapes are not {orientation}, as the rest of the adapter is ({evidence})",
                )
                continue
            factors = _factors(parameter, source, orientation, by_expert)
            known = result.factors.get(parameter.site.name, SiteFactors({})).projections
            if not factors.keys().isdisjoint(known):
                reason = f"a second {parameter.role} for {parameter.site.name} in the same file"
                result.refuse(parameter.keys, reason)
                continue
            result.factors[parameter.site.name] = SiteFactors({**known, **factors})
            result.used.update(parameter.keys)
        if result.used:
            result.evidence = (
                f"fused [E*r, in] factors on {count(len(result.factors), 'experts module')}; "
                f"{orientation} orientation ({evidence}); B {order}"
            )
        return result

    def _collect(
        self, source: AdapterSource, pending: set[str], spec: ModelSpec, result: LayoutResult
    ) -> list[_Fused]:
        """Find the wrapped parameters and the role of each."""
        chains: dict[str, dict[int, tuple[str, dict[str, tuple[str, torch.Tensor]]]]] = {}
        sites: dict[str, Site] = {}
        paths = [path for site in spec.sites for path in (site.name, *site.aliases)]
        ends = {"experts", "base_layer", *(path.rpartition(".")[2] for path in paths)}
        for module, parts in pair_up(source, pending).items():
            if module.rpartition(".")[2] not in ends:
                continue  # tells single experts apart at once
            path = re.sub(r"(\.base_layer)+$", "", module)
            site = spec.resolve_experts(path)
            if site is None or any(tensor.dim() != 2 for _, tensor in parts.values()):
                continue
            depth = (len(module) - len(path)) // len(".base_layer")
            chains.setdefault(path, {})[depth] = (module, parts)
            sites[path] = site
        parameters = []
        for path, chain in chains.items():
            for depth, (module, parts) in chain.items():
                keys = [key for key, _ in parts.values()]
                missing = missing_partner(parts)
                if missing:
                    result.refuse(keys, f"its partner {module}.{missing} is missing")
                    continue
                (key_a, lora_a), (key_b, lora_b) = parts["lora_A"], parts["lora_B"]
                role = self._role(source, sites[path], sorted(chain, reverse=True), depth, parts)
                if isinstance(role, str) and role in ("gate_up", "down"):
                    found = _Fused(sites[path], path, role, key_a, key_b, lora_a, lora_b)
                    if found.fits():
                        parameters.append(found)
                        continue
                    role = _misfit(found)
                result.refuse(keys, role)
        return parameters

    def _role(
        self,
        source: AdapterSource,
        site: Site,
        depths: list[int],
        depth: int,
        parts: dict[str, tuple[str, torch.Tensor]],
    ) -> str:
        """Return ``gate_up`` or ``down``, or the reason why that can't be told."""
        if len(depths) > 2:
            return (
                f"{len(depths)} parameters are wrapped on {site.name}; only the two weights, "
                "gate_up and down, are served (no LoRA on the experts' biases)"
            )
        if len(depths) == 2:
            # PEFT wraps in the order of definition: the innermost is the first parameter.
            return "gate_up" if depth == depths[0] else "down"
        targets = {target.rpartition(".")[2] for target in source.config.target_parameters}
        named = {"down" if t == "down_proj" else "gate_up" for t in targets if t.endswith("_proj")}
        lora_a, lora_b = parts["lora_A"][1], parts["lora_B"][1]
        fitting = {r for r in ("gate_up", "down") if _fits(site, r, lora_a, lora_b)}
        if len(named) == 1:
            return named.pop()
        if len(fitting) == 1:
            return fitting.pop()
        if not fitting:
            return (
                f"its shapes {tuple(lora_a.shape)}, {tuple(lora_b.shape)} fit neither gate_up "
                f"{_sizes(site, 'gate_up')} nor down {_sizes(site, 'down')} (in, out) of "
                f"{site.num_experts} experts at {site.name}"
            )
        return (
            "it could be gate_up or down, both fit and target_parameters does not say: set "
            "target_parameters in adapter_config.json"
        )

    def _orientation(
        self,
        source: AdapterSource,
        parameters: list[_Fused],
        options: ReadOptions,
        result: LayoutResult,
    ) -> tuple[Orientation | None, str]:
        """Decide normal or swapped for the whole adapter, with the evidence; None = refused."""
        votes = {next(iter(p.fits())) for p in parameters if len(p.fits()) == 1}
        all_keys = [key for p in parameters for key in p.keys]
        if len(votes) == 2:
            result.refuse(all_keys, "some of its parameters are swapped and some are not")
            return None, ""
        if votes:
            return votes.pop(), "by shape"
        if options.orientation is not None:
            return options.orientation, "by the orientation option"
        version = source.config.peft_version
        by_version = _orientation_of_version(version, parameters[0].site.layout.out_major)
        if by_version is not None:
            return by_version, f"in and out sizes are equal, PEFT {version} wrote it"
        result.refuse(
            all_keys,
            "in and out sizes are equal and the config names no PEFT version, so normal and "
            "swapped orientation can't be told apart: pass orientation='normal' (PEFT >= 0.19.1) "
            "or 'swapped' (command line: --orientation)",
        )
        return None, ""

    def _b_layout(
        self, source: AdapterSource, options: ReadOptions, result: LayoutResult
    ) -> tuple[bool, str]:
        """Return (columns grouped by expert?, what to report)."""
        marker = source.config.raw.get("lora_B_layout")
        if options.expert_b_layout is not None:
            chosen, why = options.expert_b_layout, "by option"
        elif marker in ("rank_major", "grouped_by_expert"):
            chosen, why = marker, "by the file's marker"
        else:
            chosen, why = "rank_major", "PEFT's order"
            mapping = source.config.raw.get("auto_mapping")
            if marker is not None:
                note = f"lora_B_layout={shown(marker)} is unknown; PEFT's order was assumed"
                result.notes.append(note)
            elif isinstance(mapping, dict) and mapping.get("unsloth_fixed"):
                result.notes.append(
                    "the config shows signs of Unsloth, whose files before 2026-09-17 order B by "
                    "expert: pass expert_b_layout='grouped_by_expert' (--expert-b-layout) for those"
                )
        return chosen == "grouped_by_expert", f"{chosen} ({why})"


def _factors(
    parameter: _Fused, source: AdapterSource, orientation: Orientation, by_expert: bool
) -> dict[str, LoraFactor]:
    """Return canonical factors; gate and up of one fused parameter share the very same A."""
    num_experts, rank = parameter.site.num_experts, parameter.rank
    a3 = parameter.lora_a.view(num_experts, rank, -1)
    out = parameter.lora_b.shape[0]
    if by_expert:
        b3 = parameter.lora_b.view(out, num_experts, rank).permute(1, 0, 2)
    else:
        b3 = parameter.lora_b.view(out, rank, num_experts).permute(2, 0, 1)
    if orientation == "swapped":
        a3, b3 = b3.transpose(1, 2), a3.transpose(1, 2)
    gate_up = "gate_up_proj" if parameter.site.gated else "up_proj"
    name = f"{parameter.module}.{'down_proj' if parameter.role == 'down' else gate_up}"
    scale = source.config.scale_for(name, rank)
    if parameter.role == "down":
        return {"down": LoraFactor(a3, b3, scale)}
    layout, width = parameter.site.layout, parameter.site.projection("up").out_features
    names = ("gate", "up") if parameter.site.gated else ("up",)
    return {n: LoraFactor(a3, b3[:, layout.columns(n, width)], scale) for n in names}


def _misfit(parameter: _Fused) -> str:
    sizes = _sizes(parameter.site, parameter.role)
    return (
        f"A {tuple(parameter.lora_a.shape)}, B {tuple(parameter.lora_b.shape)} do not fit "
        f"{parameter.role} of {parameter.site.name}: {parameter.site.num_experts} experts, "
        f"{sizes[0]} -> {sizes[1]}"
    )


def _orientation_of_version(version: str, out_major: bool) -> Orientation | None:
    """Return what a PEFT version wrote (table at the top), None for an unknown version."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        return None
    number = tuple(int(part or 0) for part in found.groups())
    if number >= (0, 19, 1):
        return "normal"
    if number >= (0, 19, 0):
        return "swapped"
    return "swapped" if out_major else "normal"
