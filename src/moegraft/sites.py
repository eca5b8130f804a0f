"""The places in a model where adapters attach: their names and sizes, no tensors.

Letters are those of :mod:`moegraft.types`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from moegraft.types import WeightLayout

#: Projections of an experts site, in the order of the factor table's rows.
EXPERT_PROJECTIONS = ("gate", "up", "down")
#: The one projection of a dense linear or a router.
LINEAR_PROJECTION = "linear"
#: What an adapter may have for a linear besides factors.
VectorKind = Literal["lora_bias", "dora"]
VECTOR_KINDS: tuple[VectorKind, ...] = ("lora_bias", "dora")


@dataclass(frozen=True)
class Projection:
    """One matrix that LoRA can adapt: its name and logical sizes."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Site:
    """One place in a model where adapters attach: an experts module, a linear or a router.

    Attributes:
        name: the module's dotted path in the host model.
        kind: ``experts``, ``linear`` or ``router``.
        projections: ``gate, up, down`` for experts (no gate: ``up, down``), ``linear`` otherwise.
        num_experts: E; 1 for linears and routers.
        layout: how the host packs gate and up; needed to split a fused B.
        aliases: other dotted paths that reach the same module.
    """

    name: str
    kind: Literal["experts", "linear", "router"]
    projections: tuple[Projection, ...]
    num_experts: int = 1
    layout: WeightLayout = field(default_factory=WeightLayout)
    aliases: tuple[str, ...] = ()

    @cached_property
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        """Projection name -> (in, out)."""
        return {p.name: (p.in_features, p.out_features) for p in self.projections}

    def projection(self, name: str) -> Projection:
        """Return the projection called ``name``; KeyError when the site has none."""
        for projection in self.projections:
            if projection.name == name:
                return projection
        raise KeyError(name)

    @property
    def gated(self) -> bool:
        """True for experts with a gate."""
        return any(p.name == "gate" for p in self.projections)


def expert_site(
    name: str, num_experts: int, hidden: int, intermediate: int, layout: WeightLayout | None = None
) -> Site:
    """Build the :class:`Site` of an experts module with E, H and I as given."""
    layout = layout or WeightLayout()
    sizes = {
        "gate": (hidden, intermediate),
        "up": (hidden, intermediate),
        "down": (intermediate, hidden),
    }
    names = EXPERT_PROJECTIONS if layout.gated else EXPERT_PROJECTIONS[1:]
    return Site(
        name, "experts", tuple(Projection(n, *sizes[n]) for n in names), num_experts, layout
    )


def linear_site(
    name: str, in_features: int, out_features: int, kind: Literal["linear", "router"] = "linear"
) -> Site:
    """Build the :class:`Site` of a dense linear or a router."""
    return Site(name, kind, (Projection(LINEAR_PROJECTION, in_features, out_features),))


def vector_name(linear: str, kind: VectorKind) -> str:
    """Return the name of a linear's vector site; no module has a colon in its path."""
    return f"{linear}:{kind}"


def vector_site(linear: Site, kind: VectorKind) -> Site:
    """Build the site of a vector ``[out]`` per adapter: a linear with one input, which is 1.

    So a vector is a factor of rank 1 that lies in the same arena and table as all others.
    """
    out_features = linear.projection(LINEAR_PROJECTION).out_features
    return linear_site(vector_name(linear.name, kind), 1, out_features)
