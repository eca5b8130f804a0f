"""What is known of a stored adapter, and what a name and its factors must be."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from moegraft.adapters.checksum import Digest
from moegraft.adapters.finite import check_packed, is_finite
from moegraft.adapters.layouts import ReadOptions
from moegraft.adapters.report import BindReport
from moegraft.errors import AdapterError, shorten, shown
from moegraft.factors import PackedAdapter
from moegraft.types import SiteFactors


@dataclass(frozen=True)
class AdapterInfo:
    """What a caller may know about a stored adapter.

    Attributes:
        name: its name.
        version: a number that is never used twice; goes up with every load and update, so caches
            keyed by it never serve an older content.
        digest: what :attr:`checksum` comes from; it may be worked out when it is first read.
        report: how its tensors were bound.
        slot: the bank slot it is in, None when it is only on the host.
        num_bytes: bytes it takes in the bank.
        pinned: True when it may not be evicted.
    """

    name: str
    version: int
    digest: Digest = field(repr=False)
    report: BindReport
    slot: int | None
    num_bytes: int
    pinned: bool

    @property
    def checksum(self) -> str:
        """Hexadecimal digest of the factors and scales as served."""
        return self.digest.value


@dataclass(frozen=True)
class ReadAs:
    """How an adapter was read, so that an update can be read the same way.

    Attributes:
        config: the JSON of its adapter_config, a copy of its own.
        options: the caller's say; None = nothing was said.
    """

    config: Mapping[str, Any]
    options: ReadOptions | None = None

    @staticmethod
    def of(config: Mapping[str, Any], options: ReadOptions | None) -> ReadAs:
        """Keep a copy, so that a later change of the caller's config is not ours.

        Raises:
            AdapterError: it holds something that can't be copied, as no JSON does.
        """
        try:
            return ReadAs(copy.deepcopy(dict(config)), options)
        except Exception as error:
            raise AdapterError(f"The config holds what is no JSON: {error}.") from error


def check_name(name: str) -> None:
    """Names are labels, never paths; keep them printable and short."""
    if not isinstance(name, str) or not name or len(name) > 256 or not name.isprintable():
        raise AdapterError(f"{shown(name)} is not an adapter name: 1 to 256 printable characters.")


def name_is_taken(name: str, version: int) -> AdapterError:
    """Return the error for a load that may not replace."""
    return AdapterError(
        f"There is an adapter {name!r} already (version {version}): unload() it, choose another "
        "name, or load with replace=True."
    )


def check_overflow(name: str, packed: PackedAdapter, factors: Mapping[str, SiteFactors]) -> None:
    """Refuse factors that are finite as given but not in the model's dtype.

    Args:
        name: the adapter's.
        packed: its factors in the model's dtype.
        factors: the same as given; values are looked at only when a dtype here has a wider range.

    Raises:
        AdapterError: some values are too large, or were not finite before.
    """
    dtype, limit = packed.data.dtype, torch.finfo(packed.data.dtype).max
    projections = [f for site in factors.values() for f in site.projections.values()]
    given = [tensor for f in projections for tensor in (f.lora_A, f.lora_B)]
    wider = {tensor.dtype for tensor in given if torch.finfo(tensor.dtype).max > limit}
    if not wider or is_finite(packed.data):
        return
    if not all(map(is_finite, given)):
        check_packed(name, packed)
    count = int((~torch.isfinite(packed.data)).sum())
    short, *others = (str(d).removeprefix("torch.") for d in (dtype, *sorted(wider, key=str)))
    raise AdapterError(
        f"Adapter {name!r} has {count} values beyond {short}'s range of {limit:g}; load the model "
        f"in {' or '.join(others)} to serve it."
    )


def check_covers(name: str, old: BindReport, new: BindReport) -> None:
    """Refuse an update that leaves out places of the version that it replaces.

    Raises:
        AdapterError: a projection without a factor, or for fewer experts than before.
    """
    after = {(s.site, place): experts for s in new.sites for place, experts in s.places.items()}
    lost = [
        f"{site.site} ({place}: {after.get((site.site, place), 0)} of {experts})"
        for site in old.sites
        for place, experts in site.places.items()
        if after.get((site.site, place), 0) < experts
    ]
    if lost:
        raise AdapterError(
            f"The update of {name!r} leaves out factors that the loaded version has: "
            f"{shorten(lost)} (experts or places that are left). An update replaces all of an "
            "adapter: give all its tensors. To make it another adapter, load() it."
        )
