"""The factor table as the CPU backend reads it: decoded once per version of the bank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch

from moegraft.factor_table import SiteTable
from moegraft.factors import (
    A_EXPERT_STRIDE,
    A_OFFSET,
    A_ROW_STRIDE,
    B_EXPERT_STRIDE,
    B_OFFSET,
    B_ROW_STRIDE,
    UNIT_BYTES,
)


@dataclass(frozen=True)
class Shape:
    """What two slots must have in common to be served by one batched product."""

    rank: int
    a_row_stride: int
    b_row_stride: int


@dataclass(frozen=True)
class HostProjection:
    """One projection's factors of all slots.

    Attributes:
        shapes: per slot; None = no delta there.
        a_base, b_base: int64 ``[S]`` offsets in 16-byte units.
        a_step, b_step: int64 ``[S]`` units between two experts' entries, 0 = shared.
        scale: fp32 ``[S]``.
        shares_a: per slot, True when its A is the previous projection's.
    """

    shapes: tuple[Shape | None, ...]
    a_base: torch.Tensor
    b_base: torch.Tensor
    a_step: torch.Tensor
    b_step: torch.Tensor
    scale: torch.Tensor
    shares_a: tuple[bool, ...]

    def groups(self, live: tuple[int, ...]) -> Iterator[tuple[Shape, tuple[int, ...]]]:
        """Yield the live slots that have a delta here, grouped by shape."""
        found: dict[Shape, list[int]] = {}
        for slot in live:
            shape = self.shapes[slot]
            if shape is not None:
                found.setdefault(shape, []).append(slot)
        for shape, slots in found.items():
            yield shape, tuple(slots)


@dataclass(frozen=True)
class HostTable:
    """A site's table, decoded.

    Attributes:
        version: the arena's version it was decoded from.
        projections: in the site's order.
        expert_map: int64 ``[S, E]``, or None for linears.
        full: per slot, True when expert e has entry e for all experts.
        arena: the memory at that version.
        stacks: what :mod:`moegraft.backends.cpu.lora_stacked` built from this version.
    """

    version: int
    projections: tuple[HostProjection, ...]
    expert_map: torch.Tensor | None
    full: tuple[bool, ...]
    arena: torch.Tensor
    stacks: dict[Hashable, object] = field(default_factory=dict)
    _windows: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    def windows(self, rank: int, width: int, row_stride: int) -> torch.Tensor:
        """Return a ``[units, rank, width]`` window that slides over the arena in 16-byte steps.

        Indexing it with offsets gathers any factors of that shape, whoever they belong to.
        """
        key = (rank, width, row_stride)
        if key not in self._windows:
            arena = self.arena
            unit = UNIT_BYTES // arena.element_size()
            last = arena.numel() - (rank - 1) * row_stride - width
            self._windows[key] = arena.as_strided(
                (last // unit + 1, rank, width), (unit, row_stride, 1), arena.storage_offset()
            )
        return self._windows[key]


def host_table(table: SiteTable) -> HostTable:
    """Return the decoded table, from the table's cache unless the bank has changed since."""
    cached = table.host_cache.get("cpu")
    if isinstance(cached, HostTable) and cached.version == table.arena.version:
        return cached
    with torch.inference_mode(False):
        decoded = _decode(table)
    table.host_cache["cpu"] = decoded
    return decoded


def _decode(table: SiteTable) -> HostTable:
    # Read before the table: a write by another thread meanwhile makes this decoding stale at once.
    version = table.arena.version
    unit = UNIT_BYTES // table.arena.data.element_size()
    projections: list[HostProjection] = []
    previous: torch.Tensor | None = None
    for i in range(len(table.site.projections)):
        records = table.records[:, i]
        ranks = table.ranks[:, i].tolist()
        strides = records[:, [A_ROW_STRIDE, B_ROW_STRIDE]].tolist()
        shapes = tuple(
            Shape(r, a, b) if r else None for r, (a, b) in zip(ranks, strides, strict=True)
        )
        offsets = records[:, A_OFFSET].tolist()
        before = [None] * len(ranks) if previous is None else previous[:, A_OFFSET].tolist()
        shares_a = tuple(
            shape is not None and offset == old and projections[-1].shapes[s] is not None
            for s, (shape, offset, old) in enumerate(zip(shapes, offsets, before, strict=True))
        )
        projections.append(
            HostProjection(
                shapes=shapes,
                a_base=records[:, A_OFFSET].contiguous(),
                b_base=records[:, B_OFFSET].contiguous(),
                a_step=records[:, A_EXPERT_STRIDE] // unit,
                b_step=records[:, B_EXPERT_STRIDE] // unit,
                scale=table.scales[:, i].contiguous(),
                shares_a=shares_a,
            )
        )
        previous = records
    expert_map = None if table.expert_map is None else table.expert_map.long()
    full = (True,) * table.num_slots
    if expert_map is not None:
        identity = torch.arange(expert_map.shape[1])
        full = tuple((expert_map == identity).all(dim=1).tolist())
    return HostTable(version, tuple(projections), expert_map, full, table.arena.data)
