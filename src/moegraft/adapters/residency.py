"""Which stored adapters are in the bank's slots, and which of them make room for others."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.info import AdapterInfo, ReadAs
from moegraft.adapters.report import BindReport
from moegraft.errors import AdapterError
from moegraft.factors import PackedAdapter


@dataclass(eq=False)
class Entry:
    """One version of a stored adapter; guarded by the store's lock.

    Attributes:
        name, version, checksum, packed, report: what was loaded; never changed.
        read_as: how it was read, None when that is not known.
        on_device: the same as ``packed`` on the GPU, where an update brought it; it goes once the
            update is done.
        slot: the bank slot that holds it, None = on the host only.
        pinned: True when it may not be evicted.
        users: running batches that hold it.
        last_use: the clock at its last use.
        retired: True when its name is gone, or stands for a newer version; it leaves its slot with
            its last user.
    """

    name: str
    version: int
    checksum: str
    packed: PackedAdapter
    report: BindReport
    read_as: ReadAs | None = None
    on_device: PackedAdapter | None = None
    slot: int | None = None
    pinned: bool = False
    users: int = 0
    last_use: int = 0
    retired: bool = False

    def info(self) -> AdapterInfo:
        """Return what a caller may know of it now."""
        return AdapterInfo(
            name=self.name,
            version=self.version,
            checksum=self.checksum,
            report=self.report,
            slot=self.slot,
            num_bytes=self.packed.num_bytes,
            pinned=self.pinned,
        )


def check_count(names: list[str], num_slots: int) -> None:
    """Raise :class:`AdapterError` when a batch has more adapters than there are slots."""
    if len(names) > num_slots:
        raise AdapterError(
            f"The batch uses {len(names)} different adapters ({', '.join(names)}), the bank has "
            f"{num_slots} slots: attach with max_adapters={len(names)} or split the batch."
        )


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
                    self._place(entry, victims.pop(0), keep=entries)
        except BaseException:
            for entry in acquired:
                entry.users -= 1
            raise

    def retire(self, entry: Entry) -> None:
        """Let an entry leave its slot: now, or with its last user. On error nothing has changed."""
        if entry.slot is not None and not entry.users:
            self._vacate(entry)
        entry.retired = True

    def replace(self, old: Entry, new: Entry) -> None:
        """Put a new version into the slot of an old one that nobody uses.

        Its factors are written beside the old ones, then the slot's table row is replaced. An arena
        of fixed size without room for both loses the old ones first and, if that is not enough,
        idle adapters, the least recently used first.

        Raises:
            AdapterError: no room even so; nothing has changed then. Any other error of the copy
                leaves the old version in its slot, or on the host if it had made room.
        """
        slot = old.slot
        assert slot is not None and not old.users and new.slot is None
        if not self._bank.has_room(new.packed):
            for entry in self._room_for(new, [old, *self._evictable([old])]):
                self._vacate(entry)
        self._bank.write(slot, new.name, new.on_device or new.packed, wait=False)
        old.slot, new.slot = None, slot
        self._slots[slot] = new

    def sweep(self) -> None:
        """Free the slots of retired entries without users."""
        for entry in self._slots:
            if entry is not None and entry.retired and not entry.users:
                self._vacate(entry)

    def _room_for(self, new: Entry, idle: list[Entry]) -> list[Entry]:
        """Return the first of ``idle`` that are enough to make room; none when not all are."""
        for count in range(1, len(idle) + 1):
            slots = [entry.slot for entry in idle[:count] if entry.slot is not None]
            if self._bank.has_room(new.packed, freeing=slots):
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

    def _place(self, entry: Entry, slot: int, keep: list[Entry]) -> None:
        """Write an entry into a slot, evicting what is there; more, when the arena is full."""
        held = self._slots[slot]
        if held is not None:
            self._vacate(held)
        while not self._bank.has_room(entry.packed):
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
