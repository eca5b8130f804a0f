"""Where an adapter's factors belong in a checkpoint, by the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moegraft.adapters.checkpoint import CheckpointTensor
from moegraft.adapters.keys import EXPERT_NAMES
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import AdapterError, shorten
from moegraft.sites import LINEAR_PROJECTION, Site, vector_name
from moegraft.types import SiteFactors

_EXPERT = re.compile(r"^(?P<experts>.*\bexperts)\.(?P<expert>\d{1,9})\.(?P<name>\w+)\.weight$")
_STACKED = re.compile(r"^(?P<experts>.*\bexperts)\.(?P<name>gate_up_proj|up_proj|down_proj)$")
#: Role of a linear's bias.
BIAS = "bias"


@dataclass(frozen=True)
class Place:
    """One stored tensor that an adapter can change.

    Attributes:
        tensor: where it lies.
        site: the site that it is a weight of.
        role: ``gate``, ``up``, ``down``, ``gate_up``, ``linear`` or ``bias`` (of a linear).
        expert: whose weight it is; None where it holds all experts, or is no expert's.
    """

    tensor: CheckpointTensor
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
        if self.role == BIAS:
            return vector_name(self.site.name, "lora_bias") in factors
        found = factors.get(self.site.name)
        return found is not None and any(has_factor(found, *part) for part in self.parts())

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
        projection = self.site.projection(LINEAR_PROJECTION if self.role == BIAS else self.role)
        return projection.out_features, projection.in_features


def find_place(tensor: CheckpointTensor, spec: ModelSpec) -> Place | None:
    """Find the place of a checkpoint's tensor; None for none that takes an adapter."""
    single = _EXPERT.match(tensor.name)
    if single:
        site, role = spec.resolve_experts(single["experts"]), EXPERT_NAMES.get(single["name"])
        if site is None or role not in {p.name for p in site.projections}:
            return None
        return Place(tensor, site, str(role), int(single["expert"]))
    stacked = _STACKED.match(tensor.name)
    if stacked:
        site = spec.resolve_experts(stacked["experts"])
        role = {"gate_up_proj": "gate_up", "up_proj": "up", "down_proj": "down"}[stacked["name"]]
        return None if site is None else Place(tensor, site, role, None)
    path, _, leaf = tensor.name.rpartition(".")
    site = spec.resolve(path) if leaf in ("weight", BIAS) else None
    if site is None or site.kind == "experts":
        return None
    return Place(tensor, site, LINEAR_PROJECTION if leaf == "weight" else BIAS, None)


def has_factor(factors: SiteFactors, projection: str, expert: int) -> bool:
    return projection in factors.projections and factors.entry(expert) >= 0


def check_all_found(
    changes: list[Place], factors: Mapping[str, SiteFactors], spec: ModelSpec
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
        if has_factor(factors[site.name], projection, expert)
        and (site.name, projection, expert) not in found
    ]
    if lost:
        raise AdapterError(
            f"The checkpoint has no weight that is known as {shorten(lost)}. Either its names are "
            "not those of the model's save_pretrained: load it with transformers, save it again, "
            "and merge into that; or it is an output head that is tied to the embedding, which the "
            "delta must not change: untie it first."
        )
    biases = {change.site.name for change in changes if change.role == BIAS}
    without = [
        site.name
        for site in spec.sites
        if vector_name(site.name, "lora_bias") in factors and site.name not in biases
    ]
    if without:
        raise AdapterError(
            f"The adapter has a bias of lora_B for {shorten(without)}, and the model has no bias "
            "there that it could be added to: it can be served, but not merged."
        )


def _check_shape(place: Place) -> None:
    rows, columns = place.sizes
    if place.role == BIAS and place.tensor.shape == (rows,):
        return
    allowed: list[tuple[int, ...]] = [(rows, columns)]
    if place.is_stack:
        experts = place.site.num_experts
        allowed = [(experts, rows, columns), (experts, columns, rows)]
    if place.tensor.shape not in allowed:
        raise AdapterError(
            f"{place.tensor.name} has shape {place.tensor.shape}, the model of this config needs "
            f"{allowed[0]}."
        )


def stack_order(places: list[Place], changes: list[Place]) -> bool | None:
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
