"""The device bank: one rank-compact arena for all adapters, behind a table with a row per slot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch

from moegraft.adapters.bank_sizes import BankMemory, check_sizes
from moegraft.adapters.layer_copies import LayerCopies
from moegraft.adapters.space import ArenaSpace, Held
from moegraft.adapters.streams import StreamOrder
from moegraft.errors import AdapterError
from moegraft.factor_table import SiteTable
from moegraft.factors import UNIT_BYTES, PackedAdapter, TableLayout, empty_row, moved_row
from moegraft.memory import memory_for
from moegraft.sites import Site


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
            #: Records that ever had a rank, by which sites are seen to come into use.
            self._ever_live = torch.zeros_like(self._ranks[0], dtype=torch.bool)
        self._space = ArenaSpace(num_slots, dtype, self.device, self.order, arena_bytes)
        self._arena = self._space.arena
        self._tables = {site.name: self._site_table(site) for site in sites}

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
        self._space.reserve(num_bytes)

    def freeze(self) -> None:
        """Forbid growth from now on, so that every address stays valid."""
        self._space.freeze()

    @property
    def frozen(self) -> bool:
        """True when the arena never moves again."""
        return self._space.frozen

    @property
    def memory(self) -> BankMemory:
        """Where the bank's bytes are."""
        free = self._space.free
        return BankMemory(
            arena=free.capacity * UNIT_BYTES,
            used=(free.capacity - free.free_units) * UNIT_BYTES,
            table=self.table.numel() * self.table.element_size(),
            largest_free=free.largest * UNIT_BYTES,
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
        self._space.check_fits(name, packed.num_bytes)

    def has_room(self, packed: PackedAdapter, freeing: Iterable[int] = ()) -> bool:
        """True when the arena has, or may grow, a free range for the adapter.

        Args:
            packed: the adapter.
            freeing: slots whose regions count as free.
        """
        return not self.frozen or self._space.has_room(packed.num_bytes, freeing)

    def fits_now(self, packed: PackedAdapter) -> bool:
        """True when a free range of the arena as it is holds the adapter."""
        return self._space.has_room(packed.num_bytes)

    def could_have_room(
        self, packed: PackedAdapter, movable: Collection[int], freeing: Collection[int] = ()
    ) -> bool:
        """True when :meth:`make_room` would make enough, once ``freeing`` are empty."""
        return self._space.slides(packed.num_bytes, movable, freeing) is not None

    def make_room(self, packed: PackedAdapter, movable: Collection[int]) -> None:
        """Move regions together until the adapter fits in one range; nothing when it can't.

        Only as many as it takes, on the device, in order with all that was queued before.

        Args:
            packed: the adapter that is to fit.
            movable: slots that no running batch reads.

        Raises:
            Exception: a copy failed. A slot that it was about is empty then; :meth:`is_empty` says
                which.
        """
        for slide in self._space.slides(packed.num_bytes, movable) or ():
            row = self._pinned(
                moved_row(self._rows[slide.slot], slide.target - slide.start, self.layout)
            )
            self.order.before_write()
            self._flip(slide.slot, self._empty)
            try:
                self.copies.slide(
                    self._arena.data,
                    self._space.element(slide.start),
                    self._space.element(slide.start + slide.units),
                    self._space.element(slide.target),
                    self._tables,
                )
                self._flip(slide.slot, row)
            except BaseException:
                self._space.clear(slide.slot)
                raise
            self._space.moved(slide)

    def is_empty(self, slot: int) -> bool:
        """True when a slot holds nothing."""
        return self._space.regions[slot] is None

    def write(
        self,
        slot: int,
        name: str,
        packed: PackedAdapter,
        wait: bool = True,
    ) -> None:
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
        assert packed.data.dtype == self.dtype, f"packed as {packed.data.dtype}"
        with self._space.allocated(slot, packed.num_bytes, name) as start:
            first = self._space.element(start)
            region = self._arena.data[first : first + packed.data.numel()]
            row = self._pinned(packed.relocated(start, self.layout))
            self.copies.start(region, packed)
            self.order.before_write()
            self._flip(slot, row)
        if wait:
            self.copies.wait()

    def hold(self, name: str, packed: PackedAdapter) -> Held:
        """Take a region that :meth:`LayerCopies.fill` may fill now; no slot reads it yet.

        Raises:
            AdapterError, MoegraftError: as :meth:`write`.
        """
        held = self._space.hold(packed.num_bytes, name)
        try:
            self.copies.before_fill()
        except BaseException:
            self._space.give_back(held)
            raise
        return held

    def take(self, slot: int, packed: PackedAdapter, held: Held) -> None:
        """Give a slot a filled region, as :meth:`write`; on error it is still held."""
        row = self._pinned(packed.relocated(held.start, self.layout))
        self.order.before_write()
        self._space.present(held)
        self._flip(slot, row)
        self._space.give(held, slot)

    def give_back(self, held: Held) -> None:
        """Free a region, unless it was taken."""
        self._space.give_back(held)

    def clear(self, slot: int) -> None:
        """Empty a slot: its row says "no delta", its region is free again."""
        self.order.before_write()
        self._flip(slot, self._empty)
        self._space.clear(slot)

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
        self._note_new_sites(self._ranks[slot] > 0)
        self._arena.version += 1

    def _note_new_sites(self, live: torch.Tensor) -> None:
        """Count sites that come into use; ``live``: the records with a rank, bool."""
        if not bool((live & ~self._ever_live).any()):
            return
        self._ever_live |= live
        for table in self._tables.values():
            if not table.ever_used and bool(self.layout.ranks_of(live, table.site).any()):
                table.host_cache["used"] = True
                self.sites_version += 1
