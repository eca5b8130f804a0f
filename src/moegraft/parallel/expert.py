"""Slices of an experts module over ranks, base and factors alike.

Experts go to ranks whole (expert parallelism, by any map), and each may be sliced over I by the
ranks that share it (tensor parallelism): gate and up by outputs, down by inputs. Every rank then
computes a partial sum of the layer's output, base and delta alike; added up over all ranks they are
the layer's output. What must count once does: down's bias is on the first slice only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moegraft.errors import MoegraftError, UnsupportedError
from moegraft.parallel.placement import ExpertPlacement
from moegraft.parallel.tensor import Part, check_size, slice_in, slice_out
from moegraft.sites import Site, expert_site
from moegraft.types import ExpertWeights, LoraFactor, SiteFactors
from moegraft.weight_scales import entries


@dataclass(frozen=True)
class ExpertShard:
    """What of an experts module is on this rank.

    Attributes:
        placement: which experts.
        part: which columns of I of each.

    Example: E=8, I=20 on four ranks, experts over two and each expert over two: rank 3 has
    ``ExpertShard(ExpertPlacement.contiguous(8, 1, 2), Part.of(20, 1, 2))``.
    """

    placement: ExpertPlacement
    part: Part

    def site(self, site: Site) -> Site:
        """Return the local site of an experts module whose whole site is given."""
        hidden, intermediate = _sizes(site)
        self._check(site.name, site.num_experts, intermediate)
        local = expert_site(
            site.name, self.placement.num_local, hidden, self.part.width, site.layout
        )
        return replace(local, aliases=site.aliases)

    def factors(self, factors: SiteFactors) -> SiteFactors | None:
        """Return one adapter's factors of the local experts; None when it has none here.

        Args:
            factors: of all experts, with or without a map; see :class:`moegraft.types.SiteFactors`.

        Returns:
            Factors with local expert numbers and a local map. What is shared by all experts is the
            same on every rank; gate and up still share one A where they did.
        """
        entries = [factors.entry(e) for e in self.placement.local_to_global]
        used = sorted({entry for entry in entries if entry >= 0})
        if not used:
            return None
        number = {entry: i for i, entry in enumerate(used)}
        local = [number.get(entry, -1) for entry in entries]
        kept: dict[int, torch.Tensor] = {}

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            """The used entries; the same tensor for the same tensor."""
            if tensor.shape[0] == 1 or used == list(range(tensor.shape[0])):
                return tensor
            if used == list(range(used[0], used[-1] + 1)):  # a view, which an update can repeat
                return kept.setdefault(id(tensor), tensor[used[0] : used[-1] + 1])
            if id(tensor) not in kept:
                kept[id(tensor)] = tensor[torch.tensor(used, device=tensor.device)]
            return kept[id(tensor)]

        projections: dict[str, LoraFactor] = {}
        for name, factor in factors.projections.items():
            sliced = replace(factor, lora_A=taken(factor.lora_A), lora_B=taken(factor.lora_B))
            if not self.part.is_whole:
                slice_one = slice_in if name == "down" else slice_out
                sliced = slice_one(sliced, self.part)
            projections[name] = sliced
        expert_map = None
        if local != list(range(len(local))):
            expert_map = torch.tensor(local, dtype=torch.int32)
        return SiteFactors(projections, expert_map)

    def _check(self, where: str, num_experts: int, intermediate: int) -> None:
        if self.placement.num_experts != num_experts:
            raise MoegraftError(
                f"{where}: the placement maps {self.placement.num_experts} experts, the layer has "
                f"{num_experts}."
            )
        check_size(where, self.part, intermediate)


def check_norm(weights: ExpertWeights, shard: ExpertShard) -> None:
    """Raise :class:`UnsupportedError` where a norm behind the experts would see partial sums."""
    if weights.post_norm is not None and not shard.part.is_whole:
        raise UnsupportedError(
            f"The experts have a norm behind them, which needs whole rows, but this shard has "
            f"only {shard.part.width} columns of each: give whole experts "
            "to each rank instead."
        )


def shard_experts(weights: ExpertWeights, shard: ExpertShard) -> ExpertWeights:
    """Return this rank's slice of a layer's weights.

    Args:
        weights: all experts ``[E, ..]``, whole.
        shard: what to keep.

    Returns:
        ``[num_local, ..]`` with ``part.width`` for I. Sliced tensors own their memory, so that the
        whole ones can be freed; nothing is copied when nothing is sliced. Down's bias is None on
        all but the first slice of I: it must be added once.

    Raises:
        MoegraftError: the shard is for other sizes.
        UnsupportedError: a slice of I of quantised weights, or of experts with a norm behind them.
    """
    shard._check("shard_experts", weights.num_experts, weights.intermediate)
    if weights.scales is not None and not shard.part.is_whole:
        raise UnsupportedError(
            f"The columns of {weights.weight_format!r} experts can't be sliced here: slice them "
            "before they are quantised, give whole experts to each rank, or let the engine do it."
        )
    check_norm(weights, shard)
    if shard.placement.local_to_global == tuple(range(weights.num_experts)) and shard.part.is_whole:
        return weights
    ids = torch.tensor(shard.placement.local_to_global, device=weights.device)

    def gate_up(tensor: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        return None if tensor is None else _gate_up(tensor[ids], dim, weights, shard.part)

    def of_experts(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[ids]

    if weights.scales is not None:
        return replace(
            weights,
            gate_up=entries(weights.gate_up, ids),
            down=entries(weights.down, ids),
            gate_up_bias=of_experts(weights.gate_up_bias),
            down_bias=of_experts(weights.down_bias),
            scales=weights.scales.of_experts(ids),
        )
    out_major = weights.layout.out_major
    down_dim = 2 if out_major else 1
    down = weights.down[ids].narrow(down_dim, shard.part.start, shard.part.width)
    sliced = gate_up(weights.gate_up, 1 if out_major else 2)
    assert sliced is not None
    first_slice = shard.part.start == 0
    return replace(
        weights,
        gate_up=sliced,
        down=down.contiguous(),
        gate_up_bias=gate_up(weights.gate_up_bias, 1),
        down_bias=of_experts(weights.down_bias) if first_slice else None,
    )


def _gate_up(tensor: torch.Tensor, dim: int, weights: ExpertWeights, part: Part) -> torch.Tensor:
    """Keep a part of both halves of packed gate_up columns, in their own order."""
    if part.is_whole:
        return tensor
    whole = torch.arange(tensor.shape[dim], device=tensor.device)
    sides = ("gate", "up") if weights.layout.gated else ("up",)
    columns = [
        whole[weights.layout.columns(side, weights.intermediate)][part.start : part.end]
        for side in sides
    ]
    return tensor.index_select(dim, torch.cat(columns).sort().values)


def _sizes(site: Site) -> tuple[int, int]:
    """Return (H, I)."""
    down = site.projection("down")
    return down.out_features, down.in_features
