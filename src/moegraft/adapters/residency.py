"""Which stored adapters are in the bank's slots, and which of them make room for others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.entry import Entry
from moegraft.adapters.space import Held
from moegraft.errors import AdapterError, shown


def distinct_names(names: Iterable[str | None], num_slots: int) -> list[str]:
    """Return a batch's adapters, sorted, None left out.

    Raises:
        AdapterError: something else than names, or more adapters than there are slots.
    """
    wanted = [name for name in names if name is not None]
    if not all(isinstance(name, str) for name in wanted):
        raise AdapterError(f"{shown(wanted)} is no list of adapter names and None.")
    distinct = sorted(set(wanted))
    if len(distinct) > num_slots:
        raise AdapterError(
            f"The batch uses {len(distinct)} different adapters ({', '.join(distinct)}), the bank "
            f"has {num_slots} slots: attach with max_adapters={len(distinct)} or split the batch."
        )
    return distinct


class Residency:
    """The bank's slots and who is in them. Not safe to use from several threads by itself.

    Every method that fails leaves the owners of all slots true to what the bank holds. No stream
    waits for what is copied here: a batch lets its own wait, see :meth:`AdapterStore.use`.

    Args:
        bank: the device bank.
    """

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        self._slots: list[Entry | None] = [None] * bank.num_slots
        self._clock = itertools.count(1)

    @property
    def slots(self) -> tuple[Entry | None, ...]:
        """Who is in each slot."""
        return tuple(self._slots)

    def acquire(self, entries: list[Entry]) -> None:
        """Bring entries into slots and count a user for each.

        Raises:
            AdapterError: see :meth:`moegraft.adapters.AdapterStore.use`; no user is counted then.
        """
        self.sweep()
        missing = [entry for entry in entries if entry.slot is None]
        victims = self._victims(len(missing), keep=entries)
        acquired: list[Entry] = []
        try:
            for entry in entries:
                entry.users += 1
                acquired.append(entry)
                entry.last_use = next(self._clock)
                if entry.slot is None:
                    self._place(entry, victims.pop(0), entries, acquired)
        except BaseException:
            for entry in acquired:
                entry.users -= 1
            raise

    def retire(self, entry: Entry) -> None:
        """Let an entry leave its slot: now, or with its last user. On error nothing has changed."""
        if entry.slot is not None and not entry.users:
            self._vacate(entry)
        entry.retired = True

    def replace(self, old: Entry, new: Entry, held: Held | None = None) -> None:
        """Put a new version into the slot of an old one that nobody uses.

        Its factors are written beside the old ones, then the slot's table row is replaced. An arena
        of fixed size without room for both loses the old ones first and, if that is not enough,
        idle adapters, the least recently used first.

        Args:
            old, new: the versions.
            held: the region that holds the new one's factors already; None = none does.

        Raises:
            AdapterError: no room even so; nothing has changed then. Any other error of the copy
                leaves the old version in its slot, or on the host if it had made room.
        """
        slot = old.slot
        assert slot is not None and not old.users and new.slot is None
        if held is not None:
            self._bank.take(slot, new.packed, held)
        else:
            if not self.fits(new):
                for entry in self._room_for(new, [old, *self._evictable([old])]):
                    self._vacate(entry)
                self.fits(new)
            self._bank.write(slot, new.name, new.on_device or new.packed, wait=False)
        old.slot, new.slot = None, slot
        self._slots[slot] = new

    def sweep(self) -> None:
        """Free the slots of retired entries without users."""
        for entry in self._slots:
            if entry is not None and entry.retired and not entry.users:
                self._vacate(entry)

    def fits(self, entry: Entry, acquired: Iterable[Entry] = ()) -> bool:
        """True when there is room; regions that no running batch reads are moved to make it.

        Args:
            entry: what is to fit.
            acquired: entries whose one user is the batch that is about to begin.
        """
        if not self._bank.fits_now(entry.packed):
            self._move_together(entry, self._idle_slots(acquired))
        return self._bank.has_room(entry.packed)

    def _move_together(self, entry: Entry, movable: list[int]) -> None:
        """Move regions for an entry; a move that fails leaves its adapter on the host."""
        try:
            self._bank.make_room(entry.packed, movable)
        except BaseException:
            for slot in movable:
                held = self._slots[slot]
                if held is not None and self._bank.is_empty(slot):
                    self._slots[slot] = held.slot = None
            raise

    def _idle_slots(self, acquired: Iterable[Entry] = ()) -> list[int]:
        """Slots whose adapters no running batch uses."""
        mine = set(map(id, acquired))
        return [
            slot
            for slot, held in enumerate(self._slots)
            if held is not None and held.users == int(id(held) in mine)
        ]

    def _room_for(self, new: Entry, idle: list[Entry]) -> list[Entry]:
        """Return the first of ``idle`` that are enough to make room; none when not all are."""
        movable = self._idle_slots()
        for count in range(1, len(idle) + 1):
            slots = [entry.slot for entry in idle[:count] if entry.slot is not None]
            if self._bank.could_have_room(new.packed, movable, freeing=slots):
                return idle[:count]
        return []  # the bank says what is missing

    def _evictable(self, keep: list[Entry]) -> list[Entry]:
        """Resident adapters that nobody uses or pinned, the least recently used first."""
        found = [
            held
            for held in self._slots
            if held is not None and not held.users and not held.pinned and held not in keep
        ]
        return sorted(found, key=lambda entry: entry.last_use)

    def _victims(self, count: int, keep: list[Entry]) -> list[int]:
        """Choose slots to fill: free ones first, then the least recently used."""
        free = [slot for slot, held in enumerate(self._slots) if held is None]
        chosen = free + [e.slot for e in self._evictable(keep) if e.slot is not None]
        if len(chosen) < count:
            raise AdapterError(
                f"{count} adapters need a slot, but only {len(chosen)} of {self._bank.num_slots} "
                "are free or evictable; the others are pinned or in use by running batches."
            )
        return chosen[:count]

    def _place(self, entry: Entry, slot: int, keep: list[Entry], acquired: list[Entry]) -> None:
        """Write an entry into a slot, evicting what is there; more, when the arena is full."""
        held = self._slots[slot]
        if held is not None:
            self._vacate(held)
        while not self.fits(entry, acquired):
            evictable = self._evictable(keep)
            if not evictable:
                break  # write() below says what is missing
            self._vacate(evictable[0])
        self._bank.write(slot, entry.name, entry.packed, wait=False)
        entry.slot = slot
        self._slots[slot] = entry

    def _vacate(self, entry: Entry) -> None:
        """Take an entry out of its slot; it stays on the host."""
        assert entry.slot is not None
        self._bank.clear(entry.slot)
        self._slots[entry.slot] = None
        entry.slot = None
