"""Updates of stored adapters: new values under an old name, for all layers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.bind import BoundAdapter
from moegraft.adapters.entry import Entry, new_entry
from moegraft.adapters.info import AdapterInfo, ReadAs, check_covers, check_name
from moegraft.adapters.name_locks import NameLocks
from moegraft.adapters.planned import PlannedUpdate
from moegraft.adapters.residency import Residency
from moegraft.adapters.space import Held, NoRoomError

_Found = TypeVar("_Found")


class Updates:
    """The part of :class:`moegraft.adapters.AdapterStore` that replaces adapters' values."""

    _bank: AdapterBank
    _names: NameLocks
    _residency: Residency
    #: Guards all but the names; and says when an update gave back the region that it had filled.
    _lock: threading.RLock
    _filled: threading.Condition
    #: Updates that are filling a region now.
    _filling: int

    def update(self, name: str, bound: BoundAdapter, read_as: ReadAs | None = None) -> AdapterInfo:
        """Replace a stored adapter's values, for all layers at once and where it is.

        - In a slot that no running batch uses, the new version takes that slot before this
          returns: its factors are copied to a free region, then one copy replaces the slot's table
          row. A fixed arena without room for both gives up the old region, then idle adapters.
        - In a slot that running batches use, these keep the old version to their end. The next
          :meth:`use` brings the new one into another slot, free or evicted; while there is none,
          or no room in a fixed arena, :meth:`use` raises. The old slot goes with its last user.
        - In no slot, the next :meth:`use` brings the new one into one.

        The pin stays. Each use begins with the newest version, none changes it on the way.

        Args:
            name: the name of a stored adapter.
            bound: its new factors; ranks, scales and values may differ.
            read_as: how they were read; None = as the version before.

        Raises:
            AdapterError: an unknown name, fewer places than the version before, a rank over the
                bank's maximum, values that the model's dtype can't hold, or an arena that has no
                room for it. Nothing has changed then.
        """
        check_name(name)
        with self._names.hold(name):
            self.info(name)
            entry = new_entry(self._bank, name, bound, read_as)
            check_covers(name, self.info(name).report, entry.report)
            return self._when_room(lambda: self._succeed(entry))

    def update_planned(
        self, name: str, update: PlannedUpdate, read_as: ReadAs | None = None
    ) -> AdapterInfo | None:
        """Like :meth:`update`, by a plan; None when it does not fit the stored version.

        From a GPU, and into a slot that no running batch uses, tensors go straight into a new
        region of the arena. Other adapters are loaded, used and updated meanwhile; a batch that
        begins to use this one has the old version, and keeps its slot.

        Raises:
            UnusualValuesError: values that are not finite there; nothing has changed.
            AdapterError: as :meth:`update`.
        """
        check_name(name)
        with self._names.hold(name):
            if not update.plan.is_like(self.info(name).report):
                return None
            entry = update.entry(self._bank, name, read_as)
            self._bank.check_fits(name, entry.packed)
            if entry.fill is not None:
                held = self._hold(entry)
                if held is not None:
                    return self._filled_update(entry, held)
                update.stage(entry, self._bank)
            return self._when_room(lambda: self._succeed(entry))

    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Within the block no other thread loads, updates or removes an adapter of this name."""
        check_name(name)
        with self._names.hold(name):
            yield

    def _hold(self, entry: Entry) -> Held | None:
        """Take a region for a new version; None where its slot is in use, or without room."""
        with self._lock:
            old = self._entry(entry.name)
            if old.slot is None or old.users or not self._residency.fits(entry):
                return None
            held = self._bank.hold(entry.name, entry.packed)
            self._filling += 1
            return held

    def _filled_update(self, entry: Entry, held: Held) -> AdapterInfo:
        """Fill a region without the lock, then let the entry have it, if its slot is still idle."""
        try:
            assert entry.fill is not None
            entry.fill(held.data)
            with self._lock:
                return self._succeed(entry, held)
        finally:
            with self._lock:
                self._bank.give_back(held)
                self._filling -= 1
                self._filled.notify_all()

    def _when_room(self, change: Callable[[], _Found]) -> _Found:
        """Make a change under the lock; where updates hold the room for it, when they are done."""
        with self._lock:
            while True:
                try:
                    return change()
                except NoRoomError:
                    if not self._filling:
                        raise
                self._filled.wait()

    def _succeed(self, entry: Entry, held: Held | None = None) -> AdapterInfo:
        """Let an entry take the name of an older version, and its slot when nobody uses that."""
        old = self._entry(entry.name)
        entry.read_as = entry.read_as or old.read_as
        entry.pinned, entry.last_use = old.pinned, old.last_use
        if old.slot is not None and not old.users:
            self._residency.replace(old, entry, held)
        self._residency.retire(old)
        return self._put(entry)

    def info(self, name: str) -> AdapterInfo:
        """See the store."""
        raise NotImplementedError

    def _entry(self, name: str) -> Entry:
        raise NotImplementedError

    def _put(self, entry: Entry) -> AdapterInfo:
        raise NotImplementedError
