"""The factor table as layers and backends see it: one site's records and the arena behind them.

The records are described in :mod:`moegraft.factors`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from moegraft.errors import MoegraftError
from moegraft.factors import (
    A_OFFSET,
    B_OFFSET,
    RANK_I32,
    SCALE_F32,
    SHARED_A_I32,
    UNIT_BYTES,
    TableLayout,
)
from moegraft.packing import pack_adapter
from moegraft.sites import Site
from moegraft.types import LoraFactor, SiteFactors, TokenSlots


@dataclass
class Arena:
    """The memory that all factors lie in, shared by every site's table.

    Attributes:
        data: 1-D tensor that every offset counts from. Replaced only while a bank may still grow;
            a frozen bank never moves it.
        version: goes up with every change of the table or the arena's address, so that host-side
            backends can keep what they decoded.
    """

    data: torch.Tensor
    version: int = 0


@dataclass(frozen=True, eq=False)
class SiteTable:
    """One site's view of the factors of all slots; the table's addresses never change.

    Attributes:
        site: the site.
        arena: where the factors are.
        records: int64 ``[S, projections, 8]``, as :mod:`moegraft.factors` says.
        expert_map: int32 ``[S, E]``, or None for linears and routers.
        max_rank: no slot ever holds a larger rank here; sizes the work buffers of graphs.
        host_cache: what host-side backends decoded, each under its own name.
        host_ranks: what :attr:`ranks` says, kept on the host by whoever writes the table; None =
            nobody does.
        wait_for_copies: lets the current stream wait for factors that are still being copied here;
            None = nothing is copied on other streams.
    """

    site: Site
    arena: Arena
    records: torch.Tensor
    expert_map: torch.Tensor | None
    max_rank: int
    host_cache: dict[str, object] = field(default_factory=dict, repr=False)
    host_ranks: torch.Tensor | None = None
    wait_for_copies: Callable[[], None] | None = None

    @property
    def num_slots(self) -> int:
        """S."""
        return self.records.shape[0]

    @cached_property
    def kind(self) -> Hashable:
        """Equal for tables of equal sizes: what kernels are launched for, but for the arena."""
        found = self.expert_map
        sizes = None if found is None else (tuple(found.shape), found.stride())
        return tuple(self.records.shape), self.records.stride(), sizes, self.max_rank

    @property
    def ranks(self) -> torch.Tensor:
        """int32 ``[S, projections]``, 0 = no delta."""
        return self.records.view(torch.int32)[..., RANK_I32]

    @property
    def scales(self) -> torch.Tensor:
        """fp32 ``[S, projections]``; meaningful where the rank is above 0."""
        return self.records.view(torch.float32)[..., SCALE_F32]

    def has_delta(self, slots: TokenSlots) -> bool:
        """True when a live adapter has a factor here; reads the host's memory only.

        If so the current stream waits for factors that are still on their way into this site: a
        layer asks before it reads them. A graph waits for nothing, whoever replays it has waited.

        While a graph is captured (``slots.in_graph``): True once any adapter had one here, see
        :attr:`moegraft.adapters.AdapterBank.sites_version`.
        """
        if slots.in_graph and self.ever_used:
            return True
        ranks = self._host_ranks()
        if slots.in_graph:
            return any(ranks)
        found = any(ranks[slot] for slot in slots.live)
        if found and self.wait_for_copies is not None:
            self.wait_for_copies()
        return found

    @property
    def ever_used(self) -> bool:
        """True once the bank behind this table held an adapter with factors here."""
        return "used" in self.host_cache

    def _host_ranks(self) -> tuple[int, ...]:
        """The largest rank of each slot here."""
        version = self.arena.version
        found = self.host_cache.get("ranks")
        if not isinstance(found, tuple) or found[0] != version:
            ranks = (self.ranks if self.host_ranks is None else self.host_ranks).amax(1).tolist()
            found = self.host_cache["ranks"] = (version, tuple(ranks))
        known: tuple[int, ...] = found[1]
        return known

    def check_live(self, slots: TokenSlots) -> None:
        """Raise :class:`MoegraftError` when a token's slot is not in the table, or kernels can't
        read the slots."""
        given = slots.slots
        if given.dtype != torch.int32 or given.dim() != 1 or not given.is_contiguous():
            raise MoegraftError(
                f"{self.site.name}: the slots are {given.dtype} {tuple(given.shape)} with strides "
                f"{given.stride()}; TokenSlots.of makes contiguous int32 ones [T]."
            )
        if given.device != self.records.device:
            raise MoegraftError(
                f"{self.site.name}: the slots are on {given.device}, the factor table on "
                f"{self.records.device}."
            )
        if slots.live and slots.live[-1] >= self.num_slots:
            raise MoegraftError(
                f"{self.site.name}: a token uses adapter slot {slots.live[-1]}, the factor table "
                f"has {self.num_slots} slots."
            )

    def factors(self, slot: int) -> SiteFactors | None:
        """Return views of slot's factors (reads the table on the host); None when it has none."""
        projections: dict[str, LoraFactor] = {}
        records = self.records[slot].cpu()
        expert_map = None if self.expert_map is None else self.expert_map[slot].cpu()
        entries = 1 if expert_map is None else max(int(expert_map.max()) + 1, 1)
        previous_a: torch.Tensor | None = None
        for i, projection in enumerate(self.site.projections):
            words = records[i].tolist()
            rank, shared = records[i].view(torch.int32)[[RANK_I32, SHARED_A_I32]].tolist()
            if rank == 0:
                previous_a = None
                continue
            if shared and previous_a is not None:
                lora_a = previous_a
            else:
                lora_a = self._matrix(words, A_OFFSET, entries, rank, projection.in_features)
            lora_b = self._matrix(words, B_OFFSET, entries, rank, projection.out_features)
            scale = float(records[i].view(torch.float32)[SCALE_F32])
            projections[projection.name] = LoraFactor(lora_a, lora_b.transpose(1, 2), scale)
            previous_a = lora_a
        return SiteFactors(projections, expert_map) if projections else None

    def _matrix(
        self, words: list[int], which: int, entries: int, rank: int, width: int
    ) -> torch.Tensor:
        arena = self.arena.data
        offset = words[which] * UNIT_BYTES // arena.element_size()
        expert_stride, row_stride = words[which + 2], words[which + 4]
        shape = (entries if expert_stride else 1, rank, width)
        strides = (expert_stride or rank * row_stride, row_stride, 1)
        return arena.as_strided(shape, strides, arena.storage_offset() + offset)


def site_table(
    site: Site, slots: Sequence[SiteFactors | None], dtype: torch.dtype = torch.float32
) -> SiteTable:
    """Build a stand-alone table for one site: entry s of ``slots`` is what slot s holds.

    For tests, benchmarks and the functional API; servers use
    :class:`moegraft.adapters.AdapterBank`.
    """
    layout = TableLayout.of([site])
    rows, data, units, max_rank = [], [], 0, 0
    for factors in slots:
        packed = pack_adapter({} if factors is None else {site.name: factors}, layout, dtype)
        rows.append(packed.relocated(units, layout))
        data.append(packed.data)
        units += packed.num_bytes // UNIT_BYTES
        max_rank = max(max_rank, packed.max_rank)
    table = torch.stack(rows) if rows else torch.zeros(0, layout.row_words, dtype=torch.int64)
    arena = Arena(torch.cat([*data, torch.zeros(UNIT_BYTES, dtype=dtype)]))
    records, expert_map = layout.records(table, site), layout.expert_map(table, site)
    return SiteTable(site, arena, records, expert_map, max_rank)
