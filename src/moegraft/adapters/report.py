"""What became of every tensor of an adapter file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moegraft.errors import count


@dataclass(frozen=True)
class ProjectionReport:
    """One projection of one site.

    Attributes:
        rank, scale: live rank and scale.
        experts: how many experts have a delta in this projection; 1 for linears.
        shared_a, shared_b: True when one factor serves all experts.
    """

    rank: int
    scale: float
    experts: int
    shared_a: bool = False
    shared_b: bool = False


@dataclass(frozen=True)
class SiteReport:
    """One site that the adapter changes.

    Attributes:
        site: dotted path in the model.
        kind: ``experts``, ``linear`` or ``router``.
        num_experts: experts the site has.
        projections: name -> what was bound.
        num_bytes: bytes of the factors in the file's dtype, equal copies counted once.
        vectors: ``lora_bias`` or ``dora`` where a linear has such a vector too.
    """

    site: str
    kind: str
    num_experts: int
    projections: Mapping[str, ProjectionReport]
    num_bytes: int
    vectors: tuple[str, ...] = ()

    @property
    def places(self) -> dict[str, int]:
        """Projection -> experts that it covers, and vector -> 1."""
        experts = {name: report.experts for name, report in self.projections.items()}
        return {**experts, **dict.fromkeys(self.vectors, 1)}


@dataclass(frozen=True)
class BindReport:
    """The whole adapter against one model. ``bound + len(refused) + len(skipped) == total``.

    Attributes:
        origin: where the adapter came from.
        producer: who wrote it, as far as known.
        layouts: name of each layout found -> the evidence for it.
        total: tensors in the file; bound: tensors that take effect.
        sites: what was bound, per site.
        refused: tensor name -> why it can't be served.
        skipped: tensors excused by the caller's ``skip`` option.
        notes: warnings worth reading, such as a ``skip`` pattern that matches nothing.
        left_out: site -> projections that were bound, and left out for the caller's ``only``
            option; ``sites`` lists what is left.
    """

    origin: str
    producer: str
    layouts: Mapping[str, str]
    total: int
    bound: int
    sites: tuple[SiteReport, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def max_rank(self) -> int:
        """The largest rank of any projection; 0 when nothing was bound."""
        return max((p.rank for s in self.sites for p in s.projections.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all bound factors, see :class:`SiteReport`."""
        return sum(site.num_bytes for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready data."""
        return {**asdict(self), "max_rank": self.max_rank, "num_bytes": self.num_bytes}

    def summary(self) -> str:
        """Return one line: what was bound, where, at which ranks and scales."""
        ranks = sorted({p.rank for s in self.sites for p in s.projections.values()})
        scales = sorted({round(p.scale, 6) for s in self.sites for p in s.projections.values()})
        kinds: dict[str, int] = {}
        for site in self.sites:
            kinds[site.kind] = kinds.get(site.kind, 0) + 1
        nouns = {"experts": "experts module"}
        places = ", ".join(count(n, nouns.get(kind, kind)) for kind, n in kinds.items())
        return (
            f"bound {self.bound} of {count(self.total, 'tensor')} to {places or 'nothing'}; "
            f"ranks {ranks}, scales {scales}, {self.num_bytes / 1e6:.2f} MB"
            + (f"; left out at {count(len(self.left_out), 'place')}" if self.left_out else "")
        )
