"""Write an adapter in another layout, exactly, or at a smaller rank when that is asked for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moegraft._version import __version__
from moegraft.adapters.bind import BoundAdapter, bind, check_bound
from moegraft.adapters.layouts import ReadOptions
from moegraft.adapters.read import CONFIG_FILE, WEIGHTS_FILE, AdapterSource, make_source
from moegraft.adapters.refit import refit
from moegraft.adapters.report import BindReport
from moegraft.adapters.spec import ModelSpec
from moegraft.adapters.writers import WRITERS, ExpertNames, Pair, Writer, Written
from moegraft.adapters.writers.base import PREFIX, for_all_experts, pair_keys
from moegraft.adapters.writers.config import VECTOR_LEAVES, check_for_peft, make_config
from moegraft.errors import AdapterError
from moegraft.sites import LINEAR_PROJECTION, Site, vector_name
from moegraft.types import SiteFactors

#: How far the delta that is read back may be from what was written, in fp64: only the order of
#: sums differs.
_READ_BACK = 1e-6


@dataclass(frozen=True)
class Converted:
    """An adapter in another layout, in memory.

    Attributes:
        tensors: key -> tensor, as they go to the file.
        config: the JSON of adapter_config.json.
        layout: the layout's name.
        exact: True when every expert's delta is the source's, with nothing rounded.
        refit_error: the largest relative error of a smaller rank, per projection; empty without.
        report: how the source was bound.
        notes: what had to be rounded, and why.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    layout: str
    exact: bool
    refit_error: Mapping[str, float]
    report: BindReport
    notes: tuple[str, ...] = ()

    def save(self, folder: str | Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json into a new folder.

        Raises:
            AdapterError: the folder exists already, or can't be written; nothing is left then.
        """
        folder = Path(folder)
        if folder.exists():
            raise AdapterError(f"{str(folder)!r} exists already; give a folder that does not.")
        about = f"moegraft {__version__} convert to {self.layout}"
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                new = Path(made) / folder.name
                new.mkdir()
                metadata = {"format": "pt", "made_by": about}
                save_file(dict(self.tensors), new / WEIGHTS_FILE, metadata=metadata)
                text = json.dumps(self.config, indent=2, sort_keys=True) + "\n"
                (new / CONFIG_FILE).write_text(text, encoding="utf-8")
                new.rename(folder)
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{str(folder)!r} can't be written: {error}.") from error


def convert(
    source: AdapterSource,
    spec: ModelSpec,
    to: str,
    *,
    options: ReadOptions | None = None,
    names: ExpertNames | None = None,
    rank: int | None = None,
) -> Converted:
    """Convert an adapter to another layout.

    Args:
        source: the adapter as read.
        spec: the model it is for.
        to: ``peft``, ``per-expert``, ``3d`` or ``shared-outer``.
        options: how to read the source.
        names: names of single experts in the model's checkpoint, for ``per-expert``.
        rank: refit factors of a larger rank to this one, which is not exact; None = never.

    Returns:
        The converted adapter, which was read back and compared with the source.

    Raises:
        AdapterError: the source can't be bound in full, or the layout can't hold it exactly.
    """
    writer = WRITERS.get(to)
    if writer is None:
        raise AdapterError(f"to={to!r} is not one of {', '.join(WRITERS)}.")
    if rank is not None and rank < 1:
        raise AdapterError(f"rank={rank} must be at least 1.")
    bound = bind(source, spec, options)
    check_bound(bound.report, spec)
    notes: list[str] = []
    errors: dict[str, float] = {}
    written: list[Written] = []
    expected: dict[str, list[Pair]] = {}
    for site in spec.sites:
        if site.name not in bound.factors:
            continue
        pairs = _pairs(site, bound.factors[site.name], writer, notes)
        _check_vectors(site, pairs, bound, rank)
        if rank is not None:
            pairs = [_refitted(pair, rank, errors) for pair in pairs]
        expected[site.name] = pairs
        if site.kind == "experts":
            written += writer.write(site, pairs, names or ExpertNames())
        else:
            written.append(_write_linear(site, pairs[0], bound))
    tensors = {key: tensor for place in written for key, tensor in place.tensors.items()}
    if not tensors:
        raise AdapterError(
            f"{source.origin}: all of its factors are zeros, nothing is left to write."
        )
    config = make_config(written, spec, source.config.raw, writer.peft_version)
    if writer.peft_version:
        check_for_peft(written, config)
    exact = not errors and not notes
    converted = Converted(tensors, config, to, exact, errors, bound.report, tuple(notes))
    _check(converted, spec, bound, expected if errors else {})
    return converted


def _pairs(site: Site, factors: SiteFactors, writer: Writer, notes: list[str]) -> list[Pair]:
    if site.kind == "experts":
        return writer.pairs(site, factors, notes)
    factor = factors.projections[LINEAR_PROJECTION]
    return [Pair(site.kind, factor.lora_A, factor.lora_B, factor.scale)]


def _refitted(pair: Pair, rank: int, errors: dict[str, float]) -> Pair:
    new, error = refit(pair, rank)
    if new is not pair:
        errors[pair.role] = max(errors.get(pair.role, 0.0), error)
    return new


def _check_vectors(site: Site, pairs: list[Pair], bound: BoundAdapter, rank: int | None) -> None:
    if rank is not None and site.name in bound.magnitudes and pairs[0].rank > rank:
        raise AdapterError(
            f"{site.name} has DoRA: its magnitude was trained with the factors as they are, so "
            "they can't be refitted to a smaller rank."
        )


def _write_linear(site: Site, pair: Pair, bound: BoundAdapter) -> Written:
    tensors = pair_keys(site.name, pair.lora_A[0], pair.lora_B[0])
    for kind, leaf in VECTOR_LEAVES.items():
        vector = bound.factors.get(vector_name(site.name, kind))
        if vector is not None:
            value = vector.projections[LINEAR_PROJECTION].lora_B[0, :, 0]
            tensors[f"{PREFIX}{site.name}.{leaf}"] = value.clone()
    if site.kind == "router":  # a parameter of a module that is no linear
        return Written(f"{site.name}.weight", "parameter", pair.rank, pair.scale, tensors)
    return Written(site.name, "module", pair.rank, pair.scale, tensors)


def _check(
    converted: Converted, spec: ModelSpec, bound: BoundAdapter, refitted: Mapping[str, list[Pair]]
) -> None:
    """Read back what would be written: it must bind in full and mean the same."""
    again = bind(make_source(converted.tensors, converted.config, "the converted adapter"), spec)
    check_bound(again.report, spec)
    for site in spec.table_sites:
        if site.name not in bound.factors:
            continue
        # A writer may leave out what is zero for all experts.
        got = _applied(site, again.factors.get(site.name, SiteFactors({})))
        if site.name in refitted:
            wanted = _applied_pairs(site, refitted[site.name])
        else:
            wanted = _applied(site, bound.factors[site.name])
        for name in wanted.keys() | got.keys():
            want = wanted.get(name, torch.zeros(()))
            difference = float((got.get(name, torch.zeros(())) - want).abs().max())
            limit = _READ_BACK * float(want.abs().max())
            assert difference <= limit, f"{site.name} {name}: read back {difference} off"


def _applied(site: Site, factors: SiteFactors) -> dict[str, torch.Tensor]:
    """Return projection -> the delta of a fixed input, fp64 ``[E, out]``."""
    found = {}
    for name, factor in factors.projections.items():
        tensors = (factor.lora_A, factor.lora_B)
        a, b = (for_all_experts(tensor, site, factors.expert_map) for tensor in tensors)
        found[name] = _apply(a, b, factor.scale)
    return found


def _applied_pairs(site: Site, pairs: Iterable[Pair]) -> dict[str, torch.Tensor]:
    found = {}
    for pair in pairs:
        y = _apply(pair.lora_A, pair.lora_B, pair.scale).expand(site.num_experts, -1)
        if pair.role == "gate_up":
            width = site.projection("up").out_features
            for half in ("gate", "up") if site.gated else ("up",):
                found[half] = y[:, site.layout.columns(half, width)]
        else:
            found[pair.role if site.kind == "experts" else LINEAR_PROJECTION] = y
    return found


def _apply(lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float) -> torch.Tensor:
    x = torch.linspace(-1, 1, lora_a.shape[2], dtype=torch.float64).cos()[:, None]
    return (scale * (lora_b.double() @ (lora_a.double() @ x))).squeeze(-1)
