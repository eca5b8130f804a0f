"""Slots, ranks and scales as an engine passes them, checked before anything is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import index
from typing import SupportsIndex

from moegraft.errors import AdapterError


def checked_slot(site: str, slot: SupportsIndex, num_slots: int) -> int:
    """Return a slot's number; AdapterError when it is none of the table's."""
    number = _whole(slot)
    if not 0 <= number < num_slots:
        raise AdapterError(f"{site}: slot {slot!r} is not one of {num_slots}.")
    return number


def checked_ranks(
    site: str, rank: SupportsIndex | Mapping[str, SupportsIndex], most: Mapping[str, int]
) -> dict[str, int]:
    """Return projection name -> rank; one number stands for all projections.

    Args:
        site: begins the message.
        rank: as the caller gave it.
        most: projection name -> the pool's rank.

    Raises:
        AdapterError: a projection that the pool lacks, or no number in 0 to the pool's rank.
    """
    given = dict(rank) if isinstance(rank, Mapping) else dict.fromkeys(most, rank)
    _check_names(site, given, most)
    ranks = {name: _whole(value) for name, value in given.items()}
    for name, value in ranks.items():
        if not 0 <= value <= most[name]:
            raise AdapterError(
                f"{site}, {name}: rank {given[name]!r} is not in 0 to {most[name]}, the pool's."
            )
    return ranks


def checked_scales(
    site: str,
    scale: float | Mapping[str, float],
    ranks: Mapping[str, int],
    known: Iterable[str],
) -> dict[str, float]:
    """Return the scale of each projection that has a rank; one number stands for all of them.

    Raises:
        AdapterError: a projection that the pool lacks, or a scale that is no finite number.
    """
    given = dict(scale) if isinstance(scale, Mapping) else dict.fromkeys(ranks, scale)
    _check_names(site, given, known)
    scales = {}
    for name in (name for name, rank in ranks.items() if rank):
        try:
            scales[name] = float(given[name])
        except (KeyError, TypeError, ValueError):
            scales[name] = math.nan
        if not math.isfinite(scales[name]):
            raise AdapterError(f"{site}, {name}: scale {given.get(name)!r} is no finite number.")
    return scales


def _check_names(site: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise AdapterError(f"{site}: the pool has no {name!r}, only {list(known)}.")


def _whole(number: SupportsIndex) -> int:
    """Return an int of any kind, numpy's too; -1 for what is none, which no slot or rank is."""
    if isinstance(number, bool):
        return -1
    try:
        return index(number)
    except TypeError:
        return -1
