"""Bind an adapter to a model: every tensor takes effect, is refused by name, or was excused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from moegraft.adapters import combine
from moegraft.adapters.layouts import LAYOUTS, ReadOptions
from moegraft.adapters.only import keep_only
from moegraft.adapters.read import AdapterSource
from moegraft.adapters.report import BindReport, ProjectionReport, SiteReport
from moegraft.adapters.spec import ModelSpec
from moegraft.errors import HOW_TO_SKIP, AdapterError, count, shorten, shown
from moegraft.gc_pause import gc_paused
from moegraft.sites import LINEAR_PROJECTION, VECTOR_KINDS, Site, vector_name
from moegraft.types import SiteFactors

_LEAF_REASONS = {
    "dora": (
        "it is DoRA's magnitude vector; DoRA is not served there, and the factors alone are "
        "another function than was trained"
    ),
    "lora_B_bias": "it is a bias of lora_B (lora_bias=True), which is not served there",
    "embedding": "LoRA on embeddings and trainable tokens are not served",
    "full": "it is a full tensor, not a LoRA factor (modules_to_save or bias), which is not served",
}
_BASE_COPY = (
    "it is a base weight, which PEFT saves beside LoRA on a head or an embedding; unless it was "
    "trained too, leave it out"
)
_DORA_ALONE = (
    "a DoRA magnitude can't be left out alone: the factors of its module were trained with it, and "
    "without it they are another function; leave them out too, or train without DoRA"
)
_TWICE = "the file holds a tensor of another name for the same place: which one is meant?"
#: What PEFT adds to the path of a module that it wrapped, once per wrap.
_WRAPPED = re.compile(r"(\.base_layer)+$")
#: Reasons that an error spells out; a real model has thousands of tensors.
_MAX_REASONS = 5


@dataclass(frozen=True)
class BoundAdapter:
    """An adapter's canonical factors for one model, with the report of how they were found.

    Attributes:
        factors: site name -> factors, as read (dtype of the file); what is the same for all
            experts is there once.
        report: what became of every tensor.
        magnitudes: linears whose ``dora`` vector still is the file's magnitude, which
            :func:`moegraft.adapters.dora.with_weights` has to change before it is stored.
    """

    factors: Mapping[str, SiteFactors]
    report: BindReport
    magnitudes: tuple[str, ...] = ()


@gc_paused()
def bind(
    source: AdapterSource, spec: ModelSpec, options: ReadOptions | None = None
) -> BoundAdapter:
    """Find every tensor's place in the model; never raises for what can't be served.

    Args:
        source: the adapter as read.
        spec: what the model offers.
        options: the caller's say where the file leaves room for doubt.

    Returns:
        The factors that could be bound and the report; :func:`check_bound` turns refusals into an
        error.
    """
    if options is not None and not isinstance(options, ReadOptions):
        raise AdapterError(f"options={shown(options)} are no moegraft.ReadOptions.")
    options = options or ReadOptions()
    skipped, notes = _skip(source, options)
    refused = dict.fromkeys(_magnitudes_alone(source, skipped), _DORA_ALONE)
    skipped -= set(refused)
    pending = set(source.tensors) - skipped - set(refused)
    factors: dict[str, SiteFactors] = {}
    experts: dict[str, dict[str, int]] = {}
    layouts: dict[str, str] = {}
    used: set[str] = set()
    for layout in LAYOUTS:
        result = layout.read(source, pending, spec, options)
        clash = combine.clash(factors, result.factors)
        if clash:
            reason = f"{clash} already has factors in another layout of the same file"
            refused.update(dict.fromkeys(result.used | set(result.refused), reason))
        else:
            for name, found in result.factors.items():
                factors[name] = combine.merged(factors[name], found) if name in factors else found
            for name, counts in result.experts.items():
                experts.setdefault(name, {}).update(counts)
            used |= result.used
            refused.update(result.refused)
            notes += result.notes
            if result.evidence:
                layouts[layout.name] = result.evidence
        pending -= result.used | set(result.refused)
    factors, left_out = keep_only(factors, spec, options.only)
    factors, copies = combine.store_equal_copies_once(factors)
    notes += copies
    times = Counter(source.keys.values()) if pending else Counter()
    for key in source.tensors if pending else ():
        if key in pending:
            refused[key] = _leaf_reason(source, key) or (
                _TWICE if times[source.keys[key]] > 1 else _why_left(source, spec, key)
            )
    report = BindReport(
        origin=source.origin,
        producer=source.config.producer,
        layouts=layouts,
        total=len(source.tensors),
        bound=len(used),
        sites=tuple(
            _site_report(site, factors, experts.get(site.name, {}))
            for site in spec.sites
            if site.name in factors
        ),
        refused=refused,
        skipped=tuple(sorted(skipped)),
        notes=tuple(notes),
        left_out=left_out,
    )
    magnitudes = tuple(s.name for s in spec.sites if vector_name(s.name, "dora") in factors)
    return BoundAdapter(factors, report, magnitudes)


def check_bound(report: BindReport, spec: ModelSpec) -> None:
    """Raise :class:`AdapterError` unless every tensor was bound or excused."""
    if report.left_out and not report.sites:
        raise AdapterError(
            f"{report.origin}: nothing of it is left: it has factors for other parts of "
            f"{spec.name} than those of only= ({shorten(list(report.left_out))})."
        )
    if report.bound == 0:
        names = shorten(list(report.refused) or list(report.skipped))
        message = (
            f"{report.origin}: bound 0 of {count(report.total, 'tensor')} to {spec.name}. First "
            f"names: {names}. "
        )
        if is_of_another_model(report):
            first = next(iter(report.refused.values()))
            raise AdapterError(
                f"{message}Reason for the first: {first}. Was it trained for another model?"
            )
        reasons = list(dict.fromkeys(report.refused.values())) or ["all were skipped"]
        raise AdapterError(f"{message}Nothing of it can be served: {'; '.join(reasons)}.")
    if report.refused:
        by_reason: dict[str, list[str]] = {}
        for key, reason in report.refused.items():
            by_reason.setdefault(reason, []).append(key)
        reasons = [f"{shorten(keys, 2)}: {why}" for why, keys in by_reason.items()]
        details = "; ".join(reasons[:_MAX_REASONS])
        if len(reasons) > _MAX_REASONS:
            details += f"; and {len(reasons) - _MAX_REASONS} more reasons"
        way_out = ""
        if excusable(report):
            way_out = f" To serve the adapter without them, excuse them by name: {HOW_TO_SKIP}"
        raise AdapterError(
            f"{report.origin}: {len(report.refused)} of {count(report.total, 'tensor')} can't be "
            f"served on {spec.name}, so nothing was loaded. {details}.{way_out}"
        )


def is_of_another_model(report: BindReport) -> bool:
    """True when nothing was bound, though some tensor is of a kind that a model could serve."""
    kinds = {*_LEAF_REASONS.values(), _BASE_COPY, _DORA_ALONE}
    return report.bound == 0 and any(why not in kinds for why in report.refused.values())


def excusable(report: BindReport) -> list[str]:
    """Return the refused tensors that the caller may leave out by themselves: all but DoRA's."""
    never = (_LEAF_REASONS["dora"], _DORA_ALONE)
    return [key for key, why in report.refused.items() if why not in never]


def unmatched_skip(pattern: str) -> str:
    """Return the note for a skip pattern that matches no tensor's name."""
    return f"skip {pattern!r} matches no tensor's name"


def _skip(source: AdapterSource, options: ReadOptions) -> tuple[set[str], list[str]]:
    """Return the tensors that the caller leaves out, and a note per pattern without any."""
    skipped: set[str] = set()
    notes = []
    for pattern in dict.fromkeys(options.skip):
        found = {key for key in source.tensors if re.search(pattern, key)}
        if not found:
            notes.append(unmatched_skip(pattern))
        skipped |= found
    return skipped, notes


def _magnitudes_alone(source: AdapterSource, skipped: set[str]) -> list[str]:
    """Return the skipped DoRA magnitudes with factors of the same module that are not skipped."""
    if not any(source.keys[key].leaf == "dora" for key in skipped):
        return []
    kept = {
        _WRAPPED.sub("", source.keys[key].module)
        for key in set(source.tensors) - skipped
        if source.keys[key].leaf in ("lora_A", "lora_B")
    }
    return [
        key
        for key in source.tensors
        if key in skipped
        and source.keys[key].leaf == "dora"
        and _WRAPPED.sub("", source.keys[key].module) in kept
    ]


def _leaf_reason(source: AdapterSource, key: str) -> str:
    """Return why tensors of this kind are never taken; "" for factors."""
    module, leaf = source.keys[key]
    if leaf == "full" and _WRAPPED.search(module):
        return _BASE_COPY
    return _LEAF_REASONS.get(leaf, "")


def _why_left(source: AdapterSource, spec: ModelSpec, key: str) -> str:
    """Say why no layout took a factor."""
    parsed = source.keys[key]
    path = _WRAPPED.sub("", parsed.module)
    if spec.resolve(path) is not None:
        shape = tuple(source.tensors[key].shape)
        return f"no layout reads a {parsed.leaf} of shape {shape} there"
    if ".experts." in f"{path}." and spec.resolve_experts(
        path.partition(".experts")[0] + ".experts"
    ):
        shape = tuple(source.tensors[key].shape)
        return f"no layout reads a {parsed.leaf} of shape {shape} under this name of the experts"
    return spec.why_not(path)


def _site_report(
    site: Site, all_factors: Mapping[str, SiteFactors], experts: Mapping[str, int]
) -> SiteReport:
    """Describe one site; ``experts``: projection -> experts with a factor, where not all have."""
    factors = all_factors[site.name]
    vectors = {k: all_factors.get(vector_name(site.name, k)) for k in VECTOR_KINDS}
    covered = site.num_experts
    if factors.expert_map is not None:
        covered = int((factors.expert_map >= 0).sum())
    projections = {
        name: ProjectionReport(
            rank=factor.rank,
            scale=factor.scale,
            experts=experts.get(name, covered),
            shared_a=factor.lora_A.shape[0] == 1 and covered > 1,
            shared_b=factor.lora_B.shape[0] == 1 and covered > 1,
        )
        for name, factor in factors.projections.items()
    }
    seen: set[int] = set()
    num_bytes = 0
    for factor in factors.projections.values():
        if id(factor.lora_A) not in seen:
            num_bytes += factor.lora_A.numel() * factor.lora_A.element_size()
            seen.add(id(factor.lora_A))
        num_bytes += factor.lora_B.numel() * factor.lora_B.element_size()
    for vector in vectors.values():
        if vector is not None:
            num_bytes += vector.projections[LINEAR_PROJECTION].lora_B.nbytes
    kinds = tuple(kind for kind, vector in vectors.items() if vector is not None)
    return SiteReport(site.name, site.kind, site.num_experts, projections, num_bytes, kinds)
