"""The host store: adapters by name, and which of them are in the bank's slots."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.bind import BoundAdapter
from moegraft.adapters.entry import Entry, new_entry
from moegraft.adapters.info import AdapterInfo, ReadAs, check_name, name_is_taken
from moegraft.adapters.name_locks import NameLocks
from moegraft.adapters.residency import Residency, distinct_names
from moegraft.adapters.store_updates import Updates
from moegraft.errors import AdapterError, MoegraftError, shorten, shown


class AdapterStore(Updates):
    """Named adapters over one bank. Safe to use from several threads.

    Loads and updates of different names are prepared side by side, those of one name one after the
    other; the bank changes under one lock, which nobody holds to wait for a GPU.

    Adapters stay on the host until removed; the bank holds the most recently used ones. A slot
    that a running batch uses is never reassigned: removing or replacing such an adapter takes its
    name away at once and frees the slot when the last user is done.
    """

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        self._lock = threading.RLock()
        self._names = NameLocks()
        self._entries: dict[str, Entry] = {}
        self._residency = Residency(bank)
        self._versions = itertools.count(1)
        self._filling = 0
        self._filled = threading.Condition(self._lock)

    def add(
        self,
        name: str,
        bound: BoundAdapter,
        read_as: ReadAs | None = None,
        memory: torch.Tensor | None = None,
        replace: bool = True,
    ) -> AdapterInfo:
        """Store an adapter; an existing one of that name is replaced by a new version.

        It comes into a slot at its next use; an older version that nobody uses leaves its slot now.

        Args:
            name: any printable label.
            bound: its factors.
            read_as: how they were read, for updates.
            memory: uint8 buffer that the factors are views of, given away: where it holds nothing
                else it becomes the stored adapter, and ``bound`` is of no use afterwards.
            replace: False = a name that is taken is an error, also when another thread takes it
                meanwhile.

        Raises:
            AdapterError: a bad name, a rank over the bank's maximum, values that the model's dtype
                can't hold, or a name that is taken. Nothing has changed then.
        """
        check_name(name)
        with self._names.hold(name):
            entry = new_entry(self._bank, name, bound, read_as, memory)
            with self._lock:
                old = self._entries.get(name)
                if old is not None and not replace:
                    raise name_is_taken(name, old.version)
                if old is not None:
                    entry.pinned = old.pinned
                    self._residency.retire(old)
                return self._put(entry)

    def remove(self, name: str) -> None:
        """Forget an adapter: its name at once, its memory when no running batch uses it."""
        check_name(name)
        with self._names.hold(name), self._lock:
            self._residency.retire(self._entry(name))
            del self._entries[name]

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter in its slot (or let it be evicted again). Takes effect at its next use.

        Raises:
            AdapterError: unknown name, or every slot would be pinned by others.
        """
        with self._lock:
            entry = self._entry(name)
            others = sum(e.pinned for e in self._entries.values() if e is not entry)
            if pinned and others >= self._bank.num_slots:
                slots = self._bank.num_slots
                raise AdapterError(
                    f"Can't pin {name!r}: {others} adapters are pinned, the bank has {slots} slots."
                )
            entry.pinned = pinned

    @contextmanager
    def use(
        self, names: Iterable[str | None], by_layer: bool = False
    ) -> Iterator[Mapping[str, int]]:
        """Bring adapters into slots and hold them there: name -> slot, None is left out.

        On a GPU the batch belongs on the stream that is current at both ends of the block. Batches
        on several streams may run at once: what one of them still reads is not overwritten.

        Args:
            names: the batch's adapters.
            by_layer: on a GPU, let every layer wait for its own factors when it asks
                :meth:`SiteTable.has_delta`, so that a batch begins while those of later layers are
                still being copied. Ahead of a graph's replay call :meth:`wait_for_copies`. False:
                the current stream waits for all of them here.

        Raises:
            AdapterError: an unknown name, more distinct adapters than slots, or too few slots that
                are neither in use nor pinned; nothing has changed then. Or an arena of fixed size
                without room for all of them: idle adapters may have lost their slots by then, and
                some of these got theirs; all stay on the host, and none of these is held. The
                same, as MoegraftError, if a growing one finds no memory.
        """
        names = list(names)

        def acquire() -> list[Entry]:
            entries = self._wanted(names)
            self._residency.acquire(entries)
            return entries

        entries = self._when_room(acquire)
        try:
            with self._lock:
                self._bank.order.before_read()
                if not by_layer:
                    self._bank.copies.wait()
            yield {entry.name: entry.slot for entry in entries if entry.slot is not None}
        finally:
            with self._lock:
                for entry in entries:
                    entry.users -= 1
                self._bank.order.after_read()
                self._residency.sweep()

    def check_batch(self, names: Iterable[str | None]) -> None:
        """Raise as :meth:`use` does for unknown names and more adapters than slots."""
        with self._lock:
            self._wanted(names)

    def wait_for_copies(self) -> None:
        """Let the current stream wait for all factors that are on their way into slots."""
        self._bank.copies.wait()

    def freeze(self) -> None:
        """Let the bank's arena never move again, as graphs that hold its address need; once.

        One that may still grow first gets room for as many adapters as there are slots, each as
        large as the largest that was loaded so far. A larger one may then be refused.

        Raises:
            AdapterError: the device has no room for that; nothing has changed then.
        """
        with self._lock:
            if self._bank.frozen:
                return
            largest = max((e.packed.num_bytes for e in self._entries.values()), default=0)
            try:
                self._bank.reserve(largest * self._bank.num_slots)
            except MoegraftError as error:
                raise AdapterError(
                    f"CUDA graphs need an arena that never moves: room for {self._bank.num_slots} "
                    f"adapters of {largest:,} bytes does not fit on the device; attach with a "
                    "smaller max_adapters, or with arena_bytes."
                ) from error
            self._bank.freeze()

    @property
    def bank(self) -> AdapterBank:
        """The device bank."""
        return self._bank

    @property
    def device(self) -> torch.device:
        """Where the bank is."""
        return self._bank.device

    @property
    def sites_version(self) -> int:
        """See :attr:`AdapterBank.sites_version`."""
        return self._bank.sites_version

    def info(self, name: str) -> AdapterInfo:
        """Return what is known of an adapter; AdapterError for an unknown name."""
        with self._lock:
            return self._entry(name).info()

    def read_as(self, name: str) -> ReadAs | None:
        """Return how an adapter was read, None if unknown; AdapterError for an unknown name."""
        with self._lock:
            return self._entry(name).read_as

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return all stored adapters, in the order of their names."""
        with self._lock:
            return tuple(self._entries[name].info() for name in sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._entries

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _wanted(self, names: Iterable[str | None]) -> list[Entry]:
        return [self._entry(name) for name in distinct_names(names, self._bank.num_slots)]

    def _put(self, entry: Entry) -> AdapterInfo:
        """Let an entry be the one of its name, under a new version."""
        entry.on_device = entry.fill = None
        entry.version = next(self._versions)
        self._entries[entry.name] = entry
        return entry.info()

    def _entry(self, name: str) -> Entry:
        if not isinstance(name, str) or name not in self._entries:
            known = shorten(sorted(self._entries), 20) or "none"
            raise AdapterError(
                f"There is no adapter {shown(name)}; loaded: {known}. (None is the base model.)"
            )
        return self._entries[name]
