"""What a layout's writer gets and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from moegraft.sites import Site
from moegraft.types import LoraFactor, SiteFactors

PREFIX = "base_model.model."


@dataclass(frozen=True)
class ExpertNames:
    """How a model's checkpoint names the projections of single experts.

    Attributes:
        gate, up, down: last part of the path.
        block: name of the module around ``experts``; None = the model's own.

    Example: Mixtral is ``ExpertNames("w1", "w3", "w2", "block_sparse_moe")``.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str | None = None

    def of(self, projection: str) -> str:
        """Return the name of ``gate``, ``up`` or ``down``."""
        return {"gate": self.gate, "up": self.up, "down": self.down}[projection]

    def experts_path(self, site: Site) -> str:
        """Return the path of an experts module."""
        if self.block is None:
            return site.name
        head, _, experts = site.name.rpartition(".")
        return f"{head.rpartition('.')[0]}.{self.block}.{experts}".removeprefix(".")


@dataclass(frozen=True)
class Pair:
    """Factors of one matrix per expert, before they are laid out for a file.

    Attributes:
        role: ``gate``, ``up``, ``down``, ``gate_up`` (rows of B in the model's own order) or
            ``linear``.
        lora_A: ``[E or 1, r, in]``; lora_B: ``[E or 1, out, r]``.
        scale: alpha/r.
    """

    role: str
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.lora_A.shape[1]


@dataclass(frozen=True)
class Written:
    """Tensors of one place as they go to the file.

    Attributes:
        name: the path that the config's patterns are matched with.
        kind: in which list of the config it is a target.
        rank, scale: what the config has to say of it.
        tensors: key -> tensor.
    """

    name: str
    kind: Literal["module", "parameter"]
    rank: int
    scale: float
    tensors: Mapping[str, torch.Tensor] = field(repr=False)


class Writer(Protocol):
    """One layout to write experts in."""

    name: str
    #: The oldest PEFT that writes the same, "" for layouts that are not PEFT's.
    peft_version: str

    def pairs(self, site: Site, factors: SiteFactors, notes: list[str]) -> list[Pair]:
        """Return what the layout has a place for, experts without a factor as zeros.

        What has to be rounded is said in ``notes``; else the pairs mean exactly the same.

        Raises:
            AdapterError: the layout can't hold these factors exactly.
        """
        ...

    def write(self, site: Site, pairs: list[Pair], names: ExpertNames) -> list[Written]:
        """Lay the pairs of one site out."""
        ...


def pair_keys(path: str, lora_a: torch.Tensor, lora_b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return both tensors under their keys, in memory of their own."""
    pair = {"lora_A": lora_a, "lora_B": lora_b}
    return {f"{PREFIX}{path}.{leaf}.weight": t.clone().contiguous() for leaf, t in pair.items()}


def for_all_experts(
    tensor: torch.Tensor, site: Site, expert_map: torch.Tensor | None
) -> torch.Tensor:
    """Return ``[E, ..]`` of a factor ``[entries or 1, ..]``; zeros where the map has -1."""
    if expert_map is None:
        return tensor.expand(site.num_experts, *tensor.shape[1:])
    live = expert_map >= 0
    out = tensor.new_zeros(site.num_experts, *tensor.shape[1:])
    out[live] = tensor if tensor.shape[0] == 1 else tensor[expert_map[live].long()]
    return out


def without_idle_ranks(factor: LoraFactor) -> LoraFactor:
    """Leave out the ranks whose row of A or column of B is zero for all experts.

    The delta stays the same. A factor that is zero as a whole, before training, stays as it is.
    """
    live = factor.lora_A.count_nonzero((0, 2)).bool() & factor.lora_B.count_nonzero((0, 1)).bool()
    if bool(live.all()) or not bool(live.any()):
        return factor
    return LoraFactor(factor.lora_A[:, live], factor.lora_B[:, :, live], factor.scale)


def apart(
    site: Site, factors: SiteFactors, shared: frozenset[tuple[str, str]] = frozenset()
) -> list[Pair]:
    """Return one pair per projection, gate and up apart.

    Args:
        site: an experts module; factors: its factors.
        shared: (projection, ``lora_A`` or ``lora_B``) to keep at an expert dimension of 1.
    """
    found = []
    for projection in site.projections:
        if projection.name not in factors.projections:
            continue
        factor = without_idle_ranks(factors.projections[projection.name])
        tensors = {"lora_A": factor.lora_A, "lora_B": factor.lora_B}
        for leaf, tensor in tensors.items():
            if (projection.name, leaf) in shared:
                tensors[leaf] = tensor[:1]
            else:
                tensors[leaf] = for_all_experts(tensor, site, factors.expert_map)
        found.append(Pair(projection.name, tensors["lora_A"], tensors["lora_B"], factor.scale))
    return found
