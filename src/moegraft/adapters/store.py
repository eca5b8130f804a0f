"""The host store: adapters by name, and which of them are in the bank's slots."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from moegraft.adapters.bank import AdapterBank
from moegraft.adapters.bind import BoundAdapter
from moegraft.adapters.info import AdapterInfo, check_name, check_overflow, checksum_of
from moegraft.adapters.report import BindReport
from moegraft.errors import AdapterError
from moegraft.factors import PackedAdapter, pack_adapter


@dataclass
class _Entry:
    """A stored adapter's state; guarded by the store's lock."""

    name: str
    version: int
    checksum: str
    packed: PackedAdapter
    report: BindReport
    slot: int | None = None
    pinned: bool = False
    users: int = 0
    last_use: int = 0
    retired: bool = False


class AdapterStore:
    """Named adapters over one bank. Safe to use from several threads.

    Adapters stay on the host until removed; the bank holds the most recently used ones. A slot
    that a running batch uses is never reassigned: removing or replacing such an adapter takes its
    name away at once and frees the slot when the last user is done.

    Args:
        bank: the device bank.
    """

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._slots: list[_Entry | None] = [None] * bank.num_slots
        self._versions = itertools.count(1)
        self._clock = itertools.count(1)

    def add(self, name: str, bound: BoundAdapter) -> AdapterInfo:
        """Store an adapter; an existing one of that name is replaced by a new version.

        Raises:
            AdapterError: a bad name, a rank over the bank's maximum, or values that the model's
                dtype can't hold. Nothing has changed then.
        """
        check_name(name)
        self._bank.check_rank(name, bound.report.max_rank)
        pin = self._bank.device.type == "cuda"
        packed = pack_adapter(bound.factors, self._bank.layout, self._bank.dtype, pin)
        self._bank.check_fits(name, packed)
        check_overflow(name, packed)
        checksum = checksum_of(packed)
        with self._lock:
            entry = _Entry(name, next(self._versions), checksum, packed, bound.report)
            old = self._entries.get(name)
            if old is not None:
                entry.pinned = old.pinned
            self._entries[name] = entry
            if old is not None:
                self._retire(old)
            return self._info(entry)

    def remove(self, name: str) -> None:
        """Forget an adapter: its name at once, its memory when no running batch uses it."""
        with self._lock:
            entry = self._entry(name)
            self._retire(entry)
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
                raise AdapterError(
                    f"Can't pin {name!r}: {others} adapters are pinned already, the bank has "
                    f"{self._bank.num_slots} slots."
                )
            entry.pinned = pinned

    @contextmanager
    def use(self, names: Iterable[str | None]) -> Iterator[Mapping[str, int]]:
        """Bring adapters into slots and hold them there: name -> slot, None is left out.

        On a GPU the batch belongs on the stream that is current at both ends of the block. Batches
        on several streams may run at once: what one of them still reads is not overwritten.

        Raises:
            AdapterError: an unknown name, more distinct adapters than slots, or too few slots that
                are neither in use nor pinned; nothing has changed then. Or an arena of fixed size
                without room for all of them: idle adapters may have lost their slots by then, and
                some of these got theirs. All stay on the host, running batches are untouched, and
                none of these is held.
        """
        with self._lock:
            entries = self._acquire(sorted({name for name in names if name is not None}))
            self._bank.order.before_read()
        try:
            yield {entry.name: entry.slot for entry in entries if entry.slot is not None}
        finally:
            with self._lock:
                self._bank.order.after_read()
                for entry in entries:
                    entry.users -= 1
                    self._drop_if_done(entry)

    def freeze(self) -> None:
        """Let the bank's arena never move again, as graphs that hold its address need; once.

        An arena that may still grow first gets room for as many adapters as there are slots, each
        as large as the largest that was loaded so far. A larger one may then be refused.

        Raises:
            AdapterError: the device has no room for that; nothing has changed then.
        """
        with self._lock:
            if self._bank.frozen:
                return
            largest = max((e.packed.num_bytes for e in self._entries.values()), default=0)
            wanted = largest * self._bank.num_slots
            try:
                self._bank.reserve(wanted)
            except torch.OutOfMemoryError as error:
                raise AdapterError(
                    f"CUDA graphs need an arena that never moves: room for {self._bank.num_slots} "
                    f"adapters of {largest:,} bytes does not fit on the device; attach with a "
                    "smaller max_adapters, or with arena_bytes."
                ) from error
            self._bank.freeze()

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
            return self._info(self._entry(name))

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return all stored adapters, in the order of their names."""
        with self._lock:
            return tuple(self._info(self._entries[name]) for name in sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._entries

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _acquire(self, names: list[str]) -> list[_Entry]:
        if len(names) > self._bank.num_slots:
            raise AdapterError(
                f"The batch uses {len(names)} different adapters ({', '.join(names)}), the bank "
                f"has {self._bank.num_slots} slots: attach with max_adapters={len(names)} or split "
                "the batch."
            )
        entries = [self._entry(name) for name in names]
        missing = [entry for entry in entries if entry.slot is None]
        victims = self._victims(len(missing), keep=entries)
        acquired: list[_Entry] = []
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
        return entries

    def _evictable(self, keep: list[_Entry]) -> list[_Entry]:
        """Resident adapters that nobody uses or pinned, the least recently used first."""
        found = [
            held
            for held in self._slots
            if held is not None and not held.users and not held.pinned and held not in keep
        ]
        return sorted(found, key=lambda entry: entry.last_use)

    def _victims(self, count: int, keep: list[_Entry]) -> list[int]:
        """Choose slots to fill: free ones first, then the least recently used."""
        free = [slot for slot, held in enumerate(self._slots) if held is None]
        chosen = free + [e.slot for e in self._evictable(keep) if e.slot is not None]
        if len(chosen) < count:
            raise AdapterError(
                f"{count} adapters need a slot, but only {len(chosen)} of {self._bank.num_slots} "
                "are free or evictable; the others are pinned or in use by running batches."
            )
        return chosen[:count]

    def _place(self, entry: _Entry, slot: int, keep: list[_Entry]) -> None:
        """Write an entry into a slot, evicting what is there; more, when the arena is full."""
        held = self._slots[slot]
        if held is not None:
            self._vacate(held)
        while not self._bank.has_room(entry.packed):
            evictable = self._evictable(keep)
            if not evictable:
                break  # write() below says what is missing
            self._vacate(evictable[0])
        self._bank.write(slot, entry.name, entry.packed)
        entry.slot = slot
        self._slots[slot] = entry

    def _vacate(self, entry: _Entry) -> None:
        """Take an entry out of its slot; it stays on the host."""
        assert entry.slot is not None
        self._bank.clear(entry.slot)
        self._slots[entry.slot] = None
        entry.slot = None

    def _retire(self, entry: _Entry) -> None:
        entry.retired = True
        self._drop_if_done(entry)

    def _drop_if_done(self, entry: _Entry) -> None:
        if entry.retired and not entry.users and entry.slot is not None:
            self._vacate(entry)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            known = ", ".join(sorted(self._entries)) or "none"
            raise AdapterError(
                f"There is no adapter {name!r}; loaded: {known}. (None is the base model.)"
            )
        return self._entries[name]

    def _info(self, entry: _Entry) -> AdapterInfo:
        return AdapterInfo(
            name=entry.name,
            version=entry.version,
            checksum=entry.checksum,
            report=entry.report,
            slot=entry.slot,
            num_bytes=entry.packed.num_bytes,
            pinned=entry.pinned,
        )
