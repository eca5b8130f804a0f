"""The memory of a bank's arena, and which slot has which part of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from moegraft.adapters.arena import FreeList
from moegraft.adapters.streams import StreamOrder
from moegraft.errors import AdapterError
from moegraft.factor_table import Arena
from moegraft.factors import UNIT_BYTES
from moegraft.memory import memory_for


class NoRoomError(AdapterError):
    """The arena is too full for an adapter, and may not grow."""


class Slide(NamedTuple):
    """A region that closes a gap: ``units`` from ``start`` on go down to ``target``."""

    slot: int
    start: int
    units: int
    target: int


class Held(NamedTuple):
    """A range of the arena that is being filled, and no slot's yet.

    Attributes:
        start, units: where it is.
        data: it as a tensor ``[elements]``, in the arena as it was when the range was taken.
    """

    start: int
    units: int
    data: torch.Tensor


class ArenaSpace:
    """One arena, its free ranges and the regions of all slots, in units of 16 bytes.

    It moves as a whole only while it may still grow (:meth:`freeze` forbids it). Regions may be
    moved within it, which closes gaps: :meth:`slides` says which.

    Args:
        num_slots: slots that may have a region each.
        dtype: dtype of the factors.
        device: where they live.
        order: keeps a move behind its readers.
        arena_bytes: fixed size; None = grow as adapters come.

    Raises:
        MoegraftError: no memory for it.
    """

    def __init__(
        self,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        order: StreamOrder,
        arena_bytes: int | None,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._order = order
        self._num_slots = num_slots
        self._may_grow = arena_bytes is None
        self._why_frozen = ""
        units = (arena_bytes or 0) // UNIT_BYTES
        self.free = FreeList(units)
        self.regions: list[tuple[int, int] | None] = [None] * num_slots
        self._held: dict[int, Held] = {}
        with memory_for(f"an arena of {units * UNIT_BYTES:,} bytes (arena_bytes)"):
            self.arena = Arena(self._new_arena(units))

    def _new_arena(self, units: int) -> torch.Tensor:
        # One unit more than can be allocated, so that a window at the end stays inside.
        elements = (units + 1) * UNIT_BYTES // self._dtype.itemsize
        with torch.inference_mode(False):
            return torch.zeros(elements, dtype=self._dtype, device=self._device)

    @property
    def frozen(self) -> bool:
        """True when the arena never moves again."""
        return not self._may_grow

    def freeze(self) -> None:
        """Forbid growth from now on, so that the arena's address stays valid."""
        if self._may_grow:
            self._why_frozen = " CUDA graphs hold its address, so it grows no more."
        self._may_grow = False

    def reserve(self, num_bytes: int) -> None:
        """See :meth:`AdapterBank.reserve`."""
        missing = -(-num_bytes // UNIT_BYTES) - self.free.capacity
        if missing > 0:
            if not self._may_grow:
                raise AdapterError(
                    f"The bank's arena has a fixed size of {self.free.capacity * UNIT_BYTES:,} "
                    f"bytes, {num_bytes:,} were asked for: attach with a larger arena_bytes."
                )
            self._move(self.free.capacity + missing)

    def check_fits(self, name: str, num_bytes: int) -> None:
        """Raise :class:`AdapterError` when an adapter of this size could never be here."""
        capacity = self.free.capacity * UNIT_BYTES
        if not self._may_grow and num_bytes > capacity:
            raise AdapterError(
                f"Adapter {name!r} needs {num_bytes:,} bytes, the whole arena has "
                f"{capacity:,}; attach with a larger arena_bytes.{self._why_frozen}"
            )

    def has_room(self, num_bytes: int, freeing: Iterable[int] = ()) -> bool:
        """True when a free range is large enough, once these slots' regions are free."""
        regions = [region for slot in freeing if (region := self.regions[slot]) is not None]
        return self.free.largest_after(regions) * UNIT_BYTES >= num_bytes

    def slides(
        self, num_bytes: int, movable: Collection[int], freeing: Collection[int] = ()
    ) -> list[Slide] | None:
        """Return the moves that make one free range large enough; None when none do.

        All go down, the lowest first, and never past a region that stays: between two of those
        the regions that may move are pushed together.

        Args:
            num_bytes: what is to fit.
            movable: slots whose regions may be moved.
            freeing: slots whose regions count as free.
        """
        units = -(-num_bytes // UNIT_BYTES)
        held = sorted(
            (region[0], region[1], slot)
            for slot, region in enumerate(self.regions)
            if region is not None and region[1] and slot not in freeing
        )
        held = sorted([*held, *((h.start, h.units, -1) for h in self._held.values() if h.units)])
        moves: list[Slide] = []
        begin = taken = 0
        for start, length, slot in [*held, (self.free.capacity, 0, -1)]:
            if slot in movable:
                moves.append(Slide(slot, start, length, begin + taken))
                taken += length
                continue
            if start - begin - taken >= units:
                return [move for move in moves if move.start != move.target]
            begin, taken, moves = start + length, 0, []
        return None

    @contextmanager
    def allocated(self, slot: int, num_bytes: int, name: str) -> Iterator[int]:
        """Take a free range for a slot; yields its first unit.

        At the block's end the range is the slot's, and the slot's old one is free. An error in the
        block frees the range, and the slot keeps the old one.

        Raises:
            NoRoomError: a full arena that may not grow.
            MoegraftError: no memory for the arena to grow.
        """
        units = num_bytes // UNIT_BYTES
        start = self._reserve(units, name)
        try:
            yield start
        except BaseException:
            self.free.release(start, units)
            raise
        self.clear(slot)
        self.regions[slot] = (start, units)

    def hold(self, num_bytes: int, name: str) -> Held:
        """Take a free range for no slot yet; it stays where it is until it is given on or back.

        Raises:
            NoRoomError, MoegraftError: as :meth:`allocated`.
        """
        units = num_bytes // UNIT_BYTES
        start = self._reserve(units, name)
        held = Held(start, units, self._part(start, units))
        self._held[id(held)] = held
        return held

    def present(self, held: Held) -> torch.Tensor:
        """Return a held range in the arena as it is now, with what was put into it."""
        part = self._part(held.start, held.units)
        if part.data_ptr() != held.data.data_ptr():
            part.copy_(held.data)  # the arena moved while it was filled
        return part

    def give(self, held: Held, slot: int) -> None:
        """Let a held range be a slot's; its old one is free."""
        del self._held[id(held)]
        self.clear(slot)
        self.regions[slot] = (held.start, held.units)

    def give_back(self, held: Held) -> None:
        """Free a range that is still held."""
        if self._held.pop(id(held), None) is not None:
            self.free.release(held.start, held.units)

    def _part(self, start: int, units: int) -> torch.Tensor:
        return self.arena.data[self.element(start) : self.element(start + units)]

    def clear(self, slot: int) -> None:
        """Let a slot have no region."""
        region, self.regions[slot] = self.regions[slot], None
        if region is not None:
            self.free.release(*region)

    def moved(self, slide: Slide) -> None:
        """Say that a slide is done: the slot's region is where it leads to."""
        self.free.release(slide.start, slide.units)
        taken = self.free.allocate_at(slide.target, slide.units)
        assert taken, f"a slide to what is not free: {slide}"
        self.regions[slide.slot] = (slide.target, slide.units)

    def element(self, unit: int) -> int:
        """Return the index of a unit's first element in the arena."""
        return unit * UNIT_BYTES // self._dtype.itemsize

    def _reserve(self, units: int, name: str) -> int:
        start = self.free.allocate(units)
        if start is None and self._may_grow:
            self._grow(units)
            start = self.free.allocate(units)
        if start is None:
            raise NoRoomError(
                f"Adapter {name!r} needs {units * UNIT_BYTES:,} bytes, the bank's arena of "
                f"{self.free.capacity * UNIT_BYTES:,} has {self.free.free_units * UNIT_BYTES:,} "
                f"free (largest range {self.free.largest * UNIT_BYTES:,}; regions that running "
                "batches read can't be moved): unload adapters, wait for running batches, or "
                "attach with a larger arena_bytes."
            )
        return start

    def _grow(self, units: int) -> None:
        """Move to an arena with ``units`` more and at least 1.5 times as large as the old one.

        The first has room for two adapters of this size, unless there is only one slot.
        """
        capacity = max(self.free.capacity + units, min(self._num_slots, 2) * units)
        self._move(max(capacity, self.free.capacity * 3 // 2))

    def _move(self, capacity: int) -> None:
        """Move to a larger arena of ``capacity`` units. Rare, so the host may wait for the GPU.

        Others see the new arena when everything is in it, and the old one goes when the kernels
        that were given it have ended.
        """
        with memory_for(f"an arena of {capacity * UNIT_BYTES:,} bytes"):
            arena = self._new_arena(capacity)
        old = self.arena.data
        self._order.synchronize()
        arena[: old.numel()].copy_(old)
        self._order.synchronize()
        self.arena.data = arena
        self.arena.version += 1
        self._order.synchronize()
        self.free.grow(capacity)
