"""The device bank: one rank-compact arena for all adapters, behind a table with a row per slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from moegraft.adapters.arena import FreeList
from moegraft.adapters.bank_sizes import check_sizes
from moegraft.adapters.layer_copies import LayerCopies
from moegraft.adapters.streams import StreamOrder
from moegraft.errors import AdapterError
from moegraft.factor_table import Arena, SiteTable
from moegraft.factors import UNIT_BYTES, PackedAdapter, TableLayout, empty_row
from moegraft.memory import memory_for
from moegraft.sites import Site


@dataclass(frozen=True)
class BankMemory:
    """Bytes: of the arena, of adapters in it, of the table; and the largest free range."""

    arena: int
    used: int
    table: int
    largest_free: int


class AdapterBank:
    """Slots for adapters on one device.

    A slot costs what its adapter weighs. The table never moves; the arena moves only while it may
    still grow (:meth:`freeze` forbids it, for graphs that hold its address).

    On a GPU the host waits for no write. Factors are copied layer by layer on a stream of the
    bank's own (``copies``), the table row on the current stream. Whoever runs a batch calls
    ``order.before_read()`` ahead of it and ``order.after_read()`` behind it, and lets its stream
    wait for the copies: for all (``copies.wait()``), or layer by layer
    (:meth:`SiteTable.has_delta` does). :meth:`AdapterStore.use` does all of it.

    Args:
        sites: every place of the model where adapters attach.
        num_slots: S, adapters that can be resident at once.
        max_rank: largest rank any adapter may have.
        dtype: dtype of the factors; the model's.
        device: where they live.
        arena_bytes: fixed size of the arena; None = grow as adapters come.

    Raises:
        AdapterError: a size that means nothing.
        MoegraftError: no memory for the table or the arena.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        arena_bytes: int | None = None,
    ) -> None:
        check_sizes(num_slots, max_rank, arena_bytes)
        self.layout = TableLayout.of(sites)
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = torch.device(device)
        self._may_grow = arena_bytes is None
        self._why_frozen = ""
        self.order = StreamOrder(self.device)
        self.copies = LayerCopies(self.device, self.order)
        #: Goes up when an adapter brings factors to a site that never had any: what was captured
        #: without that site's adapters must be captured again.
        self.sites_version = 0
        # The bank outlives the inference mode that it may be made in.
        with torch.inference_mode(False), memory_for(f"{num_slots:,} slots (max_adapters)"):
            self._empty = self._pinned(empty_row(self.layout))
            self.table = self._empty.repeat(num_slots, 1).to(self.device)
            self._ranks = self.layout.ranks(self._empty).repeat(num_slots, 1)
            #: What the table holds, on the host: a flip that fails puts the old row back.
            self._rows = [self._empty] * num_slots
            self._regions: list[tuple[int, int] | None] = [None] * num_slots
        units = (arena_bytes or 0) // UNIT_BYTES
        self._free = FreeList(units)
        with memory_for(f"an arena of {units * UNIT_BYTES:,} bytes (arena_bytes)"):
            self._arena = Arena(self._new_arena(units))
        self._tables = {site.name: self._site_table(site) for site in sites}

    def _new_arena(self, units: int) -> torch.Tensor:
        # One unit more than can be allocated, so that a window at the end stays inside.
        elements = (units + 1) * UNIT_BYTES // self.dtype.itemsize
        with torch.inference_mode(False):
            return torch.zeros(elements, dtype=self.dtype, device=self.device)

    def _site_table(self, site: Site) -> SiteTable:
        records = self.layout.records(self.table, site)
        expert_map = self.layout.expert_map(self.table, site)
        ranks = self.layout.ranks_of(self._ranks, site)
        arrive = partial(self.copies.wait_for, site.name) if self.device.type == "cuda" else None
        return SiteTable(
            site,
            self._arena,
            records,
            expert_map,
            self.max_rank,
            host_ranks=ranks,
            wait_for_copies=arrive,
        )

    def _pinned(self, row: torch.Tensor) -> torch.Tensor:
        """In page-locked memory for a GPU, so that its copy needs no wait.

        Torch's allocator of such memory does not give a block away before its copies are done.
        """
        return row.pin_memory() if self.pins else row

    @property
    def pins(self) -> bool:
        """True when adapters on the host belong in page-locked memory."""
        return self.device.type == "cuda"

    def site_table(self, name: str) -> SiteTable:
        """Return one site's view of all slots; it stays valid for the bank's life."""
        return self._tables[name]

    def reserve(self, num_bytes: int) -> None:
        """Let the arena have at least this size now.

        Raises:
            AdapterError: it has a fixed size that is smaller.
            MoegraftError: no memory for it. Nothing has changed then.
        """
        missing = -(-num_bytes // UNIT_BYTES) - self._free.capacity
        if missing > 0:
            if not self._may_grow:
                raise AdapterError(
                    f"The bank's arena has a fixed size of {self._free.capacity * UNIT_BYTES:,} "
                    f"bytes, {num_bytes:,} were asked for: attach with a larger arena_bytes."
                )
            self._move(self._free.capacity + missing)

    def freeze(self) -> None:
        """Forbid growth from now on, so that every address stays valid."""
        if self._may_grow:
            self._why_frozen = " CUDA graphs hold its address, so it grows no more."
        self._may_grow = False

    @property
    def frozen(self) -> bool:
        """True when the arena never moves again."""
        return not self._may_grow

    @property
    def memory(self) -> BankMemory:
        """Where the bank's bytes are."""
        used = (self._free.capacity - self._free.free_units) * UNIT_BYTES
        return BankMemory(
            arena=self._free.capacity * UNIT_BYTES,
            used=used,
            table=self.table.numel() * self.table.element_size(),
            largest_free=self._free.largest * UNIT_BYTES,
        )

    def check_rank(self, name: str, rank: int) -> None:
        """Raise :class:`AdapterError` when an adapter's rank is over the bank's maximum."""
        if rank > self.max_rank:
            raise AdapterError(
                f"Adapter {name!r} has rank {rank}, over the bank's maximum of {self.max_rank}; "
                f"attach with max_rank={rank} or more."
            )

    def check_fits(self, name: str, packed: PackedAdapter) -> None:
        """Raise :class:`AdapterError` when an adapter could never be in the bank."""
        self.check_rank(name, packed.max_rank)
        capacity = self._free.capacity * UNIT_BYTES
        if not self._may_grow and packed.num_bytes > capacity:
            raise AdapterError(
                f"Adapter {name!r} needs {packed.num_bytes:,} bytes, the whole arena has "
                f"{capacity:,}; attach with a larger arena_bytes.{self._why_frozen}"
            )

    def has_room(self, packed: PackedAdapter, freeing: Iterable[int] = ()) -> bool:
        """True when the arena has, or may grow, a free range for the adapter.

        Args:
            packed: the adapter.
            freeing: slots whose regions count as free.
        """
        regions = [region for slot in freeing if (region := self._regions[slot]) is not None]
        largest = self._free.largest_after(regions) * UNIT_BYTES
        return self._may_grow or largest >= packed.num_bytes

    def write(self, slot: int, name: str, packed: PackedAdapter, wait: bool = True) -> None:
        """Put an adapter into a slot: copy its factors to a new region, then flip the table row.

        The slot's previous region is freed after the flip. On error nothing has changed.

        Args:
            slot, name: which slot, and what to call the adapter in messages.
            packed: its factors.
            wait: let the current stream wait for the copies; False = whoever reads them does.

        Raises:
            AdapterError: rank over the maximum, or a full arena that may not grow.
            MoegraftError: no memory for the arena to grow.
        """
        self.check_rank(name, packed.max_rank)
        units = packed.num_bytes // UNIT_BYTES
        assert packed.data.dtype == self.dtype, f"packed as {packed.data.dtype}"
        start = self._reserve(units, name)
        first = start * UNIT_BYTES // self.dtype.itemsize
        region = self._arena.data[first : first + packed.data.numel()]
        try:
            row = self._pinned(packed.relocated(start, self.layout))
            self.copies.start(region, packed)
            self.order.before_write()
            self._flip(slot, row)
        except BaseException:
            self._free.release(start, units)
            raise
        self._free_region(slot)
        self._regions[slot] = (start, units)
        if wait:
            self.copies.wait()

    def clear(self, slot: int) -> None:
        """Empty a slot: its row says "no delta", its region is free again."""
        self.order.before_write()
        self._flip(slot, self._empty)
        self._free_region(slot)

    def _flip(self, slot: int, row: torch.Tensor) -> None:
        """Replace a slot's table row; when that fails, put the old one back."""
        try:
            self._put(slot, row)
        except BaseException:
            self._put(slot, self._rows[slot])
            raise
        self._rows[slot] = row

    def _put(self, slot: int, row: torch.Tensor) -> None:
        """Copy a row into the table, for all layers at once; the host's ranks with it."""
        self.table[slot].copy_(row, non_blocking=True)
        self.order.after_write()
        self._ranks[slot].copy_(self.layout.ranks(row))
        for table in self._tables.values():
            if not table.ever_used and bool(self.layout.ranks_of(self._ranks, table.site).any()):
                table.host_cache["used"] = True
                self.sites_version += 1
        self._arena.version += 1

    def _free_region(self, slot: int) -> None:
        region = self._regions[slot]
        if region is not None:
            self._free.release(*region)
            self._regions[slot] = None

    def _reserve(self, units: int, name: str) -> int:
        start = self._free.allocate(units)
        if start is None and self._may_grow:
            self._grow(units)
            start = self._free.allocate(units)
        if start is None:
            raise AdapterError(
                f"Adapter {name!r} needs {units * UNIT_BYTES:,} bytes, the bank's arena of "
                f"{self._free.capacity * UNIT_BYTES:,} has {self._free.free_units * UNIT_BYTES:,} "
                f"free (largest range {self._free.largest * UNIT_BYTES:,}): unload adapters or "
                "attach with a larger arena_bytes."
            )
        return start

    def _grow(self, units: int) -> None:
        """Move to an arena with ``units`` more and at least 1.5 times as large as the old one.

        The first has room for two adapters of this size, unless there is only one slot.
        """
        capacity = max(self._free.capacity + units, min(self.num_slots, 2) * units)
        self._move(max(capacity, self._free.capacity * 3 // 2))

    def _move(self, capacity: int) -> None:
        """Move to a larger arena of ``capacity`` units. Rare, so the host may wait for the GPU.

        Others see the new arena when everything is in it, and the old one goes when the kernels
        that were given it have ended.
        """
        with memory_for(f"an arena of {capacity * UNIT_BYTES:,} bytes"):
            arena = self._new_arena(capacity)
        old = self._arena.data
        self.order.synchronize()
        arena[: old.numel()].copy_(old)
        self.order.synchronize()
        self._arena.data = arena
        self._arena.version += 1
        self.order.synchronize()
        self._free.grow(capacity)
